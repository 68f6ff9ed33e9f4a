"""uvicorn's HTTP/1.1 protocol with limits on heads, bodies and stalled readers."""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from jaxllm_server.http.error_bodies import Refusal, answer_of, body_too_large
from jaxllm_server.shared.options import AUDIO_PATHS, ServerOptions

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Scope, Send
    from uvicorn.protocols.http.flow_control import FlowControl

    from jaxllm_server.http.error_bodies import Headers
    from jaxllm_server.http.web_socket import WebSocket

READ_BYTES = 32 * 1024  # per read; a body may exceed its limit by this much
GOING_AWAY = 1001  # RFC 6455, section 7.4.1
MAX_PIPELINED = 64  # queued; uvicorn has no limit
TRANSPORT = "jaxllm.transport"  # scope extension: asyncio.Transport
UPGRADE = "jaxllm.upgrade"  # scope extension of WebSocket requests: `BoundedProtocol.upgrade`


def server_config(app: ASGIApp, options: ServerOptions, **others: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=cast(Any, protocol_of(options)),  # instantiated by `HttpServer`
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # uvicorn would trust client addresses from loopback
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=1,
        root_path=options.root_path,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        ssl_ca_certs=options.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if options.ssl_client_auth else ssl.CERT_NONE,
        **others,
    )


def protocol_of(options: ServerOptions) -> type[SmallReads]:
    """Return the protocol class for one event loop."""

    class Connection(BoundedProtocol):
        max_head_bytes = options.max_header_bytes
        usual_bytes, audio_bytes = options.body_limit(""), options.body_limit(AUDIO_PATHS[0])
        head_seconds = stall_seconds = options.stall_timeout or None

    class Read(SmallReads):
        connection_type = Connection
        buffer = memoryview(bytearray(READ_BYTES))

    return Read


class SmallReads(asyncio.BufferedProtocol):
    """Reads in pieces of READ_BYTES: uvloop would read 250 KiB before a pause."""

    connection_type: type[HttpToolsProtocol]
    buffer: memoryview

    def __init__(self, *arguments: Any, **given: Any) -> None:
        self.connection = self.connection_type(*arguments, **given)

    def connection_made(self, transport: Any) -> None:
        self.connection.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.connection.connection_lost(exc)

    def eof_received(self) -> None:
        self.connection.eof_received()

    def pause_writing(self) -> None:
        self.connection.pause_writing()

    def resume_writing(self) -> None:
        self.connection.resume_writing()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.connection.data_received(bytes(self.buffer[:nbytes]))


