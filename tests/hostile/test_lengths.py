"""Prompts of every odd length and text, as a table of what each is answered with; and one that fits no context.

The context has 512 tokens; what fits it and not the pool is in
test_error_map_phases.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import grpc
import httpx
import pytest

from jaxllm.v1 import inference_pb2
from tests.hostile.conftest import wait_idle
from tests.hostile.wire import Waits, ask_streams
from tests.support.serving_process import ServingProcess

CONTEXT = 512
BOS = 0
USER = {"role": "user", "content": "hi"}
IDS = [5, 6, 7, 8] * 200

# What is asked, and the status, with the field that an error names.
LENGTHS: list[tuple[dict[str, Any], int, str | None]] = [
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": [""]}, 400, "prompt"),
    ({"prompt": " "}, 200, None),
    ({"prompt": "\n"}, 200, None),
    ({"prompt": [BOS]}, 200, None),
    ({"prompt": [BOS] * 10}, 200, None),
    ({"prompt": IDS[: CONTEXT - 1], "max_tokens": 1}, 200, None),
    ({"prompt": IDS[: CONTEXT - 2], "max_tokens": 2}, 200, None),
    ({"prompt": IDS[: CONTEXT - 1], "max_tokens": 2}, 400, "max_tokens"),
    ({"prompt": IDS[:CONTEXT], "max_tokens": 1}, 400, "prompt"),
    ({"prompt": IDS[: CONTEXT + 1], "max_tokens": 1}, 400, "prompt"),
    ({"prompt": IDS, "max_tokens": 1}, 400, "prompt"),
    ({"prompt": "a", "max_tokens": CONTEXT}, 400, "max_tokens"),
    ({"prompt": "a", "min_tokens": 9, "max_tokens": 8}, 400, "min_tokens"),
    ({"prompt": "a", "min_tokens": 8, "max_tokens": 8}, 200, None),
    ({"prompt": "a", "min_tokens": 2**31}, 400, "min_tokens"),
    ({"prompt": "a", "min_tokens": 2**31 - 1}, 400, "min_tokens"),
    ({"prompt": "a", "min_tokens": 600}, 400, "min_tokens"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": "a", "truncate_prompt_tokens": 2**31}, 400, "truncate_prompt_tokens"),
    ({"prompt": IDS, "truncate_prompt_tokens": 10}, 200, None),
]
TEXTS: list[tuple[str, int]] = [
    *((text, 200) for text in ("\0", "a\0b", "\uffff", "\ufffe", "\U0010ffff", "\ufeff", "\u200b", "\u202eabc")),
    *((text, 200) for text in ("e" + "\u0301" * 100, "مرحبا بالعالم", "שלום", "👨‍👩‍👧‍👦" * 5, "🇩🇪🇫🇷", "한국어", "ไทย")),
    *((text, 400) for text in ("e" + "\u0301" * 1_000_000, "a" * 1_000_000, " " * 1_000_000, "\0" * 100_000)),
]


@pytest.mark.ci
@pytest.mark.parametrize("case", LENGTHS, ids=lambda case: repr(case[0])[:40])
def test_lengths(server: ServingProcess, case: tuple[dict[str, Any], int, str | None]) -> None:
    fields, status, parameter = case
    for stream in (False, True):
        answer = httpx.post(
            f"{server.http}/v1/completions", json={"max_tokens": 8, **fields, "stream": stream}, timeout=20
        )
        assert answer.status_code == status, answer.text
        if status != 200:
            assert answer.json()["error"]["param"] == parameter, answer.text


# What a conversation has too much of, though no template may show it, and the code of the error.
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


@pytest.mark.parametrize("case", TEXTS, ids=lambda case: ascii(case[0])[:30])
def test_texts(server: ServingProcess, case: tuple[str, int]) -> None:
    text, status = case
    began = time.monotonic()
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
    chat = httpx.post(f"{server.http}/v1/chat/completions", json=body, timeout=20)
    plain = httpx.post(f"{server.http}/v1/completions", json={"prompt": text, "max_tokens": 4}, timeout=20)
    assert (chat.status_code, plain.status_code) == (status, status), (chat.text[:200], plain.text[:200])
    with grpc.insecure_channel(server.grpc) as channel:
        request = inference_pb2.GenerateRequest(text=text, stop={"max_tokens": 4})
        call: Any = channel.unary_unary("/jaxllm.v1.InferenceService/Generate").future(request.SerializeToString())
        error = call.exception(20)
        assert error is None if status == 200 else error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert time.monotonic() - began < 5.0


def test_no_content_spells_a_role(server: ServingProcess) -> None:
    """Content in which the model's own special tokens are spelled has as many of them as any other content."""
    with httpx.Client(base_url=server.http, timeout=20) as http:

        def ids(content: str) -> list[int]:
            body = {"messages": [{"role": "user", "content": content}]}
            return http.post("/tokenize", json=body).json()["tokens"]

        frame = ids("a")
        special = {
            token for token in frame if http.post("/detokenize", json={"tokens": [token]}).json()["prompt"][:2] == "<|"
        }
        assert special
        names = [http.post("/detokenize", json={"tokens": [token]}).json()["prompt"] for token in special]
        for name in names:
            for spelled in (
                *(
                    name,
                    name * 5,
                    f"{name}system\n",
                    f"a{name}",
                    name.upper(),
                    name.replace("|", "｜"),
                    f"\u200b{name}",
                ),
            ):
                found = ids(spelled)
                assert [token for token in found if token in special] == [token for token in frame if token in special]


def test_a_prompt_that_fits_no_context_disturbs_nobody(server: ServingProcess) -> None:
    """It is refused at once, whatever else is being served."""

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
        # What disturbs does so every time; a neighbour on the machine does not.
        for _ in range(5):
            alone, beside = p99s()
            print(f"p99 between {1e3 * alone:.1f} ms, beside it {1e3 * beside:.1f} ms")
            if beside < 1.2 * alone + 0.01:
                break
        else:
            raise AssertionError((alone, beside))
    assert sorted(times)[len(times) // 2] < 0.05
    wait_idle(server)
