"""WebSocket frames of any shape and split yield their messages; large, slow or invalid ones close the connection."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from jaxllm.errors import OverloadedError
from jaxllm_server.http.error_bodies import Refusal
from jaxllm_server.http.web_socket import WebSocket, answer_headers

TEXT, BINARY, CONT, CLOSE, PING, PONG = 1, 2, 0, 8, 9, 10
MOST = 100_000  # bytes of a message


def frame(opcode: int, data: bytes = b"", is_last: bool = True, key: bytes = b"\1\2\3\4") -> bytes:
    """Return a client's frame (RFC 6455)."""
    size = len(data)
    length = (
        bytes([128 | size])
        if size < 126
        else b"\xfe" + struct.pack(">H", size)
        if size < 65536
        else b"\xff" + struct.pack(">Q", size)
    )
    masked = bytes(byte ^ key[index % 4] for index, byte in enumerate(data))
    return bytes([is_last << 7 | opcode]) + length + key + masked


class Wire:
    """A fake transport with flow control that records calls."""

    def __init__(self) -> None:
        self.written = b""
        self.is_half_closed = self.is_aborted = self.is_paused = self.write_paused = False

    def write(self, data: bytes) -> None:
        assert not self.is_half_closed
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.is_half_closed = True

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    async def drain(self) -> None:
        while self.write_paused:
            await asyncio.sleep(0)

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """Parse the written bytes, frames without masks."""
        data = self.written
        while data:
            size, start = data[1], 2
            if size > 125:
                start = 4 if size == 126 else 10
                size = int.from_bytes(data[2:start], "big")
            yield data[0], data[start : start + size]
            data = data[start + size :]

    def closed(self) -> int | None:
        """Return the code with which the server closed the connection."""
        return next((int.from_bytes(data[:2], "big") for head, data in self.frames() if head & 15 == CLOSE), None)


class Held:
    """Counts bytes like `Entry.charge`."""

    def __init__(self, most: int = 1 << 30) -> None:
        self.most, self.total = most, 0

    @contextmanager
    def place(self) -> Iterator[Any]:
        own = 0

        def grow(num_bytes: int) -> None:
            nonlocal own
            if self.total + num_bytes > self.most:
                raise OverloadedError("full", retry_after=1.0)
            own += num_bytes
            self.total += num_bytes

        try:
            yield grow
        finally:
            self.total -= own


def opened(wire: Wire, held: Held | None = None, stall: float | None = None) -> WebSocket:
    place = (held or Held()).place
    return WebSocket(wire, wire, max_bytes=MOST, stall_seconds=stall, place=place)  # type: ignore[arg-type]


async def test_messages_come_as_they_were_sent_however_they_are_cut() -> None:
    draws = random.Random(5)
    for _ in range(30):
        wire, held = Wire(), Held()
        socket = opened(wire, held)
        sent = [draws.randbytes(draws.choice([0, 1, 125, 126, 3000, 66_000])) for _ in range(draws.randrange(1, 5))]
        stream, pings = b"", []
        for message in sent:
            cuts = sorted(draws.randrange(len(message) + 1) for _ in range(draws.randrange(4)))
            for number, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(message)], strict=True)):
                stream += frame(CONT if number else TEXT, message[start:end], number == len(cuts))
                if draws.random() < 0.3 and number < len(cuts):
                    pings.append(draws.randbytes(draws.randrange(20)))
                    stream += frame(PING, pings[-1])
        got = []
        while stream:
            size = draws.choice([1, 7, 1000, 32768])
            if not wire.is_paused:
                socket.data_received(stream[:size])
                stream = stream[size:]
            while wire.is_paused or (not stream and len(got) < len(sent)):
                got.append(await socket.receive())
        assert got == sent and not socket.ended.is_set()
        socket.release()
        assert held.total == 0
        assert [data for head, data in wire.frames() if head & 15 == PONG] == pings
        socket.lost()


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(BINARY, b"{}"), 1003),
        (frame(CONT, b"x"), 1002),
        (frame(TEXT, b"x", is_last=False) + frame(TEXT, b"y"), 1002),
        (b"\x81\x05hello", 1002),  # no mask
        (frame(3), 1002),
        (frame(TEXT, b"")[:1] + b"\xff" + struct.pack(">Q", MOST + 1), 1009),
        (frame(TEXT, b"x" * 90_000, is_last=False) + frame(CONT, b"x" * 20_000), 1009),
        (frame(PING) * 66, 1008),
        (frame(TEXT, b"{}") * 66, 1008),
        ((frame(TEXT, b"x", is_last=False) + frame(CONT, b"", is_last=False) * 66), 1008),
        (frame(CLOSE, struct.pack(">H", 1000)), 1000),
    ],
)
async def test_what_is_wrong_or_too_much_ends_it(data: bytes, code: int) -> None:
    wire, held = Wire(), Held()
    socket = opened(wire, held)
    for start in range(0, len(data), 32768):
        socket.data_received(data[start : start + 32768])
    assert (wire.closed(), wire.is_half_closed) == (code, True) and held.total == 0
    assert await socket.receive() is None
    socket.data_received(frame(PING) * 3000)
    await socket.send(b"late")
    assert list(wire.frames())[-1][0] & 15 == CLOSE, "nothing follows"
    socket.lost()


