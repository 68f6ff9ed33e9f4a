"""HTTP/1.1 as uvicorn speaks it, with bounds that it has not: size and time of a head, bytes of a message, and the
time in which a client has to read what is sent.

`server_config` is all that uvicorn is told. The protocol also hands the connection's transport to the app, which
closes it where an answer broke off. Knows no route.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from jaxllm_server.http_errors import Refusal, answer_of
from jaxllm_server.options import ServerOptions

if TYPE_CHECKING:
    from starlette.types import ASGIApp

MAX_PIPELINED = 16  # requests behind the one that is answered; uvicorn would queue as many as fit through the network
TRANSPORT = "jaxllm.transport"  # extension of the ASGI scope: the connection's asyncio.Transport


def server_config(app: ASGIApp, options: ServerOptions, **others: Any) -> uvicorn.Config:
    """Return how uvicorn serves the front end: this protocol, TLS, no logs of its own, and what `others` say."""
    return uvicorn.Config(
        app,
        http=protocol_of(options),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
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


def protocol_of(options: ServerOptions) -> type[HttpToolsProtocol]:
    """Return the class of a server's connections."""

    class Connection(BoundedProtocol):
        """A connection of this server."""

        max_head_bytes = options.max_header_bytes
        # The framing of chunks may add as much again; what a body may be is counted by who reads it.
        max_message_bytes = 2 * options.max_body_bytes + options.max_header_bytes
        head_seconds = stall_seconds = options.stall_timeout or None

    return Connection


class BoundedProtocol(HttpToolsProtocol):
    """A connection; a subclass says its bounds."""

    max_head_bytes: int
    max_message_bytes: int
    head_seconds: float | None  # for a request's head to be complete, from its first byte or the connection's start
    stall_seconds: float | None  # for the client to read what is in the way of more
    _late: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _aborting: asyncio.TimerHandle | None = None
    _is_in_head = True
    _num_bytes = 0  # of the message that is being received, roughly: the next one may begin in the same segment

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
        super().connection_lost(exc)  # resumes writing, so that an app that waits goes on

    def data_received(self, data: bytes) -> None:
        """Parse more of a request, unless it is too much."""
        if self.transport.is_closing():
            return
        self._num_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._is_in_head and self._num_bytes > self.max_head_bytes:
            self._refuse(
                Refusal(431, f"The request's head is larger than {self.max_head_bytes} bytes.", "HEAD_TOO_LARGE")
            )
        elif self._num_bytes > self.max_message_bytes:
            # The app may be reading it: it sees a client that has gone.
            self.transport.abort()
        elif self._is_in_head and (self.cycle is None or self.cycle.response_complete):
            self._expect_head()

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self.scope["extensions"] = {TRANSPORT: self.transport}  # type: ignore[typeddict-item]

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; what comes behind a body (a trailer) nobody reads."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Hand the request to the app."""
        self._cancel_late()
        self._is_in_head = False
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests at once")  # ends the parsing: `send_400_response` is next
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End a request's body."""
        super().on_message_complete()
        self._is_in_head = True
        self._num_bytes = 0

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the last bytes to leave."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_later()

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

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, even if the client has not read the last answer."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(Refusal(400, "This is not a valid HTTP/1.1 request.", "BAD_REQUEST"))

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: to offer another protocol is no fault, and the answer is in ours."""

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
        if not self._num_bytes:  # a browser's spare connection, say
            self.transport.close()
        elif not self.transport.is_closing():
            message = f"The request did not come within {self.head_seconds:g} seconds."
            self._refuse(Refusal(408, message, "REQUEST_TIMEOUT", "timeout"))

    def _refuse(self, refusal: Refusal) -> None:
        """Answer without the app, and close."""
        self._cancel_late()
        status, headers, body = answer_of(refusal)
        is_idle = self.cycle is None or self.cycle.response_complete or not self.cycle.response_started
        if is_idle and not self.pipeline:  # otherwise it would stand in the middle of another answer
            lines = [b"%b: %b\r\n" % header for header in (*headers, (b"connection", b"close"))]
            self.transport.write(b"".join([STATUS_LINE[status], *lines, b"\r\n", body]))
        self.transport.close()
        self._abort_later()


def transport_of(scope: Any) -> asyncio.Transport | None:
    """Return the connection of a request, where the server is this one."""
    return scope.get("extensions", {}).get(TRANSPORT)