class BoundedProtocol(HttpToolsProtocol):
    """A connection; subclasses set the limits."""

    max_head_bytes: int
    usual_bytes: int  # of a body …
    audio_bytes: int  # … and of one with a file of sound
    max_body_bytes = 0  # of the current request, excluding chunk framing, which may be as large
    head_seconds: float | None  # for a complete head, from its first byte or the connection's start
    stall_seconds: float | None  # for the client to read pending output
    _late: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _aborting: asyncio.TimerHandle | None = None
    _is_in_head = True
    _num_bytes = 0  # of the current message; a segment may contain the next
    _num_body_bytes = 0
    _segment = b""
    _offers_socket = False
    _socket: WebSocket | None = None
    _is_last = False  # drop further bytes
    parser: Any  # None after disconnect

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_late()
        for timer in (self._stalled, self._aborting):
            if timer is not None:
                timer.cancel()
        self._stalled = self._aborting = None
        if self._socket is not None:
            self._socket.lost()
        super().connection_lost(exc)  # wakes a waiting app

    def data_received(self, data: bytes) -> None:
        if self._socket is not None:
            self._socket.data_received(data)
            return
        if self.transport.is_closing() or self._is_last:
            return
        self._num_bytes += len(data)
        self._parse(data)
        self._segment = b""
        if self.transport.is_closing() or self._is_last:
            return
        if self._is_in_head and self._num_bytes > self.max_head_bytes:
            self._refuse(
                Refusal(431, f"The request's head is larger than {self.max_head_bytes} bytes.", "HEAD_TOO_LARGE")
            )
        elif self._num_body_bytes > self.max_body_bytes and self.cycle.response_complete:
            self.transport.abort()  # the rest stays unread; an app still reading refuses the body
        elif self._num_bytes > 2 * self.max_body_bytes + self.max_head_bytes:
            self._refuse(body_too_large(self.max_body_bytes))
        elif self._is_in_head and (self.cycle is None or self.cycle.response_complete):
            self._expect_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions: dict[str, Any] = {TRANSPORT: self.transport}
        if self._offers_socket:
            self._offers_socket = False
            extensions[UPGRADE] = partial(self.upgrade, cast(Any, self.scope))
        self.scope["extensions"] = extensions  # type: ignore[typeddict-unknown-key]

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header; ignore trailers after the body."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT" or len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("no tunnels, and not too many requests")  # stops the parser and calls `send_400_response`
        if self.parser.should_upgrade():
            return
        self._cancel_late()
        self._is_in_head = False
        super().on_headers_complete()
        # No call: an error in it would stop the parser and be answered as the client's.
        self.max_body_bytes = self.audio_bytes if self.scope["path"].endswith(AUDIO_PATHS) else self.usual_bytes

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        super().on_body(body)
        if self._num_body_bytes > self.max_body_bytes:
            self.flow.pause_reading()  # enough for the app to refuse it; resumed after the answer

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._is_in_head = True
        self._num_bytes = self._num_body_bytes = 0

    def on_response_complete(self) -> None:
        """Wait for the next request, or for output before closing."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_later()
        elif not self._is_in_head and self.cycle.response_complete:
            self._expect_head()  # limits an unread body: uvicorn's timer stops at the first byte

    def pause_writing(self) -> None:
        """Block the app until the client reads; abort after `stall_seconds`."""
        super().pause_writing()
        if self.stall_seconds is not None:
            self._stalled = self.loop.call_later(self.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()
        if self._socket is not None:
            self._socket.resume()

    async def upgrade(
        self,
        scope: Scope,
        send: Send,
        headers: Headers,
        make: Callable[[asyncio.Transport, FlowControl], WebSocket],
    ) -> WebSocket:
        """Accept a WebSocket; later bytes go to the socket from `make`.

        Raises Refusal if the client has sent further bytes.
        """
        if self.cycle.scope is not scope or self.cycle.response_started or self._is_last or self._num_bytes:
            raise Refusal(400, "No data may follow a request to upgrade.", "BAD_HEADER", closes=True)
        self.cycle.chunked_encoding = False
        await send({"type": "http.response.start", "status": 101, "headers": headers})
        self.cycle.response_complete = True
        self._cancel_late()
        self._socket = socket = make(self.transport, self.flow)
        if self.transport.is_closing():
            socket.lost()
        return socket

    def shutdown(self) -> None:
        """Close after the current answer; a WebSocket gets a close frame."""
        if self._socket is None:
            super().shutdown()
        else:
            self._socket.close(GOING_AWAY, "the server stops")

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        self._refuse(Refusal(400, "This is not a valid HTTP/1.1 request.", "BAD_REQUEST"))

    def _parse(self, data: bytes) -> None:
        self._segment = data
        super().data_received(data)

    def _unsupported_upgrade_warning(self) -> None:
        """Handle an offer of another protocol, as Java's client makes, as plain HTTP/1.1.

        The parser would take the body for a request, so the head is parsed again without the offer.
        """
        stopped = sys.exception()
        assert stopped is not None
        rest = self._segment[stopped.args[0] :]
        version = self.parser.get_http_version().encode()
        lines = [b"%b: %b\r\n" % (name, value) for name, value in self.headers if name != b"upgrade"]
        head = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)
        self._offers_socket = self._get_upgrade() == b"websocket" and version == b"1.1"
        self.parser = type(self.parser)(self)
        self._parse(b"".join([head, *lines, b"\r\n", rest]))

    def _abort_later(self) -> None:
        """Abort after `stall_seconds`: a client that does not read can delay asyncio's close."""
        if self.stall_seconds is not None and self._aborting is None:
            self._aborting = self.loop.call_later(self.stall_seconds, self.transport.abort)

    def _expect_head(self) -> None:
        if self._late is None and self.head_seconds is not None:
            self._late = self.loop.call_later(self.head_seconds, self._on_late)

    def _cancel_late(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _on_late(self) -> None:
        self._late = None
        if not self._num_bytes or not self._is_in_head:  # idle, or a refused body's rest
            self.transport.close()
            self._abort_later()
        elif not self.transport.is_closing():
            message = f"The request was not received within {self.head_seconds:g} seconds."
            self._refuse(Refusal(408, message, "REQUEST_TIMEOUT", "timeout"))

    def _refuse(self, refusal: Refusal) -> None:
        """Answer without the app, after earlier answers, and close."""
        self._cancel_late()
        if self._is_in_head and self.cycle is not None and not self.cycle.response_complete:
            self._is_last, self.cycle.keep_alive = True, False
            return
        if self._is_in_head or not (self.cycle.response_started or self.pipeline):
            status, headers, body = answer_of(refusal)
            lines = [b"%b: %b\r\n" % header for header in (*headers, (b"connection", b"close"))]
            self.transport.write(b"".join([STATUS_LINE[status], *lines, b"\r\n", body]))
        self.transport.close()
        self._abort_later()


def transport_of(scope: Any) -> asyncio.Transport | None:
    return scope.get("extensions", {}).get(TRANSPORT)