async def test_messages_have_the_room_of_bodies() -> None:
    wire, held = Wire(), Held(50_000)
    socket = opened(wire, held)
    socket.data_received(frame(TEXT, b"x" * 60_000)[:40_000])
    assert held.total == 40_000
    socket.data_received(b"x" * 20_000)
    assert wire.closed() == 1013 and held.total == 0
    socket.lost()


async def test_bytes_that_still_wait_stay_counted_and_no_others() -> None:
    held, draws = Held(), random.Random(6)
    socket = opened(Wire(), held)
    for _ in range(50):
        old, new = draws.randbytes(3000), draws.randbytes(draws.randrange(2, 3000))
        socket.data_received(frame(CONT, old[9:]) if held.total else frame(TEXT, old))
        socket.data_received(frame(TEXT, new, is_last=False))
        await socket.receive()
        socket.release()
        assert held.total == len(new), "of the message that is coming"
    socket.data_received(frame(CONT, b"") + frame(TEXT, b"x" * 5000)[:4000])
    await socket.receive()
    socket.release()
    assert 3980 < held.total <= 4000, "of a frame that is coming"
    socket.lost()
    assert held.total == 0


class Answering(Wire):
    """A client that answers pings."""

    socket: WebSocket

    def write(self, data: bytes) -> None:
        super().write(data)
        if data[0] & 15 == PING:
            asyncio.get_running_loop().call_soon(self.socket.data_received, frame(PONG))


async def test_a_client_that_does_not_go_on_is_ended() -> None:
    slow, silent, idle = Answering(), Wire(), Answering()
    sockets = slow.socket, _, idle.socket = [opened(wire, stall=0.03) for wire in (slow, silent, idle)]
    slow.socket.data_received(frame(TEXT, b"half", is_last=False))
    async with asyncio.timeout(10):
        while slow.closed() is None or not silent.is_aborted or len(list(idle.frames())) < 4:
            await asyncio.sleep(0.01)
    assert slow.closed() == 1008
    assert [head & 15 for head, _ in silent.frames()] == [PING]
    assert not idle.is_aborted and idle.closed() is None
    for socket in sockets:
        socket.lost()


class FakeTime(asyncio.SelectorEventLoop):
    """An event loop on which time passes instantly."""

    passed = 0.0

    def time(self) -> float:
        return super().time() + self.passed

    async def wait(self, seconds: float) -> None:
        self.passed += seconds
        for _ in range(5):  # timers, then the answers to pings
            await asyncio.sleep(0)


def test_a_message_has_its_time_while_the_server_reads() -> None:
    async def check() -> None:
        wire = Answering()
        socket = wire.socket = opened(wire, stall=100)
        part, end = frame(TEXT, b"half", is_last=False), frame(CONT, b"")
        socket.data_received(frame(TEXT, b"first") + part)
        await loop.wait(250)  # the server answers an earlier message
        assert wire.is_paused and wire.closed() is None
        assert await socket.receive() == b"first"
        for _ in range(4):  # each message is in time, and the next begins as it ends
            await loop.wait(60)
            socket.data_received(end + part)
            assert await socket.receive() == b"half"
        wire.write_paused = True
        socket.data_received(frame(PING))
        await loop.wait(150)
        assert wire.is_paused and wire.closed() is None
        wire.write_paused = False
        socket.resume()
        await loop.wait(60)
        assert wire.closed() is None
        await loop.wait(60)
        assert wire.closed() == 1008
        socket.lost()

    loop = FakeTime()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(check())


async def test_no_more_is_read_while_a_message_waits_or_nothing_is_read() -> None:
    wire = Wire()
    socket = opened(wire)
    socket.data_received(frame(TEXT, b"a") + frame(TEXT, b"b"))
    assert wire.is_paused and await socket.receive() == b"a" and wire.is_paused
    assert await socket.receive() == b"b" and not wire.is_paused
    wire.write_paused = True
    sending = asyncio.ensure_future(socket.send(b"c"))
    await asyncio.sleep(0)
    socket.data_received(frame(PING))
    assert wire.is_paused and not sending.done(), "nor are answers to pings piled up"
    wire.write_paused = False
    socket.resume()
    await sending
    assert not wire.is_paused
    long = b"y" * 3_000_000
    await socket.send(long)
    assert b"".join(data for head, data in wire.frames() if head & 15 in (TEXT, CONT)) == b"c" + long
    socket.lost()


def test_an_offer_has_what_the_protocol_asks_for() -> None:
    key = (b"sec-websocket-key", b"dGhlIHNhbXBsZSBub25jZQ==")  # RFC 6455, section 1.3
    version = (b"sec-websocket-version", b"13")
    assert answer_headers([key, version])[-1][1] == b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    for offer in ([key], [version], [version, (key[0], b"dGhl")], [version, (key[0], b"?")], [key, (version[0], b"8")]):
        with pytest.raises(Refusal, match="Sec-WebSocket"):
            answer_headers(offer)
