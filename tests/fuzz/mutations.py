"""Seeded mutations of bytes, and of JSON in them, as in a hostile or damaged file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import msgpack

from jaxllm.replay.recording import MAGIC

NUMBERS: list[Any] = [
    *(0, -1, 1, 2, 7, 2**16, 2**31 - 1, 2**31, 2**32, 2**32 + 5, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30),
    *(-(2**31), -(2**63), 0.0, -0.0, 0.5, 1.5, 1e-45, 5e-324, 1e30, 1e308, float("inf"), float("-inf"), float("nan")),
]
TEXTS = [
    *("", " ", "a", "\0", "\n", "../x", "/etc/passwd", "\ud800", "\uffff", "é" * 40, "x" * 5000, "F32", "BF16", "I4"),
    *("{}", "{{", "%s", "a\r\nb", "\x1b[31m", "<|im_end|>", "<0x41>", "▁", "default", "float99", "__class__", "1e999"),
]
_MARK = "twice-7f3a"
VALUES: list[Any] = [None, True, False, [], {}, [[]], [None], {"": None}, {"a": [1]}, *NUMBERS, *TEXTS]


def mutate(data: bytes, chance: random.Random) -> bytes:
    """Mutate bytes slightly: within their JSON or the entries of their recording, or anywhere."""
    for _ in range(1 + chance.randrange(3)):
        start, end = _json_within(data)
        if chance.random() < 0.25:
            data = _mutate_bytes(data, chance)
        elif end:
            changed = _mutate_json(data[start:end], chance)
            length = data[:start]
            if start == 8 and chance.random() < 0.9:  # of a safetensors file: its header's length is updated
                length = len(changed).to_bytes(8, "little")
            data = length + changed + data[end:]
        elif MAGIC.encode() in data[:32]:
            data = _mutate_recording(data, chance)
        else:
            data = _mutate_bytes(data, chance)
    return data


def _json_within(data: bytes) -> tuple[int, int]:
    """Return the start and end of the JSON of a document or a safetensors file; (0, 0) without JSON."""
    if data[:1] in (b"{", b"["):
        return 0, len(data)
    length = int.from_bytes(data[:8], "little")
    return (8, 8 + length) if data[8:9] == b"{" and length <= len(data) - 8 else (0, 0)


def _mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data) + 1)
    until = min(len(data), at + chance.choice((1, 1, 2, 8, 64)))
    match chance.randrange(6):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + data[until:]
        case 2:
            return data[:at] + chance.randbytes(until - at) + data[until:]
        case 3:
            return data[:until] + data[at:until] * chance.choice((1, 2, 50)) + data[until:]
        case 4:
            return (
                data[:at]
                + chance.choice((b"\xff\xfe", b"\xef\xbb\xbf", b"[" * 3000, b"NaN", b"1e999", b"\0"))
                + data[at:]
            )
        case _:
            flipped = bytes([data[at] ^ 1 << chance.randrange(8)]) if at < len(data) else b""
            return data[:at] + flipped + data[at + 1 :]


def _mutate_json(data: bytes, chance: random.Random) -> bytes:
    """Mutate one place of a document; if it is not JSON, mutate bytes."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return _mutate_bytes(data, chance)
    twice = _mutate_document(document, chance)
    if twice is None:
        return json.dumps(document, ensure_ascii=chance.random() < 0.9).encode(errors="surrogatepass")
    return json.dumps(document).encode().replace(json.dumps(_MARK).encode(), json.dumps(twice).encode(), 1)


def _mutate_recording(data: bytes, chance: random.Random) -> bytes:
    """Mutate one of a sequence of msgpack values, or their order."""
    unpacker = msgpack.Unpacker(strict_map_key=False, unicode_errors="surrogateescape", max_buffer_size=2**24)
    unpacker.feed(data)
    entries: list[Any] = []
    try:
        entries.extend(unpacker)
    except (ValueError, msgpack.UnpackException, TypeError):
        return _mutate_bytes(data, chance)
    _mutate_document(entries, chance)
    try:
        return b"".join(msgpack.packb(entry, unicode_errors="surrogateescape") for entry in entries)
    except (OverflowError, ValueError, TypeError):  # msgpack integers have at most 64 bits
        return _mutate_bytes(data, chance)


def _mutate_document(document: Any, chance: random.Random) -> str | None:
    """Mutate one place; return the name that replaces `_MARK` if a name is to be duplicated."""
    places = list(_places(document))
    if not places:
        return None
    holder, key = chance.choice(places)
    old = holder[key]
    match chance.randrange(9):
        case 0:
            del holder[key]
        case 1 if isinstance(old, int | float) and not isinstance(old, bool):
            large = old * 2.0**40 if abs(old) < 2**900 else 0
            holder[key] = chance.choice((old + 1, old - 1, -old, old * 2, large))
        case 2 if isinstance(holder, dict) and isinstance(key, str):
            holder[_MARK] = chance.choice((old, *NUMBERS[:8]))
            return key
        case 3:
            other_holder, other_key = chance.choice(places)
            other = other_holder[other_key]
            holder[key] = [] if isinstance(other, dict | list) else other
        case 4 if isinstance(holder, dict):
            holder[chance.choice(TEXTS) or "key"] = holder.pop(key)
        case 5:
            holder[key] = [old] * chance.choice((1, 2, 300))
        case 6 if isinstance(old, bytes):
            holder[key] = _mutate_bytes(old, chance)
        case 7 if isinstance(holder, list):
            holder.insert(chance.randrange(len(holder) + 1), old)
        case _:
            holder[key] = chance.choice(VALUES)
    return None


def _places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) of a document."""
    if depth > 200:
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from _places(item, depth + 1)
