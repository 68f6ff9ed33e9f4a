"""Which answer an exception becomes on each protocol: one table, read by the gRPC and the HTTP front end.

Pure. Knows names of status codes; knows neither library.
"""

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
    """No key came with the call, or one that is not known."""

    def __init__(self, message: str, is_missing: bool) -> None:
        super().__init__(message)
        self.is_missing = is_missing


class AdminRequiredError(Exception):
    """A valid key came with the call, but it does not open the control service."""


class Row(NamedTuple):
    """How one class of failure is reported."""

    grpc: str  # name of a grpc.StatusCode
    reason: str  # of google.rpc.ErrorInfo; `code_of` makes the code of an OpenAI error of it
    http: int
    kind: str  # `type` of an OpenAI error
    retry: bool = False  # whether the same request may succeed later, here or elsewhere


# From the particular to the general: the first class that an error is an instance of counts.
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
# OpenAI's codes, for which clients look, where they differ from the reason in lower case.
_OPENAI_CODES = {
    "AUTH_MISSING": "invalid_api_key",
    "AUTH_INVALID": "invalid_api_key",
    "QUEUE_FULL": "rate_limit_exceeded",
    "ROUTE_NOT_FOUND": "unknown_url",
    "METHOD_NOT_ALLOWED": "method_not_supported",
}


def code_of(reason: str) -> str:
    """Return the `code` of an OpenAI error: OpenAI's own where it has one, as context_length_exceeded."""
    return _OPENAI_CODES.get(reason, reason.lower())


def row_of(error: BaseException) -> Row:
    """Return how an error is reported; an unexpected one is the server's own failure."""
    if isinstance(error, AuthError):
        reason = "AUTH_MISSING" if error.is_missing else "AUTH_INVALID"
        return Row("UNAUTHENTICATED", reason, 401, "authentication_error")
    return next((row for kind, row in _ROWS if isinstance(error, kind)), _UNKNOWN)


def message_of(error: BaseException) -> str:
    """Return what a client may read: our own words; a fixed text if the words are not ours.

    Foreign exception texts hold addresses and paths (vLLM CVE-2026-54236).
    """
    is_ours = isinstance(error, UserError | AuthError | AdminRequiredError) or (
        isinstance(error, EngineError) and type(error) is not EngineError
    )
    return str(error) if is_ours else UNKNOWN_FAILURE
