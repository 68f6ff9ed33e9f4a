"""Converts errors to HTTP answers in the API's form."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException

from jaxllm.errors import EngineError, OverloadedError, printable
from jaxllm_server.anthropic import errors as anthropic
from jaxllm_server.http.sse import dumps
from jaxllm_server.ollama.replies import PATHS as OLLAMA_PATHS
from jaxllm_server.openai.replies import error_body, error_body_of
from jaxllm_server.shared.error_table import row_of

_log = logging.getLogger("jaxllm.server.http")
Headers = list[tuple[bytes, bytes]]

UNAVAILABLE_RETRY_SECONDS = 1
_CLOSE = (b"connection", b"close")
_SHOWN_PATH = 128
_VERSION = re.compile(r"/(v[0-9]+/)?")
_UNDER_V1 = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/models")
_MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")  # Anthropic's clients add /v1
# Other servers' routes, by the first path segment after the version.
_UNSERVED: Mapping[str, str] = {
    "embed": "Cohere's embed API is not supported by jaxllm yet; use /v1/embeddings.",
    "audio": "jaxllm makes no speech; it writes speech down at /v1/audio/transcriptions.",
    "realtime": "jaxllm does not support conversations in speech.",
    "images": "jaxllm does not support image models.",
    "moderations": "jaxllm does not support moderation models; use /classify with a classifier.",
    **dict.fromkeys(
        ("files", "batches", "fine_tuning", "assistants", "threads"), "this server stores no files and no jobs."
    ),
}
_RETRIED_BY_CLIENTS = (408, 409, 429)  # by OpenAI's


class ClientGone(Exception):
    """The client disconnected before the answer."""


class Refusal(Exception):
    """A refusal specific to HTTP."""

    def __init__(
        self,
        status: int,
        message: str,
        reason: str,
        kind: str = "invalid_request_error",
        *,
        parameter: str | None = None,
        closes: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.kind = kind
        self.parameter = parameter
        self.closes = closes


def body_too_large(max_body_bytes: int) -> Refusal:
    message = f"The body is larger than this server's limit of {max_body_bytes} bytes."
    return Refusal(413, message, "BODY_TOO_LARGE", closes=True)


def nothing_at(path: str) -> Refusal:
    shown = printable(path[:_SHOWN_PATH])
    why = _UNSERVED.get(_VERSION.sub("", path, count=1).partition("/")[0])
    if why is not None:
        return Refusal(404, f"{shown} is not served: {why}", "FEATURE_DISABLED", "not_found")
    asked = path.lower().rstrip("/")
    near = next((own for own in (*_UNDER_V1, *_MESSAGES) if asked.endswith(own.removeprefix("/v1"))), None)
    hint = "" if near is None else f" Did you mean {near}?"
    if near is not None and near != asked:
        hint += f" Set the client's base URL to this server's address{'' if near in _MESSAGES else ' and /v1'}."
    return Refusal(404, f"Unknown path {shown}.{hint}", "ROUTE_NOT_FOUND", "not_found")


def is_anthropics(path: str) -> bool:
    return _MESSAGES[0] in path


def status_of(error: BaseException) -> int:
    if isinstance(error, Refusal):
        return error.status
    return error.status_code if isinstance(error, HTTPException) else row_of(error).http


def answer_of(error: BaseException, path: str = "", request_id: str = "") -> tuple[int, Headers, bytes]:
    status = status_of(error)
    if isinstance(error, Refusal):
        body = error_body(str(error), error.kind, error.parameter, error.reason)
    elif isinstance(error, HTTPException):
        message = "Method not allowed for this path; see the Allow header."
        body = error_body(message, "invalid_request_error", None, "METHOD_NOT_ALLOWED")
    else:
        body = error_body_of(error)
    content = dumps(_in_form_of(path, status, body, request_id))
    headers: Headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    if isinstance(error, Refusal) and error.closes:
        headers.append(_CLOSE)
    if isinstance(error, HTTPException):
        headers += _encoded(error.headers or {})
    return status, headers + _retry_headers(error, status), content


def log_failure(request_name: str, error: BaseException) -> None:
    """Log errors of the server, except overload."""
    if status_of(error) < 500:
        return
    if status_of(error) == 503:
        _log.warning("requests fail: %s", error)  # all requests fail
    elif isinstance(error, EngineError):
        _log.warning("request %s failed: %s", request_name, error)
    else:
        _log.error("request %s failed", request_name, exc_info=error)


def _in_form_of(path: str, status: int, body: dict[str, Any], request_id: str) -> dict[str, Any]:
    message, parameter = body["error"]["message"], body["error"]["param"]
    if is_anthropics(path):
        return anthropic.error_body(status, message, parameter, request_id)
    return {"error": message} if path.endswith(OLLAMA_PATHS) else body


def _retry_headers(error: BaseException, status: int) -> Headers:
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
