"""Maps exceptions to statuses of gRPC and HTTP. Pure."""

from __future__ import annotations

from typing import NamedTuple

from jaxllm.errors import (
    AdapterNotFoundError,
    ContextLengthError,
    DeadlineError,
    DrainingError,
    EngineDeadError,
    EngineError,
    FeatureDisabledError,
    NotFoundError,
    OutOfRangeError,
    OverloadedError,
    RequestFailedError,
    RequestIdInUseError,
    SlowConsumerError,
    UnavailableError,
    UnsupportedError,
    UserError,
)

UNKNOWN_FAILURE = "The server failed to answer this request; its log has the details."


class AuthError(Exception):
    """The key is missing or unknown."""

    def __init__(self, message: str, is_missing: bool) -> None:
        super().__init__(message)
        self.is_missing = is_missing


class AdminRequiredError(Exception):
    """The key lacks admin rights."""


class Row(NamedTuple):
    """The status of a class of errors."""

    grpc: str
    reason: str  # google.rpc.ErrorInfo's; `code_of` converts it to OpenAI's code
    http: int
    kind: str  # OpenAI's `type`
    retry: bool = False  # on any server


# The first match applies: subclasses precede base classes.
_ROWS: tuple[tuple[type[BaseException], Row], ...] = (
    (UnsupportedError, Row("INVALID_ARGUMENT", "UNSUPPORTED_PARAMETER", 400, "invalid_request_error")),
    (ContextLengthError, Row("INVALID_ARGUMENT", "CONTEXT_LENGTH_EXCEEDED", 400, "invalid_request_error")),
    (AdapterNotFoundError, Row("NOT_FOUND", "ADAPTER_NOT_FOUND", 404, "not_found")),
    (NotFoundError, Row("NOT_FOUND", "MODEL_NOT_FOUND", 404, "not_found")),
    (FeatureDisabledError, Row("FAILED_PRECONDITION", "FEATURE_DISABLED", 400, "invalid_request_error")),
    (RequestIdInUseError, Row("ALREADY_EXISTS", "REQUEST_ID_IN_USE", 409, "invalid_request_error")),
    (OutOfRangeError, Row("OUT_OF_RANGE", "SEQUENCE_LOST", 400, "invalid_request_error")),
    (UserError, Row("INVALID_ARGUMENT", "INVALID_PARAMETER", 400, "invalid_request_error")),
    (OverloadedError, Row("RESOURCE_EXHAUSTED", "QUEUE_FULL", 429, "rate_limit_error", retry=True)),
    (SlowConsumerError, Row("RESOURCE_EXHAUSTED", "SLOW_CONSUMER", 408, "timeout")),
    (DrainingError, Row("UNAVAILABLE", "DRAINING", 503, "service_unavailable", retry=True)),
    (UnavailableError, Row("UNAVAILABLE", "NOT_READY", 503, "service_unavailable", retry=True)),
    (EngineDeadError, Row("UNAVAILABLE", "ENGINE_DEAD", 503, "service_unavailable", retry=True)),
    (DeadlineError, Row("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", 504, "timeout")),
    (RequestFailedError, Row("INTERNAL", "ENGINE_ERROR", 500, "server_error")),
    (AdminRequiredError, Row("PERMISSION_DENIED", "ADMIN_REQUIRED", 403, "permission_denied")),
)
_UNKNOWN = Row("INTERNAL", "ENGINE_ERROR", 500, "server_error")
# Where the code is not the reason in lower case.
_OPENAI_CODES = {
    "AUTH_MISSING": "invalid_api_key",
    "AUTH_INVALID": "invalid_api_key",
    "QUEUE_FULL": "rate_limit_exceeded",
    "ROUTE_NOT_FOUND": "unknown_url",
    "METHOD_NOT_ALLOWED": "method_not_supported",
}


def code_of(reason: str) -> str:
    return _OPENAI_CODES.get(reason, reason.lower())


def row_of(error: BaseException) -> Row:
    if isinstance(error, AuthError):
        reason = "AUTH_MISSING" if error.is_missing else "AUTH_INVALID"
        return Row("UNAUTHENTICATED", reason, 401, "authentication_error")
    return next((row for kind, row in _ROWS if isinstance(error, kind)), _UNKNOWN)


def message_of(error: BaseException) -> str:
    """Return the message for a client: errors of jaxllm have theirs, except a plain EngineError, others a fixed text.

    Other messages can contain addresses and paths (vLLM CVE-2026-54236).
    """
    is_ours = isinstance(error, UserError | AuthError | AdminRequiredError) or (
        isinstance(error, EngineError) and type(error) is not EngineError
    )
    return str(error) if is_ours else UNKNOWN_FAILURE
