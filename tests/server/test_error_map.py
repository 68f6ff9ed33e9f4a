"""Every failure of a call to a healthy server, provoked for real, in each protocol.

gRPC: status and reason; HTTP: status, code and type; jaxllm's client: exception. test_error_map_phases covers a server
that is loading, draining or dead.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2

from jaxllm import errors
from jaxllm.v1 import control_pb2, inference_pb2
from tests.support.failures import (
    INVALID,
    LONG,
    SMALL,
    TOO_LONG,
    WRONG,
    Grpc,
    Request,
    asked,
    eventually,
    over_grpc,
    over_http,
)
from tests.support.grpc_site import bearer, details_of
from tests.support.serving_process import ServingProcess

USER, ADMIN = "user-key", "admin-key"
LIMIT = 100_000  # bytes of a message and of a body


# A real process with two slots, two queue places, and keys.


@pytest.fixture(scope="module")
def server() -> Iterator[ServingProcess]:
    own = ("--max-queued-requests", "2", "--api-key", USER, "--admin-api-key", ADMIN)
    limits = ("--max-body-bytes", f"{LIMIT}", "--grpc-max-message-bytes", f"{LIMIT}")
    with ServingProcess(*SMALL, *own, *limits) as server:
        yield server


@pytest.fixture(scope="module")
def rpc(server: ServingProcess) -> Iterator[Grpc]:
    with grpc.insecure_channel(server.grpc, [("grpc.max_send_message_length", -1)]) as channel:
        yield Grpc(channel)


@pytest.fixture(scope="module")
def http(server: ServingProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.http, headers={"authorization": f"Bearer {USER}"}, timeout=20) as http:
        yield http


def load_of(rpc: Grpc) -> Any:
    return rpc.control.GetLoad(control_pb2.GetLoadRequest(), metadata=bearer(ADMIN))


def is_idle(rpc: Grpc) -> bool:
    load = load_of(rpc)
    return not (load.running or load.waiting or load.kv_blocks_used)


WRONG_CALLS = [
    ("value", {"sampling": {"top_p": 2.0}}, INVALID, {"top_p": 2.0}, WRONG),
    ("prompt", {"token_ids": {"ids": []}}, INVALID, {"prompt": []}, WRONG),
    ("token id", {"token_ids": {"ids": [99_999]}}, INVALID, {"prompt": [99_999]}, WRONG),
    (
        "unbuilt",
        {"output": {"token_bytes": True}},
        ("INVALID_ARGUMENT", "UNSUPPORTED_PARAMETER", errors.UnsupportedError),
        {"thinking_token_budget": 1},
        (400, "unsupported_parameter", "invalid_request_error"),
    ),
    (
        "prompt of the context's length",
        {"token_ids": {"ids": [5] * 512}},
        TOO_LONG,
        {"prompt": [5] * 512},
        (400, "context_length_exceeded", "invalid_request_error"),
    ),
    (
        "output over the context",
        {"stop": {"max_tokens": 512}},
        TOO_LONG,
        {"max_tokens": 512},
        (400, "context_length_exceeded", "invalid_request_error"),
    ),
    (
        "least output over the context",
        {"stop": {"min_tokens": 512}},
        TOO_LONG,
        {"max_tokens": 512, "min_tokens": 512},
        (400, "context_length_exceeded", "invalid_request_error"),
    ),
    (
        "model",
        {"model": "other"},
        ("NOT_FOUND", "MODEL_NOT_FOUND", errors.NotFoundError),
        {"model": "other"},
        (404, "model_not_found", "not_found"),
    ),
]


@pytest.mark.parametrize("row", WRONG_CALLS, ids=lambda row: row[0])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_calls_that_are_wrong(rpc: Grpc, http: httpx.Client, row: Any, stream: bool) -> None:
    _, fields, told, body, answer = row
    method = rpc.inference.StreamGenerate if stream else rpc.inference.Generate
    request = Request(**({"text": "Once"} if "token_ids" not in fields else {}), **fields)
    assert over_grpc(lambda: method(request, metadata=bearer(USER))) == told
    response = http.post("/v1/completions", json=asked(**body) | {"stream": stream})
    assert over_http(response) == answer
    begins = response.json()["error"]["message"].startswith("This model's maximum context length is 512 tokens")
    assert begins == (answer[1] == "context_length_exceeded")


def test_a_violation_names_the_field(rpc: Grpc, http: httpx.Client) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        rpc.inference.Generate(Request(text="a", sampling={"top_p": 2.0}), metadata=bearer(USER))
    (violation,) = details_of(caught.value)["BadRequest"].field_violations
    assert violation.field == "sampling.top_p"
    assert http.post("/v1/completions", json=asked(top_p=2.0)).json()["error"]["param"] == "top_p"
    with pytest.raises(grpc.RpcError) as caught:
        rpc.inference.Generate(Request(token_ids={"ids": [5] * 600}), metadata=bearer(USER))
    metadata = details_of(caught.value)["ErrorInfo"].metadata
    assert (metadata["prompt_tokens"], metadata["max_model_len"]) == ("600", "512")


def test_a_length_that_nobody_has_counted_is_told_as_a_bound(rpc: Grpc, http: httpx.Client) -> None:
    long = "x" * 90_000
    messages = [{"role": "user", "content": long}]
    for path, body in (
        ("/v1/completions", {"prompt": long}),
        ("/v1/chat/completions", {"messages": messages}),
        ("/tokenize", {"prompt": long}),
        ("/tokenize", {"messages": messages}),
    ):
        said = http.post(path, json=body).json()["error"]["message"]
        assert said.startswith(
            "This model's maximum context length is 512 tokens. However, your prompt contains at least "
        ), (path, said)
    with pytest.raises(grpc.RpcError) as caught:
        rpc.inference.Generate(Request(chat={"messages": messages}), metadata=bearer(USER))
    assert "contains at least" in (caught.value.details() or "")
    assert details_of(caught.value)["ErrorInfo"].metadata["max_model_len"] == "512"


def test_what_this_server_could_be_but_is_not(rpc: Grpc, http: httpx.Client) -> None:
    disabled = ("FAILED_PRECONDITION", "FEATURE_DISABLED", errors.FeatureDisabledError)
    user, admin = {"metadata": bearer(USER)}, {"metadata": bearer(ADMIN)}
    calls: list[Callable[[], Any]] = [
        lambda: rpc.inference.Embed(inference_pb2.EmbedRequest(text="a"), **user),
        lambda: rpc.inference.Generate(Request(text="a", adapter="b"), **user),
        lambda: rpc.inference.Generate(
            Request(
                chat={
                    "messages": [{"role": "user", "content": "a"}],
                    "tools_json": '[{"type": "function", "function": {"name": "f"}}]',
                }
            ),
            **user,
        ),
        lambda: rpc.control.LoadAdapter(control_pb2.LoadAdapterRequest(), **admin),
        lambda: rpc.control.UnloadAdapter(control_pb2.UnloadAdapterRequest(), **admin),
        lambda: rpc.control.StreamKvEvents(control_pb2.StreamKvEventsRequest(), **admin),
    ]
    assert [over_grpc(call) for call in calls] == [disabled] * len(calls)
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    }
    refused = (400, "feature_disabled", "invalid_request_error")
    assert over_http(http.post("/v1/chat/completions", json=body)) == refused
    admin_http = {"authorization": f"Bearer {ADMIN}"}
    for path in ("load", "unload"):
        assert over_http(http.post(f"/v1/{path}_lora_adapter", json={}, headers=admin_http)) == refused


@contextmanager
def full_house(rpc: Grpc) -> Iterator[None]:
    """Two requests run and two wait."""
    request = Request(text="Once", stop=LONG)
    streams = [rpc.inference.StreamGenerate(request, metadata=bearer(USER)) for _ in range(4)]
    eventually(lambda: (load_of(rpc).running, load_of(rpc).waiting) == (2, 2))
    yield
    for stream in streams:
        stream.cancel()
    eventually(lambda: is_idle(rpc))


def test_a_full_queue_is_told_at_once(rpc: Grpc, http: httpx.Client) -> None:
    refused: dict[str, list[float]] = {"grpc": [], "http": []}
    with full_house(rpc):
        while len(refused["grpc"]) < 15:
            began = time.monotonic()
            told = over_grpc(lambda: rpc.inference.Generate(Request(text="a"), metadata=bearer(USER)))
            refused["grpc"].append(time.monotonic() - began)
            assert told == ("RESOURCE_EXHAUSTED", "QUEUE_FULL", errors.OverloadedError)
            began = time.monotonic()
            response = http.post("/v1/completions", json=asked())
            refused["http"].append(time.monotonic() - began)
            assert over_http(response) == (429, "rate_limit_exceeded", "rate_limit_error")
        health = httpx.get(f"{http.base_url}/health")
        assert health.status_code == 200, "full is not ill"
    assert {name: statistics.median(times) < 0.02 for name, times in refused.items()} == {"grpc": True, "http": True}


def test_what_never_fits_is_refused_for_good(rpc: Grpc, http: httpx.Client) -> None:
    """Two requests may run and two wait."""
    for body, name, asked_for in (
        (
            {"n": 5, "temperature": 1.0},
            "n",
            "n must be at most 4, the number that can run and wait on this server; got 5.",
        ),
        ({"prompt": ["a"] * 5}, "prompt", "n times the number of prompts must be at most 4, the number"),
        ({"prompt": ["a"] * 3, "n": 2, "temperature": 1.0}, "n", "got 2 times 3."),
    ):
        for stream in (False, True):
            response = http.post("/v1/completions", json=asked(**body) | {"stream": stream})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, name) and asked_for in error["message"], error
    request = Request(text="a", sampling={"temperature": 1.0, "n": 5})
    assert over_grpc(lambda: rpc.inference.Generate(request, metadata=bearer(USER))) == INVALID
    assert http.post("/v1/completions", json=asked(prompt=["a"] * 4)).status_code == 200
    stream = rpc.inference.StreamGenerate(Request(text="Once", stop=LONG), metadata=bearer(USER))
    eventually(lambda: load_of(rpc).running == 1)
    response = http.post("/v1/completions", json=asked(prompt=["a"] * 4))
    assert over_http(response) == (429, "rate_limit_exceeded", "rate_limit_error"), (
        "there is room for it at other times"
    )
    stream.cancel()
    eventually(lambda: is_idle(rpc))


def test_while_it_is_paused(rpc: Grpc, http: httpx.Client) -> None:
    not_ready = ("UNAVAILABLE", "NOT_READY", errors.UnavailableError)
    stream = rpc.inference.StreamGenerate(Request(text="Once", stop=LONG), metadata=bearer(USER))
    next(stream)
    rpc.control.PauseGeneration(control_pb2.PauseGenerationRequest(), metadata=bearer(ADMIN))
    reasons = [delta.finish_reason for message in stream for delta in message.deltas]
    assert reasons[-1] == 5  # FINISH_REASON_ABORTED, with status OK
    try:
        assert over_grpc(lambda: rpc.inference.Generate(Request(text="a"), metadata=bearer(USER))) == not_ready
        assert over_http(http.post("/v1/completions", json=asked())) == (503, "not_ready", "service_unavailable")
        assert http.get("/ready").status_code == 503 and http.get("/live").status_code == 200
        check = health_pb2.HealthCheckRequest()
        eventually(lambda: rpc.health.Check(check).status == health_pb2.HealthCheckResponse.NOT_SERVING, 1.0)
        control = health_pb2.HealthCheckRequest(service="jaxllm.v1.ControlService")
        assert rpc.health.Check(control).status == health_pb2.HealthCheckResponse.SERVING
    finally:
        rpc.control.ResumeGeneration(control_pb2.ResumeGenerationRequest(), metadata=bearer(ADMIN))
    assert http.post("/v1/completions", json=asked()).status_code == 200
    eventually(lambda: rpc.health.Check(check).status == health_pb2.HealthCheckResponse.SERVING, 1.0)


def test_a_message_is_one_short_line_that_can_be_shown_whatever_it_repeats() -> None:
    for said in ("a\r\nGET / HTTP/1.1", "\x1b[31mred", "\0", "\ud800", "\u202e", "\U0010ffff" * 10**6, "x" * 10**6):
        message = str(errors.UserError(f"There is no {said}; leave it out."))
        assert message.startswith("There is no ") and message.endswith("; leave it out.")
        assert message.isprintable() and message.encode() and len(message) <= errors.MOST_MESSAGE
    assert str(errors.UserError("naïve 日本語 🎉")) == "naïve 日本語 🎉"
