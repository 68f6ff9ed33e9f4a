"""Errors of failed calls over HTTP and gRPC, read by real clients, with a check that they leak nothing."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from jaxllm import errors
from jaxllm.client.channel import error_of as exception_of
from jaxllm.v1 import control_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.support.grpc_site import details_of
from tests.support.sizes import FEW_SLOTS, flags

SMALL = flags(FEW_SLOTS)
LONG = {"max_tokens": 480, "ignore_eos": True}
# Must not appear in any answer: traces, addresses, paths, names of exceptions.
SECRETS = re.compile(
    r"Traceback|\.py\b|0x[0-9a-fA-F]{4}|/home|/work|/tmp|/root|/usr|127\.0\.0\.1|<class|[a-z](Error|Exception)\b"
)
INVALID = ("INVALID_ARGUMENT", "INVALID_PARAMETER", errors.UserError)
TOO_LONG = ("INVALID_ARGUMENT", "CONTEXT_LENGTH_EXCEEDED", errors.ContextLengthError)
WRONG = (400, "invalid_parameter", "invalid_request_error")

Request = inference_pb2.GenerateRequest


class Grpc:
    """The stubs of a channel."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.inference: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        self.control: Any = control_pb2_grpc.ControlServiceStub(channel)
        self.health: Any = health_pb2_grpc.HealthStub(channel)
        self.reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)


def grpc_failure(error: Any) -> tuple[str, str, type]:
    """Return status, reason and exception type; check that nothing leaks, and the retry delay."""
    details = details_of(error)
    info = details.get("ErrorInfo")
    assert SECRETS.search(error.details() or "") is None, error.details()
    assert info is None or info.domain == "jaxllm"
    trailers = dict(error.trailing_metadata() or ())
    is_full = info is not None and info.reason == "QUEUE_FULL"
    assert ("grpc-retry-pushback-ms" in trailers) == ("RetryInfo" in details) == is_full
    if is_full:
        assert int(trailers["grpc-retry-pushback-ms"]) == details["RetryInfo"].retry_delay.ToMilliseconds() > 0
    return error.code().name, "" if info is None else info.reason, type(exception_of(error, "the server"))


def over_grpc(call: Callable[[], Any]) -> tuple[str, str, type]:
    """Make a call that must fail, unary or streaming."""
    with pytest.raises(grpc.RpcError) as caught:
        answer = call()
        if hasattr(answer, "__iter__"):
            list(answer)
    return grpc_failure(caught.value)


def over_http(response: httpx.Response) -> tuple[int, str, str]:
    """Return status, code and type of an error; check its form and the retry delay."""
    assert SECRETS.search(response.text) is None, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert ("retry-after" in response.headers) == (response.status_code in (429, 503)), response.headers
    assert response.headers["content-type"] == "application/json"
    return response.status_code, error["code"], error["type"]


def eventually(is_so: Callable[[], object], seconds: float = 5.0, between: float = 0.01) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(between)


def asked(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Once", "max_tokens": 4} | fields
