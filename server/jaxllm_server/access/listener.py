"""Accepts connections."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

_log = logging.getLogger("jaxllm.server.listener")
RETRY_SECONDS = 1.0  # as asyncio's servers and gRPC
_MOST_AT_ONCE = 64


class Listener:
    """Accepts connections; pauses without free descriptors.

    uvloop would retry without pause if another thread takes libuv's spare descriptor (100 % of a core in every second
    trial, measured).
    """

    def __init__(
        self,
        listening: socket.socket,
        make_protocol: Callable[[], asyncio.BaseProtocol],
        tls: ssl.SSLContext | None,
        handshake_seconds: float | None = None,  # for TLS; None: one minute
    ) -> None:
        self._socket = listening
        self._make_protocol = make_protocol
        self._handshake = {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": handshake_seconds}
        self._loop = asyncio.get_running_loop()
        self.opening: set[asyncio.Task[None]] = set()
        self._retrying: asyncio.TimerHandle | None = None
        self._is_short = False
        listening.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Stop accepting, and cancel handshakes; the owner closes the socket."""
        if self._retrying is not None:
            self._retrying.cancel()
        self._loop.remove_reader(self._socket)
        for task in self.opening:
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self.opening, return_exceptions=True)

    def _resume(self) -> None:
        self._retrying = None
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(_MOST_AT_ONCE):
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return  # backlog empty, or client gone
            except OSError as error:
                self._pause(error)
                return
            self._is_short = False
            task = self._loop.create_task(self._open(connection))
            self.opening.add(task)
            task.add_done_callback(self.opening.discard)

    def _pause(self, error: OSError) -> None:
        if not self._is_short:
            _log.warning("connections cannot be accepted (%s); trying again", error.strerror)
        self._is_short = True
        self._loop.remove_reader(self._socket)
        self._retrying = self._loop.call_later(RETRY_SECONDS, self._resume)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection, **self._handshake)
        except OSError:  # the client disconnected, or does not use TLS
            connection.close()
        except Exception:
            connection.close()
            _log.exception("a connection could not be opened")
