"""Server-sent events as bytes: `data: {…}`, a blank line, of OpenAI's older APIs `data: [DONE]` at the end. Pure.

Knows nothing of what the events say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from jaxllm_server.shared.repeated import Continued, Repeated

DONE = b"data: [DONE]\n\n"
_END = b"\n\n"
FEW = 256  # items of a list that are written at once
# ASCII only: some clients split lines at U+2028 and U+0085 too (httpx's iter_lines does), in the middle of an event.
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def dumps(value: Any) -> bytes:
    """Return a value as JSON; NaN and infinities, which JSON does not have, are a ValueError."""
    return _encode(value).encode("ascii")


def dumps_large(value: Any) -> bytes:
    """Return as `dumps` does, written in pieces: the encoder, in C, lets no other thread run while it writes one."""
    return b"".join(pieces_of(value))


def pieces_of(value: Any) -> Iterator[bytes | memoryview]:
    """Write a value as JSON in small pieces."""
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
    """Return one event."""
    return b"data: %b\n\n" % dumps(value)


def named_event(name: str, value: Any) -> bytes:
    """Return one event of a stream that has several kinds."""
    return b"event: %b\ndata: %b\n\n" % (name.encode("ascii"), dumps(value))


class EventWriter:
    """Writes the events of one stream, which all begin with the same fields."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._head = b"data: " + dumps(head)[:-1] + b","

    def event(self, tail: Mapping[str, Any]) -> bytes:
        """Return the event of the common fields and those of `tail`, of which there is at least one."""
        return self._head + dumps(tail)[1:] + _END
