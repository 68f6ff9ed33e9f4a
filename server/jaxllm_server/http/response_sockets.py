"""`/v1/responses` over a WebSocket: runs each message as a POST request to the app.

A connection handles one request at a time and keeps private responses.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.errors import OverloadedError
from jaxllm_server.access.client_quota import Bound
from jaxllm_server.access.ledger import BODIES, Ledger
from jaxllm_server.http.guard import CLIENT
from jaxllm_server.http.protocol import UPGRADE
from jaxllm_server.http.sse import dumps
from jaxllm_server.responses.store import ConnectionResponses
from jaxllm_server.shared.options import ServerOptions

if TYPE_CHECKING:
    from jaxllm_server.http.web_socket import WebSocket

ROUTE = "/v1/responses (WebSocket)"
MOST_SECONDS = 3600.0  # per connection, as at OpenAI
KEPT = "jaxllm.kept"  # scope key: `ConnectionResponses`
_TOO_OLD = {
    "type": "invalid_request_error",
    "code": "websocket_connection_limit_reached",
    "message": "A WebSocket lasts at most 60 minutes; open a new one to continue.",
    "param": None,
}
_OF_OFFER = (b"connection", b"upgrade", b"sec-websocket-", b"content-", b"transfer-encoding")
_END = b"\n\n"
_ERROR, _FAILED = b"event: error\n", b"event: response.failed\n"


class ResponseSockets:
    """A server's WebSockets; `kept_for` creates a connection's store."""

    def __init__(self, options: ServerOptions, ledger: Ledger, kept_for: Callable[[str], ConnectionResponses]) -> None:
        self._options = options
        self._ledger = ledger
        self._kept_for = kept_for
        self._open = Bound(options.max_rpcs, max(1, options.max_rpcs // 2))

    async def open(self, request: Request) -> ASGIApp:
        """Answer conversations over a WebSocket."""
        upgrade = request.scope.get("extensions", {}).get(UPGRADE)
        if upgrade is None or request.method != "GET":
            raise HTTPException(405, headers={"allow": "POST"})
        from jaxllm_server.http.web_socket import WebSocket, answer_headers  # rarely needed

        client = request.scope[CLIENT]
        headers = answer_headers(request.scope["headers"])
        if not self._open.has_room(client, 1):
            raise OverloadedError("Too many WebSockets are open; retry later.", retry_after=1.0)

        def make(transport: Any, flow: Any) -> WebSocket:
            return WebSocket(
                transport,
                flow,
                max_bytes=self._options.max_body_bytes,
                stall_seconds=self._options.stall_timeout or None,
                place=lambda: _received(self._ledger, client),
            )

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            with self._open.counted(client, 1):
                socket = await upgrade(send, headers, make)
                kept = self._kept_for(client)
                try:
                    await _answer_all(socket, scope, kept)
                finally:
                    kept.close()
                    socket.close()

        return serve


@contextmanager
def _received(ledger: Ledger, client: str) -> Iterator[Callable[[int], None]]:
    with ledger.entry(client) as entry:
        yield partial(entry.charge, BODIES)


async def _answer_all(socket: WebSocket, scope: Scope, kept: ConnectionResponses) -> None:
    until = asyncio.get_running_loop().time() + MOST_SECONDS
    while True:
        try:
            async with asyncio.timeout_at(until):
                message = await socket.receive()
        except TimeoutError:
            await socket.send(_error(400, _TOO_OLD))
            return
        if message is None:
            return
        kept.used = None
        turn = _Turn(socket, message)
        await scope["app"](_scope_of(scope, len(message), kept), turn.receive, turn.send)
        if turn.has_failed or not turn.is_through:
            kept.forget_used()
        if not turn.is_through:
            return


def _scope_of(scope: Scope, num_bytes: int, kept: ConnectionResponses) -> Scope:
    own = [(b"content-type", b"application/json"), (b"content-length", b"%d" % num_bytes)]
    headers = [pair for pair in scope["headers"] if not pair[0].startswith(_OF_OFFER)]
    return {**scope, "method": "POST", "headers": [*headers, *own], "extensions": {}, KEPT: kept}


class _Turn:
    """A message as an ASGI request, and its answer."""

    def __init__(self, socket: WebSocket, message: bytes) -> None:
        self._socket = socket
        self._message: bytes | None = message
        self._status = 0
        self._rest = b""
        self.has_failed = False
        self.is_through = False

    async def receive(self) -> Message:
        """Return the message as a body; later calls wait for a disconnect."""
        if self._message is not None:
            body, self._message = self._message, None
            self._socket.release()
            return {"type": "http.request", "body": body, "more_body": False}
        await self._socket.ended.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            return
        self.is_through = not message.get("more_body", False)
        self._rest += message.get("body", b"")
        if self._status == 200:
            *events, self._rest = self._rest.split(_END)
            for event in events:
                await self._send_event(event)
        elif self.is_through:
            self.has_failed = True
            await self._socket.send(_error(self._status, json.loads(self._rest)["error"]))

    async def _send_event(self, event: bytes) -> None:
        """Send an event, except `error`, and note a failure: a failed response has one terminal event."""
        self.has_failed |= event.startswith(_FAILED)
        if not event.startswith(_ERROR):
            await self._socket.send(event.partition(b"\ndata: ")[2])


def _error(status: int, error: dict[str, Any]) -> bytes:
    return dumps({"type": "error", "status": status, "error": error})
