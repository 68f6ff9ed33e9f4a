"""The HTTP server as an ASGI app."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from starlette.routing import Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm_server.access.auth import Keys
from jaxllm_server.http.endpoints import Endpoints
from jaxllm_server.http.error_bodies import (
    ClientGone,
    Headers,
    answer_of,
    is_anthropics,
    log_failure,
    nothing_at,
    status_of,
)
from jaxllm_server.http.guard import Guard, request_id_of
from jaxllm_server.http.protocol import transport_of
from jaxllm_server.observability.tracing import Tracer
from jaxllm_server.requests.unknown_fields import warnings_of
from jaxllm_server.shared.options import ServerOptions

if TYPE_CHECKING:
    from jaxllm_server.observability.prometheus import PrometheusObserver
    from jaxllm_server.serving import Serving

_log = logging.getLogger("jaxllm.server.http")
CLIENT_GONE = 499  # nginx's status
_NOT_FOUND = "no route"


def make_app(
    serving: Serving, options: ServerOptions, observer: PrometheusObserver | None, tracer: Tracer | None
) -> ASGIApp:
    """Return the ASGI app; while the engine loads, routes that need it answer 503."""
    endpoints = Endpoints(serving, options, observer, tracer or Tracer())
    router = Router(endpoints.routes(), redirect_slashes=False, default=_refuse_path)
    return Front(Guard(router, options, Keys(options.api_key, options.admin_api_key)), options, observer)


class Front:
    """The outermost app: request ids, errors, metrics."""

    def __init__(self, guard: Guard, options: ServerOptions, observer: PrometheusObserver | None) -> None:
        self._guard = guard
        self._options = options
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _answer_other(scope, receive, send)
            return
        began = time.monotonic()
        status: int | None = None
        request_id = shown = uuid4().hex
        record: dict[str, Any] = {"request_id": request_id, "client_id": None, "name": request_id}
        record |= {"route": _NOT_FOUND, "ignored": ()}
        scope = {**scope, "app": self, "jaxllm": record}  # "app" makes Starlette raise its 405
        added: Headers = []

        async def sender(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._options.enable_request_id_headers:
                    added.append((b"x-request-id", shown.encode("ascii")))
                    if is_anthropics(scope["path"]):
                        added.append((b"request-id", shown.encode("ascii")))
                if record["ignored"]:
                    added.append((b"warnings", warnings_of(record["ignored"])))
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        try:
            added += self._guard.cors_headers(scope)
            clients = request_id_of(scope, self._options)
            if clients is not None:
                shown = record["client_id"] = clients
                record["name"] = f"{request_id} ({clients})"
                if self._options.enable_log_requests:
                    _log.info("request %s is %s", request_id, clients)
            await self._guard(scope, receive, sender)
        except ClientGone:
            status = CLIENT_GONE
            _log.info("request %s: the client disconnected", record["name"])
        except Exception as error:
            log_failure(record["name"], error)
            if status is not None:
                status = status_of(error)
                if (transport := transport_of(scope)) is not None:
                    transport.abort()  # must not look complete
            else:
                await _send_error(sender, error, scope["path"], request_id)
        finally:
            if self._observer is not None:
                try:
                    seconds = time.monotonic() - began
                    self._observer.request_handled("http", record["route"], status or CLIENT_GONE, seconds)
                except Exception:  # statistics must not fail a request
                    _log.exception("the observer failed")


async def _refuse_path(scope: Scope, receive: Receive, send: Send) -> None:
    raise nothing_at(scope["path"])


async def _send_error(send: Send, error: Exception, path: str, request_id: str) -> None:
    status, headers, body = answer_of(error, path, request_id)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _answer_other(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        for done in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{done}.complete"})
    elif scope["type"] == "websocket":
        with suppress(Exception):
            await send({"type": "websocket.close", "code": 1000})
