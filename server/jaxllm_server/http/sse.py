"""Serializes JSON and server-sent events. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from jaxllm_server.shared.repeated import Continued, Repeated

DONE = b"data: [DONE]\n\n"
_END = b"\n\n"
FEW = 256
# ASCII: some clients, such as httpx's iter_lines, also split lines at U+2028 and U+0085.
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def dumps(value: Any) -> bytes:
    """Serialize to compact ASCII JSON; raise ValueError for NaN and infinities."""
    return _encode(value).encode("ascii")


def dumps_large(value: Any) -> bytes:
    """Serialize in pieces, between which other threads run: the C encoder holds the GIL."""
    return b"".join(pieces_of(value))


def pieces_of(value: Any) -> Iterator[bytes | memoryview]:
    if isinstance(value, Repeated):
        if value.json is None:
            value.json = b"".join(pieces_of(list(value)))
        yield value.json
    elif isinstance(value, Continued) and value.beginning and value.rest:
        (beginning,) = pieces_of(value.beginning)
        yield from (memoryview(beginning)[:-1], b",", memoryview(b"".join(pieces_of(value.rest)))[1:])
    elif isinstance(value, Mapping):
        for number, (name, inner) in enumerate(value.items()):
            yield b"%b%b:" % (b"," if number else b"{", dumps(name))
            yield from pieces_of(inner)
        yield b"}" if value else b"{}"
    elif isinstance(value, list | tuple) and len(value) <= FEW and any(isinstance(each, dict) for each in value):
        for number, inner in enumerate(value):
            yield b"," if number else b"["
            yield from pieces_of(inner)
        yield b"]"
    elif isinstance(value, list | tuple) and len(value) > FEW:
        for start in range(0, len(value), FEW):
            yield (b"," if start else b"[") + dumps(value[start : start + FEW])[1:-1]
        yield b"]"
    else:
        yield dumps(value)


def event(value: Any) -> bytes:
    return b"data: %b\n\n" % dumps(value)


def named_event(name: str, value: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode("ascii"), dumps(value))


class EventWriter:
    """Writes events that begin with the same fields."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._head = b"data: " + dumps(head)[:-1] + b","

    def event(self, tail: Mapping[str, Any]) -> bytes:
        return self._head + dumps(tail)[1:] + _END
