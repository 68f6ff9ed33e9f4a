"""Writes error bodies in Anthropic's form. Pure."""

from __future__ import annotations

from typing import Any

from jaxllm.errors import UserError
from jaxllm_server.shared.error_table import message_of, row_of

# By HTTP status (https://docs.anthropic.com/en/api/errors; 529 is 503 here).
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


# A hint to retry without it. `anthropic` 2.14's agent loop sends a `thread`, and drops it on this error
# (lib/threads/_thread_state.py).
_DETAILS = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}


def error_body(status: int, message: str, parameter: str | None, request_id: str) -> dict[str, Any]:
    """Return a body in Anthropic's form, whose message names the parameter."""
    if parameter is not None and parameter not in message:
        message = f"{parameter}: {message}"
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": message}
    if parameter in _DETAILS:
        error["details"] = _DETAILS[parameter]
    return {"type": "error", "error": error, "request_id": request_id}


def error_body_of(error: BaseException, request_id: str) -> dict[str, Any]:
    parameter = error.parameter if isinstance(error, UserError) else None
    return error_body(row_of(error).http, message_of(error), parameter, request_id)
