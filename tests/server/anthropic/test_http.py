"""Anthropic's API over HTTP, in front of a scripted `Serving`: paths, keys and errors.

Its own client asks in tests/clients/test_anthropic.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from jaxllm.errors import OverloadedError, RequestFailedError
from jaxllm_server.shared.options import ServerOptions
from tests.server.anthropic.test_messages import MESSAGES, TOOLS
from tests.support.fake_serving import SCRIPT, FakeServing, http_server

BODY = {"model": "fake", "max_tokens": 64, "messages": MESSAGES}


@pytest.fixture
def server() -> Iterator[Any]:
    serving = FakeServing()
    with http_server(serving) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        yield SimpleNamespace(serving=serving, http=http)


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    body = answer.json()
    assert body["type"] == "error" and len(body["request_id"]) == 32
    return answer.status_code, body["error"]["type"], body["error"]["message"]


def test_a_message_whole_and_streamed(server: Any) -> None:
    message = server.http.post("/v1/messages?beta=true", json=BODY).json()
    assert message["content"] == [{"type": "text", "text": "".join(SCRIPT)}]
    assert message["id"] == f"msg_{server.serving.calls[0].request_id}" and message["model"] == "fake"
    answer = server.http.post("/v1/messages", json={**BODY, "stream": True, "thinking": {"type": "adaptive"}})
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [block.split("\n", 1) for block in answer.text.split("\n\n")[:-1]]
    told = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert [name for name, _ in events] == [f"event: {event['type']}" for event in told]
    assert [e["delta"]["text"] for e in told if e["type"] == "content_block_delta"] == SCRIPT


def test_tokens_are_counted(server: Any) -> None:
    body = {"model": "fake", "messages": MESSAGES, "tools": TOOLS, "system": "s", "tool_choice": {"type": "auto"}}
    assert server.http.post("/v1/messages/count_tokens", json=body).json() == {"input_tokens": 3}
    assert error_of(server.http.post("/v1/messages/count_tokens", json={**body, "model": "x"}))[0] == 404


def test_every_failure_has_anthropics_form(server: Any) -> None:
    post = server.http.post
    for path, sent, status, kind, words in (
        ("/v1/messages", {"json": {}}, 400, "invalid_request_error", "messages must be"),
        ("/v1/messages", {"json": {**BODY, "max_token": 1}}, 400, "invalid_request_error", "max_token"),
        ("/v1/messages", {"json": {**BODY, "model": "x"}}, 404, "not_found_error", "does not exist"),
        ("/v1/messages", {"content": "{}"}, 415, "invalid_request_error", "application/json"),
        ("/v1/messages", {"json": {"a": "x" * (9 << 20)}}, 413, "request_too_large", "larger"),
        ("/v1/messages/batches", {"json": {}}, 404, "not_found_error", "Unknown path"),
        (
            "/v1/v1/messages",
            {"json": {}},
            404,
            "not_found_error",
            "Set the client's base URL to this server's address.",
        ),
    ):
        told = error_of(post(path, **sent))
        assert told[:2] == (status, kind) and words in told[2]
    assert error_of(server.http.get("/v1/messages"))[:2] == (405, "invalid_request_error")
    server.serving.is_full = True
    assert error_of(post("/v1/messages", json=BODY))[:2] == (429, "rate_limit_error")
    assert "type" not in post("/v1/chat/completions", json=BODY).json()


def test_a_stream_that_fails_ends_with_an_error(server: Any) -> None:
    server.serving.failure, server.serving.fails_at = OverloadedError("full", 1.0), 0
    answer = server.http.post("/v1/messages", json={**BODY, "stream": True})
    assert error_of(answer)[:2] == (429, "rate_limit_error") and answer.headers["retry-after"] == "1"
    server.serving.failure, server.serving.fails_at = RequestFailedError("The step failed."), 2
    answer = server.http.post("/v1/messages", json={**BODY, "stream": True})
    *_, last = answer.text.strip().split("\n\n")
    assert last.startswith("event: error\n") and "message_stop" not in answer.text
    told = json.loads(last.partition("data: ")[2])
    assert told["error"] == {"type": "api_error", "message": "The step failed."}


def test_a_key_comes_in_either_header_or_in_both() -> None:
    with (
        http_server(FakeServing(), ServerOptions(api_key=("one", "two"))) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as http,
    ):
        for headers, status in (
            ({}, 401),
            ({"x-api-key": "one"}, 200),
            ({"authorization": "Bearer two"}, 200),
            ({"authorization": "Bearer one", "x-api-key": "one"}, 200),
            ({"authorization": "Bearer one", "x-api-key": "two"}, 401),
            ({"authorization": "Bearer one", "x-api-key": "zero"}, 401),
            ({"x-api-key": "zero"}, 401),
            ([("x-api-key", "one"), ("x-api-key", "two")], 401),
        ):
            answer = http.post("/v1/messages", json=BODY, headers=headers)
            assert answer.status_code == status
            if status == 401:
                assert error_of(answer)[:2] == (401, "authentication_error")
            assert http.get("/v1/models", headers=headers).status_code == status


def test_models_are_listed_as_the_client_knows_them(server: Any) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    page = server.http.get("/v1/models", headers=headers).json()
    assert [each["id"] for each in page["data"]] == ["fake", "org/alias"]
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "fake", "org/alias")
    assert server.http.get("/v1/models/fake", headers=headers).json() == page["data"][0]
    assert server.http.get("/v1/models").json()["object"] == "list"
