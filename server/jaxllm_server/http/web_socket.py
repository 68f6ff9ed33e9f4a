"""A server-side WebSocket (RFC 6455) that receives one message at a time and sends texts."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING

from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import Protocol, Side, State

from jaxllm.errors import OverloadedError
from jaxllm_server.http.error_bodies import Headers, Refusal

if TYPE_CHECKING:
    from uvicorn.protocols.http.flow_control import FlowControl
    from websockets.typing import BytesLike

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, section 1.3
_KEY_BYTES = 16
_PIECE = 4096  # parsed before frames are counted
_FRAME = 1 << 20
# Frames, 15 µs each (measured): burst, per second, per KiB. A message counts until taken.
_MOST_FRAMES, _FRAMES_A_SECOND, _FRAMES_A_KIB = 64.0, 10.0, 1.0
_CLOSE_SECONDS = 5.0


# Charges a message's bytes while held; see `Entry.charge`.
Place = Callable[[], AbstractContextManager[Callable[[int], None]]]


def answer_headers(headers: Sequence[tuple[bytes, bytes]]) -> Headers:
    """Return the headers that accept a WebSocket; raise Refusal for another version or an invalid key."""
    given = {name: value for name, value in headers if name.startswith(b"sec-websocket-")}
    if given.get(b"sec-websocket-version") != b"13":
        raise Refusal(400, "Sec-WebSocket-Version must be 13.", "BAD_HEADER", closes=True)
    key = given.get(b"sec-websocket-key", b"")
    with contextlib.suppress(binascii.Error):
        if len(base64.b64decode(key, validate=True)) == _KEY_BYTES:
            accept = base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest())
            return [(b"upgrade", b"websocket"), (b"connection", b"Upgrade"), (b"sec-websocket-accept", accept)]
    raise Refusal(400, "Sec-WebSocket-Key must be 16 bytes in base64.", "BAD_HEADER", closes=True)


class WebSocket:
    """A WebSocket. The connection calls `data_received`, `resume` and `lost`."""

    def __init__(
        self,
        transport: asyncio.Transport,
        flow: FlowControl,
        *,
        max_bytes: int,
        stall_seconds: float | None,  # for a complete message; for a silent client's pong
        place: Place,
    ) -> None:
        self._transport = transport
        self._flow = flow
        self._stall_seconds = stall_seconds
        self._place = place
        self._loop = asyncio.get_running_loop()
        self._protocol = Protocol(Side.SERVER, state=State.OPEN, max_size=max_bytes)
        self._pieces: list[BytesLike] = []
        self._messages: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self._held = ExitStack()
        self._grow = self._held.enter_context(place())
        self._is_coming = False
        self._is_silent = False
        self._late: asyncio.TimerHandle | None = None
        self._aborting: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        if stall_seconds is not None:
            self._watch = self._loop.call_later(stall_seconds, self._expect_more)
        self._room, self._room_at = _MOST_FRAMES, self._loop.time()  # frame allowance then
        self.ended = asyncio.Event()  # no further messages; the client may not have closed

    async def receive(self) -> bytes | None:
        """Wait for a message's text, charged until `release`; None at the end."""
        while not self._messages:
            if self.ended.is_set():
                return None
            self._arrived.clear()
            await self._arrived.wait()
        await asyncio.sleep(0)
        if not self._messages:
            return None
        message = self._messages.popleft()
        self._room += 1
        self.resume()
        return message

    def release(self) -> None:
        self._held.close()
        if not self.ended.is_set():
            self._grow = self._held.enter_context(self._place())
            rest = sum(map(len, (*self._messages, *self._pieces, self._protocol.reader.buffer)))
            self._grow(rest)  # charged before

    async def send(self, text: bytes) -> None:
        """Send a text as the client reads; do nothing after the end."""
        for start in range(0, len(text), _FRAME):
            if self._flow.write_paused:
                await self._flow.drain()
            if self.ended.is_set():
                return
            write = self._protocol.send_continuation if start else self._protocol.send_text
            write(text[start : start + _FRAME], start + _FRAME >= len(text))
            self._write()

    def close(self, code: int = CloseCode.NORMAL_CLOSURE, reason: str = "") -> None:
        """Send a close frame; end the connection within seconds even without a response."""
        if self._protocol.state is State.OPEN and not self.ended.is_set():
            self._protocol.send_close(code, reason)
            self._write()

    def data_received(self, data: bytes) -> None:
        self._is_silent = False
        for start in range(0, len(data), _PIECE):
            self._read(data[start : start + _PIECE])
        if not self.ended.is_set() and (self._messages or self._flow.write_paused):
            self._flow.pause_reading()  # pongs would accumulate

    def resume(self) -> None:
        if not self._messages:
            self._flow.resume_reading()
            self._time_message()

    def lost(self) -> None:
        self._end()
        for timer in (self._late, self._watch, self._aborting):
            if timer is not None:
                timer.cancel()

    def _read(self, data: bytes) -> None:
        self._protocol.receive_data(data)
        frames = [each for each in self._protocol.events_received() if isinstance(each, Frame)]
        if not self._has_room(len(frames), len(data)):
            self._protocol.fail(CloseCode.POLICY_VIOLATION, "too many small frames")
        elif not self.ended.is_set():
            self._take(frames, len(data))
        self._write()

    def _has_room(self, num_frames: int, num_bytes: int) -> bool:
        now = self._loop.time()
        more = (now - self._room_at) * _FRAMES_A_SECOND + num_bytes / 1024 * _FRAMES_A_KIB
        self._room, self._room_at = min(_MOST_FRAMES, self._room + more) - num_frames, now
        return self._room >= 0

    def _take(self, frames: Sequence[Frame], num_bytes: int) -> None:
        for frame in frames:
            if frame.opcode is Opcode.BINARY:
                self._protocol.fail(CloseCode.UNSUPPORTED_DATA, "messages must be JSON text")
            elif frame.opcode in (Opcode.TEXT, Opcode.CONT):
                self._add(frame.data, frame.fin)
        try:
            self._grow(num_bytes)
        except OverloadedError as error:
            self._protocol.fail(CloseCode.TRY_AGAIN_LATER, str(error))
        self._is_coming = bool(self._pieces or self._protocol.reader.buffer) or not frames
        self._time_message()

    def _time_message(self) -> None:
        """Limit the duration of the incoming message while reading."""
        is_timed = self._is_coming and not self._messages and not self._flow.write_paused
        if not is_timed and self._late is not None:
            self._late.cancel()
            self._late = None
        elif is_timed and self._late is None and self._stall_seconds is not None:
            self._late = self._loop.call_later(self._stall_seconds, self._on_late)

    def _add(self, data: BytesLike, is_last: bool) -> None:
        self._pieces.append(data)
        if is_last:
            self._messages.append(b"".join(self._pieces))
            self._pieces.clear()
            self._arrived.set()

    def _write(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self._transport.write(data)
            elif self._transport.can_write_eof():
                self._transport.write_eof()
            else:
                self._transport.close()  # TLS connections cannot be half-closed
        if self._protocol.state is not State.OPEN:
            self._end()

    def _on_late(self) -> None:
        self.close(CloseCode.POLICY_VIOLATION, f"a message was not received within {self._stall_seconds:g} seconds")

    def _expect_more(self) -> None:
        """Disconnect a client that did not respond to the last ping; else send one."""
        assert self._stall_seconds is not None
        reads = not self._messages and not self._flow.write_paused
        if reads and self._is_silent:
            self._transport.abort()
        elif not self.ended.is_set():
            self._is_silent = reads
            self._protocol.send_ping(b"")
            self._write()
            self._watch = self._loop.call_later(self._stall_seconds, self._expect_more)

    def _end(self) -> None:
        if self.ended.is_set():
            return
        self.ended.set()
        self._arrived.set()
        self._messages.clear()
        self._pieces.clear()
        self._held.close()
        if not self._transport.is_closing():
            self._flow.resume_reading()
            self._aborting = self._loop.call_later(_CLOSE_SECONDS, self._transport.abort)
