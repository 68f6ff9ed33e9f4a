"""Converts exceptions to gRPC statuses with google.rpc details. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from jaxllm.client.options import CHAT_FIELDS, GENERATE_FIELDS, STREAM_FIELDS
from jaxllm.errors import ContextLengthError, OverloadedError, UserError
from jaxllm.v1 import inference_pb2
from jaxllm_server.grpc.replies import duration_of
from jaxllm_server.shared.error_table import message_of, row_of

ERROR_DOMAIN = "jaxllm"
# Keeps trailers below 2 KiB; with 30 KB clients lost the status and the last message (measured).
MAX_ERROR_BYTES = 320
MAX_PATH_CHARS = 128
_POOL_REQUESTS = (inference_pb2.EmbedRequest, inference_pb2.ClassifyRequest, inference_pb2.ScoreRequest)
_PATHS: Mapping[str, str] = {
    **GENERATE_FIELDS,
    **STREAM_FIELDS,
    **CHAT_FIELDS,
    "tokens": "token_ids",
    "messages": "chat.messages",
    **{name: f"sampling.beam_search.{name}" for name in ("length_penalty", "early_stopping")},
    "template_kwargs": "chat.template_kwargs",
}
_PROMPT_ONEOFS = ("prompt", "input")


@dataclass(frozen=True)
class Failure:
    """A failed call's status."""

    code: str
    status: status_pb2.Status  # grpc-status-details-bin; its message is the call's
    pushback_ms: int | None  # grpc-retry-pushback-ms


def failure_of(error: BaseException, request: Message | None = None, request_id: str = "") -> Failure:
    """Convert an error to a status with google.rpc details: reason, field path, retry delay.

    `request` resolves the prompt's path. Messages of unexpected errors are hidden.
    """
    row = row_of(error)
    parameter = error.parameter if isinstance(error, UserError) else None
    message = _shortened(message_of(error))
    metadata: dict[str, str] = {}
    if isinstance(error, ContextLengthError):
        metadata = {"prompt_tokens": str(error.num_prompt_tokens), "max_model_len": str(error.max_model_len)}
    if request_id:
        metadata["request_id"] = request_id
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=row.reason, domain=ERROR_DOMAIN, metadata=metadata)]
    if parameter is not None and row.grpc in ("INVALID_ARGUMENT", "OUT_OF_RANGE"):
        path = path_of(parameter, request)
        violation = error_details_pb2.BadRequest.FieldViolation(field=path, description=message, reason=row.reason)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    pushback_ms = None
    if isinstance(error, OverloadedError):
        pushback_ms = max(1, math.ceil(error.retry_after * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=duration_of(error.retry_after)))
    return Failure(row.grpc, _status_of(row.grpc, message, details), pushback_ms)


def _status_of(code: str, message: str, details: Iterable[Message]) -> status_pb2.Status:
    status = status_pb2.Status(code=code_pb2.Code.Value(code), message=message)
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def path_of(parameter: str, request: Message | None) -> str:
    """Return the path of the field that a parameter names."""
    if isinstance(request, _POOL_REQUESTS):
        is_score = isinstance(request, inference_pb2.ScoreRequest)
        inputs = "text_1" if is_score else request.WhichOneof("input") or "input"
        return {"inputs": inputs, "pairs": "text_2"}.get(parameter, parameter)[:MAX_PATH_CHARS]
    if request is not None and parameter in _PROMPT_ONEOFS:
        oneof = next((name for name in _PROMPT_ONEOFS if name in request.DESCRIPTOR.oneofs_by_name), None)
        return (request.WhichOneof(oneof) or oneof) if oneof is not None else "token_ids"
    if parameter == "structured_outputs" and isinstance(request, inference_pb2.GenerateRequest):
        kind = request.structured_output.WhichOneof("constraint")
        return _PATHS[parameter] if kind is None else f"{_PATHS[parameter]}.{kind}"
    return _PATHS.get(parameter, parameter)[:MAX_PATH_CHARS]


def _shortened(message: str) -> str:
    encoded = message.encode("utf-8", "replace")
    if len(encoded) <= MAX_ERROR_BYTES:
        return encoded.decode()
    return encoded[: MAX_ERROR_BYTES - 3].decode("utf-8", "ignore") + "..."
