"""Convert gRPC statuses into the engine's exceptions."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from jaxllm import errors
from jaxllm.client.options import keyword_of


class AuthError(errors.UserError):
    """The API key is missing, wrong or without admin rights."""


def read_error(code: str, message: str, details: bytes | None, target: str) -> errors.UserError | errors.EngineError:
    """Return the exception for a failed call; `code` is the status's name, `details` a serialized google.rpc.Status."""
    text = " ".join(message.split()) or code
    info, violation, delay = _details(details)
    reason = info.reason
    parameter = keyword_of(violation) if violation else None
    if code == "INVALID_ARGUMENT" and reason == "CONTEXT_LENGTH_EXCEEDED":
        prompt_tokens, length = (info.metadata.get(key, "") for key in ("prompt_tokens", "max_model_len"))
        return errors.ContextLengthError(text, int(prompt_tokens or 0), int(length or 0), parameter or "prompt")
    if code == "RESOURCE_EXHAUSTED" and not reason and "larger than max" in message:
        return errors.UserError(f"The request is larger than the limit of {target}: {text}", "prompt")
    if code == "RESOURCE_EXHAUSTED" and reason != "SLOW_CONSUMER":
        return errors.OverloadedError(text, delay)
    if code == "UNAVAILABLE" and not reason and _HTTP1 in text:
        advice = "give the gRPC port (50051 unless --grpc-port says otherwise)"
        return errors.UnavailableError(f"{target} cannot be reached: it answers in HTTP/1, not gRPC; {advice}.")
    if code == "UNAVAILABLE" and not reason:
        return errors.UnavailableError(f"{target} cannot be reached: {text}")
    if code == "UNIMPLEMENTED" and not reason:
        return errors.FeatureDisabledError(f"{target} does not support this call; is it a jaxllm server? {text}")
    if code == "UNAUTHENTICATED":
        return AuthError(f"`api_key=` of the client: {text}", "api_key")
    if code == "PERMISSION_DENIED":
        return AuthError(text, "api_key")
    user = _USER_ERRORS.get(reason) or _USER_ERRORS.get(code)
    if user is not None:
        return user(text, "request_id" if user is errors.RequestIdInUseError else parameter)
    return (_ENGINE_ERRORS.get(reason) or _ENGINE_ERRORS.get(code, errors.EngineError))(text)


_USER_ERRORS = {
    "UNSUPPORTED_PARAMETER": errors.UnsupportedError,
    "INVALID_ARGUMENT": errors.UserError,
    "OUT_OF_RANGE": errors.UserError,
    "ADAPTER_NOT_FOUND": errors.AdapterNotFoundError,
    "NOT_FOUND": errors.NotFoundError,
    "FAILED_PRECONDITION": errors.FeatureDisabledError,
    "UNIMPLEMENTED": errors.FeatureDisabledError,
    "ALREADY_EXISTS": errors.RequestIdInUseError,
}
_ENGINE_ERRORS = {
    "SLOW_CONSUMER": errors.SlowConsumerError,
    "DRAINING": errors.DrainingError,
    "ENGINE_DEAD": errors.EngineDeadError,
    "ENGINE_ERROR": errors.RequestFailedError,
    "UNAVAILABLE": errors.UnavailableError,
    "DEADLINE_EXCEEDED": errors.DeadlineError,
}
_HTTP1 = "http1.x server"  # gRPC's text for an HTTP/1 peer (chttp2_transport.cc)
_RETRY_AFTER = 1.0  # seconds, without a hint


def _details(packed: bytes | None) -> tuple[error_details_pb2.ErrorInfo, str, float]:
    info, violation, delay = error_details_pb2.ErrorInfo(), "", _RETRY_AFTER
    status = status_pb2.Status()
    try:
        status.ParseFromString(packed or b"")
    except DecodeError:
        return info, violation, delay
    for detail in status.details:
        bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad) and bad.field_violations:
            violation = bad.field_violations[0].field
        elif detail.Unpack(retry):
            delay = retry.retry_delay.ToNanoseconds() / 1e9
        else:
            detail.Unpack(info)
    return info, violation, delay
