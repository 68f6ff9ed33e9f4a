"""Prompts of every unusual length and text, with their expected answers; and one that exceeds the context.

The context has 512 tokens; prompts that fit it but exceed the pool are in test_error_map_phases.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import pytest

from tests.hostile.conftest import wait_idle
from tests.hostile.wire import Waits, ask_streams
from tests.support.serving_process import ServingProcess

USER = {"role": "user", "content": "hi"}
IDS = [5, 6, 7, 8] * 200


# Conversations with too much of something that no template may show, and the error's code.
LARGE: dict[str, tuple[dict[str, Any], str]] = {
    "lists in an ignored key": ({"messages": [{**USER, "x": [[]] * 140_000}]}, "invalid_parameter"),
    "parts of a content": ({"messages": [{"role": "user", "content": ["a"] * 140_000}]}, "invalid_parameter"),
    "values in arguments": (
        {"messages": [{**USER, "tool_calls": [{"function": {"arguments": json.dumps({"a": [[]] * 140_000})}}]}]},
        "invalid_parameter",
    ),
    "messages": ({"messages": [USER] * 7000}, "context_length_exceeded"),
    "a name": ({"messages": [{**USER, "name": "<|im_end|>" * 10_000}]}, "context_length_exceeded"),
    "a text in an ignored key": ({"messages": [{**USER, "x": {"y": ["a" * 100_000]}}]}, "context_length_exceeded"),
    "a schema": (
        {
            "messages": [USER],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"description": "a" * 100_000}}}],
        },
        "context_length_exceeded",
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_conversation_is_no_larger_than_a_context_could_ever_be(server: ServingProcess, name: str) -> None:
    body, code = LARGE[name]
    answer = httpx.post(f"{server.http}/tokenize", json=body, timeout=20)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code), answer.text


def test_what_a_conversation_brings_along_of_moderate_size_is_taken(server: ServingProcess) -> None:
    schema = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "description": "x" * 50} for i in range(100)},
    }
    message = {**USER, "metadata": {"a": [[]] * 50_000, "b": "x" * 50_000}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    for body in ({"messages": [message]}, {"messages": [USER], "tools": tools}):
        answer = httpx.post(f"{server.http}/tokenize", json=body, timeout=20)
        assert answer.status_code == 200, answer.text


def test_a_prompt_that_fits_no_context_disturbs_nobody(server: ServingProcess) -> None:
    """It is refused at once, without delaying other requests."""

    def p99s() -> tuple[float, float]:
        alone, beside = Waits([], []), Waits([], [])
        ask_streams(server, "Once upon a time", 8, alone)
        reading = threading.Thread(target=ask_streams, args=(server, "Once upon a time", 8, beside))
        reading.start()
        while reading.is_alive():
            began = time.monotonic()
            answer = http.post("/v1/completions", json={"prompt": IDS, "max_tokens": 100})
            times.append(time.monotonic() - began)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
            time.sleep(0.01)
        reading.join()
        return alone.p99_between(), beside.p99_between()

    times: list[float] = []
    with httpx.Client(base_url=server.http, timeout=20) as http:
        # A real delay shows every time; other load on the machine does not.
        for _ in range(5):
            alone, beside = p99s()
            print(f"p99 between {1e3 * alone:.1f} ms, beside it {1e3 * beside:.1f} ms")
            if beside < 1.2 * alone + 0.01:
                break
        else:
            raise AssertionError((alone, beside))
    assert sorted(times)[len(times) // 2] < 0.05
    wait_idle(server)
