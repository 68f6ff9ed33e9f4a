"""Checks requests before routing: head size, Host, Origin, API key, body size.

Uses the raw path, which encoding, host name or case cannot disguise (vLLM CVE-2026-48746).
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxllm_server.access.auth import Keys, only_header
from jaxllm_server.access.client_quota import client_of
from jaxllm_server.http.error_bodies import Headers, Refusal, body_too_large
from jaxllm_server.http.forwarded import Proxies
from jaxllm_server.shared.options import LOOPBACK, ServerOptions

CLIENT = "jaxllm.client"
PROBES = frozenset({b"/health", b"/live", b"/ready", b"/ping"})  # need neither key nor known host
OPEN_PATHS = PROBES | {b"/", b"/docs", b"/openapi.json"}  # need no key; the last three reveal only the routes
_WRONG_HOST = (
    "The Host header names an unknown host. Start the server with --allowed-hosts and that name, or let "
    " the proxy in front of it send `Host: localhost`."
)
# Also as prefixes of the decoded path: the router matches "/%6coad" and "/load\n" to "/load".
ADMIN_PATHS = (
    *("/drain", "/load", "/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    *("/sleep", "/wake_up", "/is_sleeping", "/pause", "/resume", "/is_paused"),
    *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
    "/weight_info",
)
_HOST = re.compile(rb"(\[[0-9a-fA-F:.]{2,45}\]|[A-Za-z0-9_.-]{1,253})(?::[0-9]{1,5})?")
_PREFLIGHT_SECONDS = b"600"  # browsers' cache time
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]+")


class Guard:
    """ASGI middleware that raises a `Refusal` or an error of `auth`."""

    def __init__(self, app: ASGIApp, options: ServerOptions, keys: Keys) -> None:
        self._app = app
        self._options = options
        self._keys = keys
        self._root = options.root_path.rstrip("/")
        self._proxies = Proxies(options.forwarded_allow_ips)
        self._checks_host = (options.is_loopback and options.uds is None) or bool(options.allowed_hosts)
        self._hosts = {name.lower().strip("[]") for name in (*LOOPBACK, options.host, *options.allowed_hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        options = self._options
        headers = _read_headers(scope, options)
        host = _read_host(scope, headers)
        scope = _without_root(scope, self._root)
        is_known = not self._checks_host or "*" in options.allowed_hosts or host is None or host in self._hosts
        if not is_known and scope["raw_path"] not in PROBES:
            raise Refusal(421, _WRONG_HOST, "MISDIRECTED_REQUEST")  # possible DNS rebinding
        self._check_origin(headers, host)
        is_preflight = scope["method"] == "OPTIONS" and b"access-control-request-method" in headers
        if is_preflight and b"origin" in headers and options.allowed_origins:
            await _answer_preflight(headers, send)
            return
        if scope["raw_path"] not in OPEN_PATHS:
            key = self._keys.check(_authorization(headers), admin=scope["path"].startswith(ADMIN_PATHS))
            forwarded = [value.decode("latin-1") for value in headers.get(b"x-forwarded-for", [])]
            scope[CLIENT] = client_of(key, self._proxies.client_of((scope.get("client") or ("",))[0], forwarded))
        # RFC 9110 and llhttp allow trailing spaces and tabs.
        length = headers.get(b"content-length", [b"0"])[0].strip(b" \t")
        if not length.isdigit():
            raise Refusal(400, "Content-Length must be a number.", "BAD_HEADER", closes=True)
        most = options.body_limit(scope["path"])
        if len(length) > 18 or int(length) > most:
            raise body_too_large(most)
        codings = headers.get(b"transfer-encoding", [b"chunked"])
        if len(codings) > 1 or codings[0].lower() != b"chunked":  # the parser ignores the gzip of "gzip, chunked"
            raise Refusal(400, "Only the Transfer-Encoding chunked is accepted.", "TRANSFER_ENCODING", closes=True)
        await self._app(scope, receive, send)

    def cors_headers(self, scope: Scope) -> Headers:
        if not self._options.allowed_origins:
            return []
        origin = next((value for name, value in scope["headers"] if name == b"origin"), None)
        if origin is None or not self._is_allowed(origin):
            return [(b"vary", b"origin")]
        exposed = b"x-request-id, retry-after, retry-after-ms, warnings"
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", exposed),
            (b"vary", b"origin"),
        ]

    def _check_origin(self, headers: dict[bytes, list[bytes]], host: str | None) -> None:
        """Refuse web pages of other origins (Ray CVE-2025-62593)."""
        for origin in headers.get(b"origin", []):
            # Its own origin needs a known host, because of DNS rebinding.
            is_own = host in self._hosts and _authority(origin) == headers[b"host"][0].lower()
            if not is_own and not self._is_allowed(origin):
                message = "Requests from web pages of this origin are not accepted; see --allowed-origins."
                raise Refusal(403, message, "ORIGIN", "permission_denied")

    def _is_allowed(self, origin: bytes) -> bool:
        allowed = self._options.allowed_origins
        return "*" in allowed or origin.decode("latin-1") in allowed


def request_id_of(scope: Scope, options: ServerOptions) -> str | None:
    """Return X-Request-Id; raise Refusal if unsafe for logs."""
    values = [value for name, value in scope["headers"] if name == b"x-request-id"]
    if not values:
        return None
    text = values[0].decode("latin-1")
    if len(values) > 1 or not is_request_id(text, options):
        most = options.max_request_id_chars
        message = f"X-Request-Id must be 1 to {most} characters of A-Z, a-z, 0-9, '.', '_' and '-'."
        raise Refusal(400, message, "BAD_HEADER", parameter="X-Request-Id")
    return text


def is_request_id(text: str, options: ServerOptions) -> bool:
    return len(text) <= options.max_request_id_chars and _REQUEST_ID.fullmatch(text) is not None


def _read_headers(scope: Scope, options: ServerOptions) -> dict[bytes, list[bytes]]:
    pairs: list[tuple[bytes, bytes]] = list(scope["headers"])
    size = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
    size += sum(len(name) + len(value) + 4 for name, value in pairs)
    if len(pairs) > options.max_headers or size > options.max_header_bytes:
        message = f"The request's head is larger than {options.max_headers} lines or {options.max_header_bytes} bytes."
        raise Refusal(431, message, "HEAD_TOO_LARGE", closes=True)
    headers: dict[bytes, list[bytes]] = {}
    for name, value in pairs:
        headers.setdefault(name.lower(), []).append(value)
    return headers


def _read_host(scope: Scope, headers: dict[bytes, list[bytes]]) -> str | None:
    values = headers.get(b"host", [])
    if not values and scope.get("http_version") == "1.0":
        return None
    match = _HOST.fullmatch(values[0]) if len(values) == 1 else None
    if match is None:
        raise Refusal(400, "The request must have one valid Host header.", "BAD_HEADER", closes=True)
    return match[1].decode("ascii").lower().strip("[]")


def _authority(origin: bytes) -> bytes | None:
    try:
        return urlsplit(origin.lower()).netloc
    except ValueError:
        return None


def _authorization(headers: dict[bytes, list[bytes]]) -> str | None:
    """Return Authorization, or x-api-key in its form; both may be sent with equal keys."""
    values = headers.get(b"authorization", [])
    keys = [b"Bearer " + value for value in headers.get(b"x-api-key", [])]
    given = keys if values == keys else values + keys
    return only_header([value.decode("utf-8", "surrogateescape") for value in given])


def _without_root(scope: Scope, root: str) -> Scope:
    """Remove the root path, which a proxy or uvicorn adds."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    path: str = scope["path"]
    if root:
        prefix = f"{root}/"
        for _ in range(2):  # a proxy may keep it, and uvicorn adds it
            if path.startswith(prefix) and raw.startswith(prefix.encode()):
                path, raw = path[len(root) :], raw[len(root.encode()) :]
    return {**scope, "root_path": "", "path": path, "raw_path": raw}


async def _answer_preflight(headers: dict[bytes, list[bytes]], send: Send) -> None:
    wanted = headers.get(b"access-control-request-headers", [b"authorization, content-type"])[0]
    answer: list[Any] = [
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-allow-headers", wanted),
        (b"access-control-max-age", _PREFLIGHT_SECONDS),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": answer})
    await send({"type": "http.response.body"})
