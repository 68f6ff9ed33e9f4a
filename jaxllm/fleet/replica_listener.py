"""The listener for replicas on other machines, and the greeting that authenticates them.

Of an unauthenticated connection, 1 KiB is read and not decoded; a new one replaces the oldest of 16.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple

from jaxllm.errors import UserError

_log = logging.getLogger(__name__)
HELLO_SECONDS = 10.0  # for TLS, and again for the greeting
MOST_STRANGERS = 16
MOST_GREETING = 1024  # bytes
_FAREWELL_SECONDS = 1.0
_RETRY_SECONDS = 0.5
_BACKLOG = 64
_LENGTH = struct.Struct("!H")

Connected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class ReplicaAddress(NamedTuple):
    """Where replicas on other machines connect."""

    address: str  # HOST:PORT
    key: str
    tls: ssl.SSLContext | None = None


class Greeting(NamedTuple):
    """The first message of a connection."""

    version: str
    number: str  # a local replica's, else empty
    key: bytes

    def pack(self) -> bytes:
        text = b"\n".join((self.version.encode(), self.number.encode(), self.key))
        if len(text) > MOST_GREETING:
            raise UserError(
                f"The first --admin-api-key of a fleet may have at most {MOST_GREETING - 64} bytes.", "admin_api_key"
            )
        return _LENGTH.pack(len(text)) + text


async def read_greeting(reader: asyncio.StreamReader) -> Greeting:
    """Read a connection's first message; raise TimeoutError after `HELLO_SECONDS`, ValueError for other data."""
    async with asyncio.timeout(HELLO_SECONDS):
        (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if size > MOST_GREETING:
            raise ValueError("the greeting is too long for a replica")
        version, number, key = (await reader.readexactly(size)).split(b"\n", 2)
    return Greeting(version.decode("ascii", "replace"), number.decode("ascii", "replace"), key)


def is_same_key(given: bytes, key: str) -> bool:
    return hmac.compare_digest(given, key.encode())


class ReplicaListener:
    """Accepts connections of replicas on other machines, and bounds unauthenticated ones."""

    def __init__(self, address: ReplicaAddress, connected: Connected) -> None:
        """`connected` checks the greeting, then calls `admit`."""
        self._tls, self._connected = address.tls, connected
        self.strangers: dict[asyncio.Task[None], None] = {}
        self._admitted: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen on an address and return its port; raise OSError if it cannot be bound."""
        loop = asyncio.get_running_loop()
        family, kind, protocol, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        self._accepting = asyncio.ensure_future(self._accept(listener))
        return listener.getsockname()[1]

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    peer, _ = await loop.sock_accept(listener)
                except OSError as error:
                    _log.warning("connections of replicas cannot be accepted (%s); trying again", error.strerror)
                    await asyncio.sleep(_RETRY_SECONDS)
                    continue
                if len(self.strangers) >= MOST_STRANGERS:
                    oldest = next(iter(self.strangers))
                    del self.strangers[oldest]
                    oldest.cancel()
                task = asyncio.ensure_future(self._serve(peer))
                self.strangers[task] = None
                task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self.strangers.pop(task, None)
        self._admitted.discard(task)

    def admit(self) -> None:
        task = asyncio.current_task()
        if task is not None and task in self.strangers:
            del self.strangers[task]
            self._admitted.add(task)

    async def _serve(self, peer: socket.socket) -> None:
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        loop = asyncio.get_running_loop()
        limit, farewell = (None, None) if self._tls is None else (HELLO_SECONDS, _FAREWELL_SECONDS)
        transport: asyncio.WriteTransport | None = None
        try:
            with suppress(OSError):
                transport, _ = await loop.connect_accepted_socket(
                    lambda: protocol, peer, ssl=self._tls, ssl_handshake_timeout=limit, ssl_shutdown_timeout=farewell
                )
                await self._connected(reader, asyncio.StreamWriter(transport, protocol, reader, loop))
                transport.close()  # flushes a refusal first
        except asyncio.CancelledError:
            if transport is not None:
                transport.abort()
            raise
        finally:
            if transport is None:
                peer.close()

    async def close(self) -> None:
        accepting = [] if self._accepting is None else [self._accepting]
        tasks = [*accepting, *self.strangers, *self._admitted]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
