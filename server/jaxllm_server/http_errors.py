"""How a failure is told over HTTP: status, headers and a body in OpenAI's form.

What the engine and `Serving` raise has its row in `errors.py`; what only HTTP knows is a `Refusal`. What the server is
to blame for goes to the log as well. Knows no server.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from starlette.exceptions import HTTPException

from jaxllm.errors import EngineError, OverloadedError
from jaxllm_server.errors import row_of
from jaxllm_server.openai_messages import error_body, error_body_of
from jaxllm_server.sse import dumps

_log = logging.getLogger("jaxllm.server.http")
Headers = list[tuple[bytes, bytes]]

UNAVAILABLE_RETRY_SECONDS = 1  # until another replica, or this one once it is loaded, may answer
_CLOSE = (b"connection", b"close")
_RETRIED_BY_CLIENTS = (408, 409, 429)  # beside 5xx: OpenAI's client tries these again unless it is told not to


class ClientGone(Exception):
    """The client closed the connection before it had its answer; there is nobody to tell."""


class Refusal(Exception):
    """A request that HTTP itself is reason enough to refuse."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        kind: str = "invalid_request_error",
        *,
        parameter: str | None = None,
        closes: bool = False,  # the connection: the rest of the request is not read
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.kind = kind
        self.parameter = parameter
        self.closes = closes


def body_too_large(max_body_bytes: int) -> Refusal:
    """Return the refusal of a body, of which no more is read."""
    message = f"The body is larger than the {max_body_bytes} bytes that this server takes."
    return Refusal(413, message, "BODY_TOO_LARGE", closes=True)


def status_of(error: BaseException) -> int:
    """Return the status that an error is told with."""
    if isinstance(error, Refusal):
        return error.status
    return error.status_code if isinstance(error, HTTPException) else row_of(error).http


def answer_of(error: BaseException) -> tuple[int, Headers, bytes]:
    """Return status, headers and body that tell a client of an error."""
    status = status_of(error)
    if isinstance(error, Refusal):
        body = error_body(str(error), error.kind, error.parameter, error.code)
    elif isinstance(error, HTTPException):
        body = _routing_body(status)
    else:
        body = error_body_of(error)
    content = dumps(body)
    headers: Headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    if isinstance(error, Refusal) and error.closes:
        headers.append(_CLOSE)
    if isinstance(error, HTTPException):
        headers += _encoded(error.headers or {})
    return status, headers + _retry_headers(error, status), content


def log_failure(request_name: str, error: BaseException) -> None:
    """Write down what the client is not told; a request that is wrong, or one too many, is no event of the server's."""
    if status_of(error) < 500:
        return
    if status_of(error) == 503:
        _log.warning("requests fail: %s", error)  # whichever they are, until the engine is well
    elif isinstance(error, EngineError):
        _log.warning("request %s failed: %s", request_name, error)
    else:
        _log.error("request %s failed", request_name, exc_info=error)


def _routing_body(status: int) -> dict[str, dict[str, object]]:
    if status == 405:
        return error_body("This path does not take this method.", "invalid_request_error", None, "METHOD_NOT_ALLOWED")
    return error_body("There is nothing at this path.", "not_found", None, "ROUTE_NOT_FOUND")


def _retry_headers(error: BaseException, status: int) -> Headers:
    """Return when to try again, or that it is of no use."""
    if status == 401:
        return [(b"www-authenticate", b"Bearer")]
    if isinstance(error, Refusal | HTTPException) or (status not in _RETRIED_BY_CLIENTS and status < 500):
        return []
    if not row_of(error).retry:
        return [(b"x-should-retry", b"false")]
    seconds = error.retry_after if isinstance(error, OverloadedError) else UNAVAILABLE_RETRY_SECONDS
    return [(b"retry-after", b"%d" % math.ceil(seconds)), (b"retry-after-ms", b"%d" % math.ceil(1000 * seconds))]


def _encoded(headers: Mapping[str, str]) -> Headers:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
