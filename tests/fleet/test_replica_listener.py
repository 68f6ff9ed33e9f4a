"""Unauthenticated peers at a fleet's address: their bytes are never decoded, and they do not block replicas."""

from __future__ import annotations

import asyncio
import random
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from jaxllm.fleet import replica_listener, wire
from jaxllm.fleet.replica import Replica
from jaxllm.fleet.replica_listener import Greeting, ReplicaAddress
from jaxllm.fleet.supervisor import Supervisor
from jaxllm.version import __version__
from tests.fleet.test_router import Noting

KEY = "a key: with\nwhatever"


def nested(depth: int, code: int = 1) -> bytes:
    packed = msgpack.packb(1)
    for _ in range(depth):
        packed = msgpack.packb(msgpack.ExtType(code, packed))
    return packed


@pytest.mark.parametrize("code", range(1, 6))
def test_objects_within_objects_are_bounded(code: int) -> None:
    with pytest.raises(ValueError, match="deep"):
        wire.unpack(nested(64, code))


@asynccontextmanager
async def listening(tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[int, Supervisor, Replica, Noting]]:
    replica, noting, nothing = Replica(0, is_local=False), Noting(), Any
    own = ReplicaAddress("127.0.0.1:1", KEY, tls)
    supervisor = Supervisor([replica], noting, lambda *_: nothing, hang_timeout=9.0, module="", address=own)
    listener = supervisor.listener_from_afar = replica_listener.ReplicaListener(own, supervisor.connected_from_afar)
    port = await listener.start("127.0.0.1", 0)
    try:
        yield port, supervisor, replica, noting
    finally:
        await listener.close()


def strange(draws: random.Random) -> bytes:
    """Draw the first bytes of a stranger: noise, a replica's frames, greetings with a wrong key or without one."""
    said = wire.pack(("hello", __version__, None, KEY))
    good = bytearray(Greeting(__version__, "", KEY.encode()).pack())
    good[draws.randrange(2, len(good))] ^= 1 << draws.randrange(7)
    kinds = [
        draws.randbytes(draws.randrange(1, 3000)),
        wire.frame([said]),
        wire.frame([nested(draws.randrange(1, 600), draws.randrange(8))]),
        b"\x04\x00" + nested(200),
        Greeting(__version__, "0", b"").pack(),
        bytes(good),
        b"\xff\xff" + bytes(70_000),
    ]
    return draws.choice(kinds)


async def test_nothing_of_a_stranger_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def unpack(*_: Any) -> Any:
        raise AssertionError("decoded")

    draws = random.Random(1)
    async with listening() as (port, _, replica, noting):
        with monkeypatch.context() as patched:
            patched.setattr(wire, "unpack", unpack)
            patched.setattr(noting, "heard", unpack)
            for _ in range(200):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(strange(draws))
                writer.write_eof()
                try:
                    answer = await asyncio.wait_for(reader.read(), 5.0)
                except ConnectionResetError:
                    answer = b""
                assert b"decoded" not in answer and not replica.connected.is_set()
                writer.close()


@pytest.mark.parametrize("with_tls", [False, True])
async def test_silent_strangers_keep_no_replica_out(with_tls: bool, certificates: Path) -> None:
    """Of 100 silent or half-connected strangers 16 stay connected, and a replica is still admitted."""

    tls = trust = None
    if with_tls:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(certificates / "server.pem", certificates / "server.key")
        trust = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    async with listening(tls) as (port, supervisor, replica, noting):
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
        for _, writer in strangers:
            writer.write(b"\x16\x03\x01" if with_tls else b"\x00")
        began = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
        writer.write(Greeting(__version__, "", KEY.encode()).pack() + wire.frame([wire.pack(("one",))]))
        while noting.said != [("one",)]:
            await asyncio.sleep(0.001)
            assert time.monotonic() - began < 1.0
        listener = supervisor.listener_from_afar
        assert listener is not None and len(listener.strangers) < replica_listener.MOST_STRANGERS
        ended = 0
        for stranger, _ in strangers:
            try:
                ended += not await asyncio.wait_for(stranger.read(1), 0.01)
            except TimeoutError:
                pass
            except ConnectionResetError:
                ended += 1
        assert ended >= len(strangers) - replica_listener.MOST_STRANGERS
        late = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        writer.write(wire.frame([wire.pack(("two",))]))
        while noting.said != [("one",), ("two",)]:
            await asyncio.sleep(0.001)
            assert time.monotonic() - began < 5.0
        assert replica.connected.is_set(), "strangers do not push a replica out"
        for _, each in (*strangers, *late, (reader, writer)):
            each.close()


async def test_a_stranger_is_let_go_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_listener, "HELLO_SECONDS", 0.1)

    async with listening() as (port, *_):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"\x00")
        assert await asyncio.wait_for(reader.read(), 2.0) == b""
        writer.close()
