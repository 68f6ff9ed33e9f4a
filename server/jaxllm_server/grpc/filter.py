"""A proxy process in front of gRPC's core: terminates TLS, checks and forwards frames.

The core parses on any calling thread, even with the GIL held: header blocks of 4 MB in small pieces stopped the server
for 2.5 s (measured).

`python -m jaxllm_server.grpc.filter SETTINGS-AS-JSON`
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import ssl
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxllm_server.access.listener import Listener
from jaxllm_server.grpc.frames import FrameCheck, FrameError

READ_BYTES = 32 * 1024
CORE = "core"
# In price units: 6,144 calls per second, burst 2,048, on all connections; more are delayed, except 64 per second, burst
# 16, per connection, which spares other clients.
RATE = 3 << 20
BURST = 1 << 20
OWN_RATE = 32 << 10
OWN_BURST = 8 << 10
MAX_DEBT = 4 << 20  # bounds the delay
_FLUSH_SECONDS = 2.0
_CONNECT_SECONDS, _RETRY_SECONDS = 2.0, 0.05


@dataclass(frozen=True)
class Settings:
    """The process's argument."""

    listening: Sequence[int]
    control: int  # a byte stops accepting, EOF ends the process
    folder: str  # of the core's socket; removed at exit
    max_block_bytes: int
    stall_seconds: float | None
    certfile: str | None = None
    keyfile: str | None = None
    ca_certs: str | None = None
    client_auth: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context; raise OSError for an unusable file."""
        if self.certfile is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certfile, self.keyfile)
        context.set_alpn_protocols(["h2"])
        if self.ca_certs is not None:
            context.load_verify_locations(self.ca_certs)
        if self.client_auth:
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class Filter:
    """The connections and their shared debt of bytes, which decreases with time."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.buffer = memoryview(bytearray(READ_BYTES))  # shared by connections
        self.clients: set[Client] = set()
        self._debt = 0.0  # unpaid price …
        self._counted = 0.0  # … at this time
        self._num_unnamed = 0

    async def run(self) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        tls, seconds = self.settings.tls(), self.settings.stall_seconds
        listening = [socket.socket(fileno=each) for each in self.settings.listening]
        listeners = [Listener(each, lambda: Client(self), tls, seconds) for each in listening]

        def on_control() -> None:
            while listening:
                listeners.pop().close()
                listening.pop().close()
            if not os.read(self.settings.control, 1):
                loop.remove_reader(self.settings.control)
                ended.set()

        loop.add_reader(self.settings.control, on_control)
        await ended.wait()
        end = loop.time() + _FLUSH_SECONDS
        while self.clients and loop.time() < end:
            await asyncio.sleep(0.01)
        shutil.rmtree(self.settings.folder, ignore_errors=True)

    def pay(self, price: int, now: float) -> float:
        """Add a price to the debt; return the seconds to pause reading, if positive."""
        self._debt = min(MAX_DEBT, max(0.0, self._debt - RATE * (now - self._counted)) + price)
        self._counted = now
        return (self._debt - BURST) / RATE

    def connect(self, peer: Any) -> socket.socket:
        """Connect to the core from a Unix socket, at a path with the client's address."""
        if isinstance(peer, tuple):
            name = f"ipv6:[{peer[0]}]:{peer[1]}" if ":" in peer[0] else f"ipv4:{peer[0]}:{peer[1]}"
        else:
            self._num_unnamed += 1
            name = f"unix:{self._num_unnamed}"
        path = Path(self.settings.folder, name)
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.setblocking(False)
            connection.bind(str(path))
            connection.connect(str(path.with_name(CORE)))
        except OSError:
            connection.close()
            raise
        finally:
            path.unlink(missing_ok=True)
        return connection


class Client(asyncio.BufferedProtocol):
    """A connection's client side."""

    transport: Any
    core: Any = None

    def __init__(self, own: Filter) -> None:
        self._filter = own
        self._loop = asyncio.get_running_loop()
        self._frames = FrameCheck(own.settings.max_block_bytes)
        self._credit = float(OWN_BURST)
        self._counted = self._loop.time()
        self._pauses = 0
        self._timers: list[asyncio.TimerHandle] = []
        self._connecting: asyncio.Task[None] | None = None
        self._early = b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        tls = transport.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != "h2":
            transport.abort()
            return
        self._filter.clients.add(self)
        if self._filter.settings.stall_seconds is not None:
            self._timers.append(self._loop.call_later(self._filter.settings.stall_seconds, self._on_late))
        self._connecting = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        peer, late = self.transport.get_extra_info("peername"), self._loop.time() + _CONNECT_SECONDS
        while self.core is None:
            try:
                connection = self._filter.connect(peer)
                self.core, _ = await self._loop.create_unix_connection(lambda: Core(self), sock=connection)
            except BlockingIOError:  # the backlog is full
                if self.transport.is_closing() or self._loop.time() > late:
                    self.transport.abort()
                    return
                await asyncio.sleep(_RETRY_SECONDS)
            except OSError:  # the server is stopping
                self.transport.abort()
                return
        if self.transport.is_closing():
            self.core.abort()
        elif self._early:
            self.core.write(self._early)
            self._early = b""
            self.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self._filter.clients.discard(self)
        for timer in self._timers:
            timer.cancel()
        if self.core is not None:
            self.core.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._filter.buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._filter.buffer[:nbytes])
        try:
            price = self._frames.price(data)
        except FrameError:
            self.transport.abort()
            return
        if self.core is not None:
            self.core.write(data)
        else:
            if not self._early:
                self.pause()
            self._early += data
        now = self._loop.time()
        seconds = self._filter.pay(price, now)
        self._credit = min(OWN_BURST, self._credit + OWN_RATE * (now - self._counted)) - price
        self._counted = now
        if self._credit < 0:
            self._credit = 0.0
            if seconds > 0:
                self.pause()
                self._loop.call_later(seconds, self.resume)

    def pause(self) -> None:
        """Pause reading; calls nest."""
        self._pauses += 1
        if self._pauses == 1 and not self.transport.is_closing():
            self.transport.pause_reading()

    def resume(self) -> None:
        self._pauses -= 1
        if not self._pauses and not self.transport.is_closing():
            self.transport.resume_reading()

    def pause_writing(self) -> None:
        if self.core is not None and not self.core.is_closing():
            self.core.pause_reading()

    def resume_writing(self) -> None:
        if self.core is not None and not self.core.is_closing():
            self.core.resume_reading()

    def end(self) -> None:
        self.transport.close()
        self._timers.append(self._loop.call_later(_FLUSH_SECONDS, self.transport.abort))

    def _on_late(self) -> None:
        if not self._frames.has_begun:
            self.transport.abort()


class Core(asyncio.Protocol):
    """A connection's core side."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def data_received(self, data: bytes) -> None:
        if not self._client.transport.is_closing():
            self._client.transport.write(data)

    def pause_writing(self) -> None:
        self._client.pause()

    def resume_writing(self) -> None:
        self._client.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.end()


def main() -> None:
    import uvloop

    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal signals all processes; the server ends this one
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = Settings(**json.loads(sys.argv[1]))
    uvloop.run(Filter(settings).run())


if __name__ == "__main__":
    main()
