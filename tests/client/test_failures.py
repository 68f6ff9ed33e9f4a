"""What goes wrong: statuses become the engine's own exceptions; what is tried again; what a broken stream leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2

from jaxllm import errors
from jaxllm.client import AuthError
from jaxllm.v1 import inference_pb2
from tests.client.fake_server import CODE, WHOLE, FakeServer, abort, deltas_of_whole, duration, reason, violation

FAILURES = [
    (CODE.INVALID_ARGUMENT, [reason("INVALID_PARAMETER"), violation("sampling.top_p")], errors.UserError, "top_p"),
    (CODE.INVALID_ARGUMENT, [violation("stop.stop_strings")], errors.UserError, "stop"),
    (CODE.INVALID_ARGUMENT, [violation("text")], errors.UserError, "prompt"),
    (CODE.INVALID_ARGUMENT, [], errors.UserError, None),
    (
        CODE.INVALID_ARGUMENT,
        [reason("UNSUPPORTED_PARAMETER"), violation("sampling.bad_words")],
        errors.UnsupportedError,
        "bad_words",
    ),
    (
        CODE.INVALID_ARGUMENT,
        [reason("CONTEXT_LENGTH_EXCEEDED", prompt_tokens="600", max_model_len="512")],
        errors.ContextLengthError,
        "prompt",
    ),
    (CODE.NOT_FOUND, [reason("MODEL_NOT_FOUND")], errors.NotFoundError, None),
    (CODE.FAILED_PRECONDITION, [reason("FEATURE_DISABLED")], errors.FeatureDisabledError, None),
    (CODE.UNIMPLEMENTED, [], errors.FeatureDisabledError, None),
    (CODE.ALREADY_EXISTS, [reason("REQUEST_ID_IN_USE")], errors.RequestIdInUseError, "request_id"),
    (CODE.OUT_OF_RANGE, [violation("start_sequence")], errors.UserError, "start_sequence"),
    (CODE.UNAUTHENTICATED, [reason("AUTH_MISSING")], AuthError, "api_key"),
    (CODE.PERMISSION_DENIED, [reason("ADMIN_REQUIRED")], AuthError, "api_key"),
    (CODE.RESOURCE_EXHAUSTED, [reason("QUEUE_FULL")], errors.OverloadedError, None),
    (CODE.RESOURCE_EXHAUSTED, [reason("SLOW_CONSUMER")], errors.SlowConsumerError, None),
    (CODE.UNAVAILABLE, [reason("NOT_READY")], errors.UnavailableError, None),
    (CODE.UNAVAILABLE, [reason("DRAINING")], errors.DrainingError, None),
    (CODE.UNAVAILABLE, [reason("ENGINE_DEAD")], errors.EngineDeadError, None),
    (CODE.INTERNAL, [reason("ENGINE_ERROR")], errors.RequestFailedError, None),
    (CODE.INTERNAL, [], errors.EngineError, None),
    (CODE.UNKNOWN, [], errors.EngineError, None),
    (CODE.DEADLINE_EXCEEDED, [], errors.DeadlineError, None),
]


@pytest.mark.parametrize(("code", "details", "error", "parameter"), FAILURES)
@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
def test_a_status_becomes_the_engines_own_exception(
    connect: Callable[..., Any],
    server: FakeServer,
    code: grpc.StatusCode,
    details: list[Message],
    error: type[Exception],
    parameter: str | None,
    is_stream: bool,
) -> None:
    client = connect(retries=False)
    failing = abort(code, "top_p must be in (0, 1],\n got 2.", *details)
    server.answers[inference_pb2.GenerateRequest] = server.answers["stream"] = failing
    with pytest.raises(error) as caught:
        client.stream("Hi").result() if is_stream else client.generate("Hi")
    assert type(caught.value) is error
    assert getattr(caught.value, "parameter", None) == parameter
    assert str(caught.value).endswith("top_p must be in (0, 1], got 2.")
    assert ("api_key=" in str(caught.value)) is (code is CODE.UNAUTHENTICATED)
    assert caught.value.__suppress_context__


def test_a_context_length_error_knows_the_lengths(client: Any, server: FakeServer) -> None:
    detail = reason("CONTEXT_LENGTH_EXCEEDED", prompt_tokens="600", max_model_len="512")
    server.answers[inference_pb2.GenerateRequest] = abort(CODE.INVALID_ARGUMENT, "too long", detail)
    with pytest.raises(errors.ContextLengthError) as caught:
        client.generate("Hi")
    assert (caught.value.num_prompt_tokens, caught.value.max_model_len) == (600, 512)


def test_an_overloaded_server_says_when_to_come_back(connect: Callable[..., Any], server: FakeServer) -> None:
    hint = error_details_pb2.RetryInfo(retry_delay=duration(2.5))
    failing = abort(CODE.RESOURCE_EXHAUSTED, "The queue is full.", reason("QUEUE_FULL"), hint)
    server.answers[inference_pb2.GenerateRequest] = failing
    with pytest.raises(errors.OverloadedError) as caught:
        connect(retries=False).generate("Hi")
    assert caught.value.retry_after == 2.5


def test_details_of_another_form_leave_the_status(connect: Callable[..., Any], server: FakeServer) -> None:
    def answer(context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata((("grpc-status-details-bin", b"\xff\xff"),))
        context.abort(CODE.NOT_FOUND, "no such thing")

    server.answers[inference_pb2.GenerateRequest] = answer
    with pytest.raises(errors.NotFoundError, match=r"^no such thing$"):
        connect().generate("Hi")


def test_a_request_that_is_too_large_is_the_callers_fault(connect: Callable[..., Any], server: FakeServer) -> None:
    with pytest.raises(
        errors.UserError, match=r"^The request is larger than the limit of 127\.0\.0\.1:\d+: "
    ) as caught:
        connect(retries=False).generate("x" * (2 << 20))
    assert caught.value.parameter == "prompt"
    assert not server.seen


@pytest.mark.ci
def test_a_server_that_is_not_there_is_named(connect: Callable[..., Any]) -> None:
    started = time.monotonic()
    with pytest.raises(errors.UnavailableError, match=r"^127\.0\.0\.1:1 cannot be reached: "):
        connect("127.0.0.1:1").generate("Hi")
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("code", [CODE.UNAVAILABLE, CODE.RESOURCE_EXHAUSTED])
@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
def test_a_busy_server_is_asked_four_times(
    connect: Callable[..., Any], server: FakeServer, code: grpc.StatusCode, is_stream: bool
) -> None:
    def busy(context: grpc.ServicerContext) -> Any:
        if len(server.seen) < 4:
            context.set_trailing_metadata((("grpc-retry-pushback-ms", "20"),))
            context.abort(code, "busy")
        return iter(deltas_of_whole()) if is_stream else WHOLE

    server.answers[inference_pb2.GenerateRequest] = server.answers["stream"] = busy
    client = connect()
    answer = client.stream("Hi").result() if is_stream else client.generate("Hi")
    assert answer.text == "Hi!"
    assert len(server.seen) == 4


def test_retries_can_be_switched_off(connect: Callable[..., Any], server: FakeServer) -> None:
    server.answers[inference_pb2.GenerateRequest] = abort(CODE.UNAVAILABLE, "busy", reason("NOT_READY"))
    with pytest.raises(errors.UnavailableError, match=r"^busy$"):
        connect(retries=False).generate("Hi")
    assert len(server.seen) == 1


def test_a_stream_that_fails_leaves_what_came_before(client: Any, server: FakeServer) -> None:
    def answer(context: grpc.ServicerContext) -> Iterator[Message]:
        yield deltas_of_whole()[0]
        abort(CODE.UNAVAILABLE, "The engine has stopped.", reason("ENGINE_DEAD"))(context)

    server.answers["stream"] = answer
    stream = client.stream("Hi")
    with pytest.raises(errors.EngineDeadError, match=r"^The engine has stopped\.$"):
        stream.result()
    assert [output.token_ids for output in stream.so_far.outputs] == [[7], [9]]
    assert stream.so_far.finish_reason is None
    assert len(server.seen) == 1  # a stream that has begun is not repeated
