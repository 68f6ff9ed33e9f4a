"""HTTP/1.1 as uvicorn speaks it, with bounds that it has not: size and time of a head, bytes of a message, and the
time in which a client has to read what is sent.

`server_config` has all settings of uvicorn. The protocol also hands the connection's transport to the app, which
closes it where an answer broke off, and the offer of a WebSocket. Independent of routes.
"""

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
from jaxllm_server.shared.options import ServerOptions

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Scope, Send
    from uvicorn.protocols.http.flow_control import FlowControl

    from jaxllm_server.http.error_bodies import Headers
    from jaxllm_server.http.web_socket import WebSocket

READ_BYTES = 32 * 1024  # at once from a connection: what a body may be longer than its bound before that is seen
GOING_AWAY = 1001  # RFC 6455, section 7.4.1
MAX_PIPELINED = 64  # requests after the one being answered; uvicorn would queue all in READ_BYTES
TRANSPORT = "jaxllm.transport"  # extension of the ASGI scope: the connection's asyncio.Transport
UPGRADE = "jaxllm.upgrade"  # extension of a request that offers a WebSocket: `BoundedProtocol.upgrade` of it


def server_config(app: ASGIApp, options: ServerOptions, **others: Any) -> uvicorn.Config:
    """Return how uvicorn serves the front end: this protocol, TLS, no logs of its own, and what `others` say."""
    return uvicorn.Config(
        app,
        http=cast(Any, protocol_of(options)),  # `HttpServer` makes one for each connection
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # on loopback uvicorn would let a client set its address in a header
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
    """Return the protocol class of a server's connections. It is for one event loop."""

    class Connection(BoundedProtocol):
        """A connection of this server."""

        max_head_bytes = options.max_header_bytes
        max_body_bytes = options.max_body_bytes
        head_seconds = stall_seconds = options.stall_timeout or None

    class Read(SmallReads):
        """Reads a connection of this server."""

        connection_type = Connection
        buffer = memoryview(bytearray(READ_BYTES))

    return Read


class SmallReads(asyncio.BufferedProtocol):
    """Gives a connection what comes in pieces of READ_BYTES: uvloop would read 250 KiB before it could be stopped."""

    connection_type: type[HttpToolsProtocol]
    buffer: memoryview  # of all connections: it is read at once into, and out of

    def __init__(self, *arguments: Any, **given: Any) -> None:
        """Take what uvicorn gives a protocol."""
        self.connection = self.connection_type(*arguments, **given)

    def connection_made(self, transport: Any) -> None:
        """Begin."""
        self.connection.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self.connection.connection_lost(exc)

    def eof_received(self) -> None:
        """Nothing more comes."""
        self.connection.eof_received()

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        self.connection.pause_writing()

    def resume_writing(self) -> None:
        """The client has read."""
        self.connection.resume_writing()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Say where to read into."""
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Hand on what was read."""
        self.connection.data_received(bytes(self.buffer[:nbytes]))


class BoundedProtocol(HttpToolsProtocol):
    """A connection; a subclass says its bounds."""

    max_head_bytes: int
    max_body_bytes: int  # without the framing of chunks, which may be as much again
    head_seconds: float | None  # for a request's head to be complete, from its first byte or the connection's start
    stall_seconds: float | None  # for the client to read what is in the way of more
    _late: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _aborting: asyncio.TimerHandle | None = None
    _is_in_head = True
    _num_bytes = 0  # of the message that is being received, roughly: the next one may begin in the same segment
    _num_body_bytes = 0  # of them, what is body
    _segment = b""  # that is being parsed
    _offers_socket = False  # in the head that is parsed again
    _socket: WebSocket | None = None  # set once the connection has switched to it
    _is_last = False  # the newest request is the connection's last; further bytes are dropped
    parser: Any  # httptools' parser; None when the connection is lost

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._cancel_late()
        for timer in (self._stalled, self._aborting):  # each holds the connection
            if timer is not None:
                timer.cancel()
        self._stalled = self._aborting = None
        if self._socket is not None:
            self._socket.lost()
        super().connection_lost(exc)  # resumes writing, so that an app that waits goes on

    def data_received(self, data: bytes) -> None:
        """Parse more of a request, unless it is too much."""
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
            self.transport.abort()  # the rest is not read; an app that still reads it refuses it
        elif self._num_bytes > 2 * self.max_body_bytes + self.max_head_bytes:
            self._refuse(body_too_large(self.max_body_bytes))  # the app, if it is reading, sees a client that has gone
        elif self._is_in_head and (self.cycle is None or self.cycle.response_complete):
            self._expect_head()

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        extensions: dict[str, Any] = {TRANSPORT: self.transport}
        if self._offers_socket:
            self._offers_socket = False
            extensions[UPGRADE] = partial(self.upgrade, cast(Any, self.scope))
        self.scope["extensions"] = extensions  # type: ignore[typeddict-unknown-key]

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; trailers, behind a body, are not read."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Hand the request to the app."""
        if self.parser.get_method() == b"CONNECT" or len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("no tunnels, and not too many requests")  # ends the parsing: `send_400_response` is next
        if self.parser.should_upgrade():
            return  # `_unsupported_upgrade_warning` is next
        self._cancel_late()
        self._is_in_head = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Hand a piece of the body to the app, or count it if it is no longer read."""
        self._num_body_bytes += len(body)
        super().on_body(body)
        if self._num_body_bytes > self.max_body_bytes:
            self.flow.pause_reading()  # the app has enough to refuse it, or goes on when it has answered

    def on_message_complete(self) -> None:
        """End a request's body."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._is_in_head = True
        self._num_bytes = self._num_body_bytes = 0

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the last bytes to leave."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_later()
        elif not self._is_in_head and self.cycle.response_complete:
            self._expect_head()  # behind a body that is not read: uvicorn's timer ends with its first byte

    def pause_writing(self) -> None:
        """Let the app wait until the client has read more, but not for ever."""
        super().pause_writing()
        if self.stall_seconds is not None:
            self._stalled = self.loop.call_later(self.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """Let the app go on."""
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
        """Accept a request's offer with these headers; later bytes are for the WebSocket that `make` makes.

        Raises:
            Refusal: if the client has sent more already, which is lost to the WebSocket.
        """
        if self.cycle.scope is not scope or self.cycle.response_started or self._is_last or self._num_bytes:
            raise Refusal(400, "Nothing may follow an offer to upgrade.", "BAD_HEADER", closes=True)
        self.cycle.chunked_encoding = False  # the answer has no body
        await send({"type": "http.response.start", "status": 101, "headers": headers})
        self.cycle.response_complete = True
        self._cancel_late()
        self._socket = socket = make(self.transport, self.flow)
        if self.transport.is_closing():
            socket.lost()
        return socket

    def shutdown(self) -> None:
        """Begin to end; a WebSocket gets a close frame."""
        if self._socket is None:
            super().shutdown()
        else:
            self._socket.close(GOING_AWAY, "the server stops")

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, even if the client has not read the last answer."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(Refusal(400, "This is not a valid HTTP/1.1 request.", "BAD_REQUEST"))

    def _parse(self, data: bytes) -> None:
        self._segment = data
        super().data_received(data)

    def _unsupported_upgrade_warning(self) -> None:
        """Go on in HTTP/1.1 with a request that offers another protocol, as Java's client does with each first one.

        The app may accept the offer of a WebSocket.

        The parser has stopped before the body, as if it were in that protocol: to parse on from there would make
        a request of a body. So the head is parsed again, without the offer.
        """
        stopped = sys.exception()  # the parser's
        assert stopped is not None
        rest = self._segment[stopped.args[0] :]
        version = self.parser.get_http_version().encode()
        lines = [b"%b: %b\r\n" % (name, value) for name, value in self.headers if name != b"upgrade"]
        head = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)
        self._offers_socket = self._get_upgrade() == b"websocket" and version == b"1.1"
        self.parser = type(self.parser)(self)
        self._parse(b"".join([head, *lines, b"\r\n", rest]))

    def _abort_later(self) -> None:
        """Cut the connection off: asyncio closes once all is sent, which a client that does not read puts off."""
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
        if not self._num_bytes or not self._is_in_head:  # a browser's spare connection, or the rest of a refused body
            self.transport.close()
            self._abort_later()
        elif not self.transport.is_closing():
            message = f"The request did not come within {self.head_seconds:g} seconds."
            self._refuse(Refusal(408, message, "REQUEST_TIMEOUT", "timeout"))

    def _refuse(self, refusal: Refusal) -> None:
        """Answer without the app, and close. Earlier requests that are complete are answered first."""
        self._cancel_late()
        if self._is_in_head and self.cycle is not None and not self.cycle.response_complete:
            self._is_last, self.cycle.keep_alive = True, False
            return
        if self._is_in_head or not (self.cycle.response_started or self.pipeline):  # else it would be in another answer
            status, headers, body = answer_of(refusal)
            lines = [b"%b: %b\r\n" % header for header in (*headers, (b"connection", b"close"))]
            self.transport.write(b"".join([STATUS_LINE[status], *lines, b"\r\n", body]))
        self.transport.close()
        self._abort_later()


def transport_of(scope: Any) -> asyncio.Transport | None:
    """Return the connection of a request, where the server is this one."""
    return scope.get("extensions", {}).get(TRANSPORT)
