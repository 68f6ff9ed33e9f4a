"""Send floods of HTTP/2 frames; a separate process, so that it does not slow the threads that measure.

python -m tests.hostile.floods HOST PORT KIND CONNECTIONS SECONDS
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count, islice, repeat

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)
CHECK = b"/grpc.health.v1.Health/Check"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def literal(value: bytes, name: bytes = b"x") -> bytes:
    """Return an HPACK header that enters no table."""
    size, length = len(value), b""
    if size >= 127:
        size, length = size - 127, b"\x7f"
        while size >= 128:
            length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([0, len(name)]) + name + length + bytes([size]) + value


def head(path: bytes = CHECK, more: bytes = b"") -> bytes:
    fields = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"localhost"}
    fields |= {b"content-type": b"application/grpc", b"te": b"trailers"}
    return b"".join(literal(value, name) for name, value in fields.items()) + more


def endless(payload: bytes, times: int) -> Iterator[bytes]:
    """Begin a header block without ever ending it."""
    yield frame(1, 0, 1)
    yield from repeat(frame(9, 0, 1, payload) * times)


def calls(num_each: int, more: bytes = b"", ending: Callable[[int], bytes] = lambda stream: b"") -> Iterator[bytes]:
    """Begin calls; `ending` returns the frames after the head of each."""
    streams, block = count(1, 2), head(more=more)
    while True:
        yield b"".join(frame(1, 4, stream, block) + ending(stream) for stream in islice(streams, num_each))


def behind_calls(payload: bytes, times: int) -> Iterator[bytes]:
    """Begin calls, then send a header block that the core parses while Python answers the calls."""
    streams = count(1, 2)
    while True:
        for stream in islice(streams, 50):
            yield frame(1, 4, stream, head()) + frame(0, 1, stream, bytes(5))
        last = next(streams)
        yield frame(1, 1, last, head(b"/a"))
        yield frame(9, 0, last, payload) * times
        yield frame(9, 4, last)


SMALL, LARGE = literal(b"a"), literal(b"a" * 1000)
KINDS: dict[str, Callable[[], Iterator[bytes]]] = {
    "CONTINUATION": lambda: endless(LARGE, 100),
    "CONTINUATION of small headers": lambda: endless(SMALL * 3000, 20),
    "small CONTINUATION": lambda: endless(SMALL, 3000),
    "empty CONTINUATION": lambda: endless(b"", 5000),
    "a header without end": lambda: endless(b"\0\1x\x7f\xff\xff\xff\x7f" + b"a" * 16000, 20),
    "calls and CONTINUATION": lambda: behind_calls(SMALL * 3000, 100),
    "calls and small CONTINUATION": lambda: behind_calls(SMALL, 20000),
    "resets": lambda: calls(100, ending=lambda stream: frame(3, 0, stream, b"\0\0\0\x08")),
    "heads": lambda: calls(20, more=literal(b"a" * 7000)),
    "large heads": lambda: calls(20, more=literal(b"a" * 15000)),
    "PING": lambda: repeat(frame(6, 0, 0, b"pingping") * 500),
    "SETTINGS": lambda: repeat(frame(4, 0, 0, b"\0\3\0\0\0\x64") * 500),
    "WINDOW_UPDATE": lambda: repeat(frame(8, 0, 0, b"\0\0\0\1") * 2000),
    "PRIORITY": lambda: repeat(frame(2, 0, 1, b"\0\0\0\0\1") * 2000),
    "unknown": lambda: repeat(frame(0xFE, 0, 0) * 5000),
}


def flood(address: tuple[str, int], kind: str, end: float, sent: list[int]) -> None:
    """Send as fast as the server reads; reconnect if it ends the connection. Record the bytes sent."""
    while time.monotonic() < end:
        with socket.create_connection(address) as connection:
            connection.settimeout(1.0)
            try:
                connection.sendall(PREFACE)
                for piece in KINDS[kind]():
                    connection.sendall(piece)
                    sent.append(len(piece))
                    if time.monotonic() > end:
                        return
            except OSError:
                pass


def main() -> None:
    host, port, kind, connections, seconds = sys.argv[1:]
    end, sent = time.monotonic() + float(seconds), list[int]()
    threads = [
        threading.Thread(target=flood, args=((host, int(port)), kind, end, sent), daemon=True)
        for _ in range(int(connections))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end + 0.2 - time.monotonic()))
    print(sum(sent))


if __name__ == "__main__":
    main()
