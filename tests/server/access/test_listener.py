"""The listener of the front ends: accept failures and closing."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm_server.access import listener as module
from jaxllm_server.access.listener import Listener


class Scarce:
    """A socket on which the first calls of accept fail for lack of resources."""

    def __init__(self, listening: socket.socket, num_failures: int, number: int) -> None:
        self._listening = listening
        self._num_failures = num_failures
        self._number = number
        self.asked: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listening, name)

    def accept(self) -> Any:
        self.asked.append(time.monotonic())
        if len(self.asked) <= self._num_failures:
            raise OSError(self._number, "short of something")
        return self._listening.accept()


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.EPERM])
async def test_it_waits_where_no_connection_can_be_taken(
    listening: socket.socket, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The listener waits while accept fails, then accepts all waiting connections; one log line reports it."""
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.1)
    scarce: Any = Scarce(listening, 3, number)
    made: list[asyncio.BaseProtocol] = []

    def make() -> asyncio.BaseProtocol:
        made.append(asyncio.Protocol())
        return made[-1]

    listener = Listener(scarce, make, None)
    with socket.create_connection(listening.getsockname()), socket.create_connection(listening.getsockname()):
        async with asyncio.timeout(5.0):
            while len(made) < 2:
                await asyncio.sleep(0.01)
    listener.close()
    await listener.wait_closed()
    assert all(later - earlier > 0.09 for earlier, later in zip(scarce.asked, scarce.asked[1:4], strict=False))
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["connections cannot be accepted (short of something); trying again"]


async def test_half_of_a_handshake_has_its_time(listening: socket.socket, certificates: Path) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    listener = Listener(listening, asyncio.Protocol, tls, handshake_seconds=0.2)
    for sent in (b"", b"\x16\x03\x01\x02\x00\x01"):
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        writer.write(sent)
        began = time.monotonic()
        assert await asyncio.wait_for(reader.read(), 5.0) == b""
        assert 0.1 < time.monotonic() - began < 1.0
        writer.close()
    listener.close()
    await listener.wait_closed()


async def test_it_ends_at_once_while_a_client_says_nothing_of_tls(listening: socket.socket, certificates: Path) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    listener = Listener(listening, asyncio.Protocol, tls)
    with socket.create_connection(listening.getsockname()) as client:
        async with asyncio.timeout(5.0):
            while not listener.opening:
                await asyncio.sleep(0.01)
        began = time.monotonic()
        listener.close()
        await listener.wait_closed()
        assert time.monotonic() - began < 1.0
        client.settimeout(5.0)
        assert client.recv(1) == b""
