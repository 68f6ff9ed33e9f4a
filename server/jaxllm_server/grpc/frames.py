"""Checks and prices HTTP/2 frames before gRPC's core parses them. Pure."""

from __future__ import annotations

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# Of HEADERS: a call takes 7 KB and 0.3 ms of Python (measured); of resets too, whose calls still wait for Python.
CALL_PRICE = 512
FRAME_PRICE = 32  # other frames
_HEAD_BYTES = 9
_DATA, _HEADERS, _RESET, _CONTINUATION = 0, 1, 3, 9
_END_HEADERS = 4


class FrameError(Exception):
    """Not HTTP/2, or a too long header block."""


class FrameCheck:
    """Tracks a connection's frames."""

    def __init__(self, max_block_bytes: int) -> None:
        self.has_begun = False
        self._max_block_bytes = max_block_bytes
        self._part = b""
        self._payload_left = 0
        self._block_bytes = 0

    def price(self, data: bytes) -> int:
        """Price the frames that begin in these bytes: a base price each, plus the size except for DATA.

        Raises FrameError for another protocol or a too long header block.
        """
        if self._part:
            data, self._part = self._part + data, b""
        at, end, price = self._payload_left, len(data), 0
        if not self.has_begun:
            at = len(PREFACE)
            if data[:at] != PREFACE[:end]:
                raise FrameError("no HTTP/2")
            if end < at:
                self._part = data
                return 0
            self.has_begun = True
        while at + _HEAD_BYTES <= end:
            size, kind = data[at] << 16 | data[at + 1] << 8 | data[at + 2], data[at + 3]
            if kind == _DATA:
                price += FRAME_PRICE
            elif kind == _HEADERS or kind == _CONTINUATION:
                self._block_bytes = size if kind == _HEADERS else self._block_bytes + size
                if self._block_bytes > self._max_block_bytes:
                    raise FrameError("a header block is too long")
                if data[at + 4] & _END_HEADERS:
                    self._block_bytes = 0
                price += size + (CALL_PRICE if kind == _HEADERS else FRAME_PRICE)
            else:
                price += size + (CALL_PRICE if kind == _RESET else FRAME_PRICE)
            at += _HEAD_BYTES + size
        self._payload_left = max(0, at - end)
        self._part = data[at:]
        return price
