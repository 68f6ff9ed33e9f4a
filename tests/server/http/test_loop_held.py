"""How long each route holds the event loop with its largest bodies; the routes are the app's own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from jaxllm_server.http.endpoints import Endpoints
from jaxllm_server.observability.tracing import Tracer
from jaxllm_server.shared.options import ServerOptions
from tests.support import fake_serving
from tests.support.fake_serving import FakeServing, http_server

MOST = 0.05  # seconds of the loop's thread


def bodies() -> dict[str, bytes]:
    """Make bodies of 8 MB, and of as many values as a body may hold."""
    text, tool = "x" * 7_900_000, {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    said = {"role": "user", "content": "a"}
    plain = {"model": "fake", "prompt": "a", "messages": [said], "input": "a", "max_tokens": 1}
    made: dict[str, dict[str, Any]] = {
        "a text": {"prompt": text, "messages": [{"role": "user", "content": text}], "name": text},
        "an input": {"input": text, "text_1": text, "text_2": text, "query": text, "documents": [text[:9]]},
        "ids": {"prompt": [7] * 3_900_000, "input": [7] * 9, "tokens": [7] * 9},
        "tokens": {"tokens": [7] * 3_900_000},
        "prompts": {"prompt": ["a"] * 400_000, "input": ["a"] * 99, "texts": ["a"] * 99},
        "inputs": {"input": ["a"] * 400_000, "documents": ["a"] * 99, "text_2": ["a"] * 99},
        "messages": {"messages": [said] * 100_000, "input": [said] * 9},
        "items": {"input": [said] * 100_000},
        "tools": {"tools": [tool] * 40_000},
        "a tool": {"tools": [{"type": "function", "name": "f", "function": {"name": "f", "description": text}}]},
        "biases": {"logit_bias": {str(number): 1 for number in range(400_000)}},
        "stops": {"stop": ["a"] * 400_000, "bad_words": ["a"] * 9},
        "metadata": {"metadata": {str(number): "a" for number in range(200_000)}},
        "a schema": {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": {"enum": ["a"] * 400_000}},
            }
        },
        "unknown": {f"x{number}": 1 for number in range(200_000)},
    }
    return {name: json.dumps(plain | own).encode() for name, own in made.items()}


@contextmanager
def held_loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Give a list whose one number is the longest that the loop's thread has worked between two turns of a timer."""
    longest, is_started = [0.0], False
    make = fake_serving.make_app

    async def tick() -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0.0005)
            now = time.thread_time()
            longest[0], last = max(longest[0], now - last), now

    def made(*given: Any) -> Any:
        app = make(*given)

        async def timed(scope: Any, receive: Any, send: Any) -> None:
            nonlocal is_started
            if not is_started:
                is_started = True
                timed.task = asyncio.ensure_future(tick())  # type: ignore[attr-defined]
            await app(scope, receive, send)

        return timed

    monkeypatch.setattr(fake_serving, "make_app", made)
    yield longest


def routes(serving: FakeServing, options: ServerOptions) -> list[tuple[str, str]]:
    found = Endpoints(serving, options, None, Tracer()).routes()  # type: ignore[arg-type]
    assert all(isinstance(each, Route) for each in found)
    return [(method, each.path) for each in found for method in sorted(each.methods) if method != "HEAD"]


@pytest.mark.ci
def test_no_route_holds_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ServerOptions(max_body_bytes=8 << 20, lora_root=None)
    serving = FakeServing(options=options)
    large = bodies()
    over: dict[tuple[str, str, str], float] = {}
    with held_loop(monkeypatch) as longest, http_server(serving, options) as port:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
            for method, path in routes(serving, options):
                at = path.replace("{response_id}", "resp_1").replace("{model:path}", "fake")
                for name, body in large.items() if method == "POST" else [("none", b"")]:
                    longest[0] = 0.0
                    headers = {"content-type": "application/json"}
                    status = client.request(method, at, content=body, headers=headers).status_code
                    if method == "POST":
                        print(path, name, status, round(longest[0], 3))
                    assert status < 500 or status == 503, (method, path, name, status)
                    time.sleep(0.002)
                    if longest[0] > MOST:
                        over[method, path, name] = round(longest[0], 3)
    assert not over
