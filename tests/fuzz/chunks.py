"""Containers as trees of chunks, which are changed and written again with sizes and checksums that fit, or that lie."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field

_BOXES = frozenset(b"moov trak mdia minf stbl dinf edts mvex moof traf udta mfra".split())
_LEADS = {b"meta": 4, b"stsd": 8, b"dref": 8} | dict.fromkeys(b"avc1 hev1 hvc1 av01 mp4v vp09 jpeg mjpg".split(), 78)
_MASTERS = frozenset(
    bytes.fromhex(each)
    for each in """
    1a45dfa3 18538067 1549a966 1654ae6b ae e0 e1 1f43b675 a0 1c53bb6b bb b7 114d9b74 4dbb 6d80 6240 5034 1941a469 61a7
    1043a770 45b9 b6 1254c367 7373
    """.split()
)
MOST_DEPTH = 12
MOST_BYTES = 1 << 21  # of a changed file
NUMBERS = (0, 1, 2, 3, 7, 8, 127, 128, 255, 256, 32767, 65535, 1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40)
NUMBERS += ((1 << 63) - 1, 1 << 63, (1 << 64) - 1)
FLOATS = (0.0, -1.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"))


@dataclass
class Chunk:
    """A chunk: its content is `lead`, then chunks."""

    tag: bytes
    lead: bytes
    inner: list[Chunk] = field(default_factory=list)
    lie: int | None = None  # the size that is written

    def all(self) -> Iterator[tuple[list[Chunk], int]]:
        """Yield the place of each chunk in this one."""
        for at, each in enumerate(self.inner):
            yield self.inner, at
            yield from each.all()


Reader = Callable[[bytes, int], list[Chunk]]
Writer = Callable[[Chunk], bytes]


def read_boxes(data: bytes, depth: int = 0) -> list[Chunk]:
    """Read ISO media: MP4 and MOV."""
    found, at = [], 0
    while at + 8 <= len(data):
        size, tag, head = int.from_bytes(data[at : at + 4]), data[at + 4 : at + 8], 8
        if size == 1:
            size, head = int.from_bytes(data[at + 8 : at + 16]), 16
        end = len(data) if size < head else min(len(data), at + size)
        found.append(_chunk(tag, data[at + head : end], 0 if tag in _BOXES else _LEADS.get(tag), read_boxes, depth))
        at = end
    return found


def write_box(chunk: Chunk) -> bytes:
    content = chunk.lead + b"".join(map(write_box, chunk.inner))
    size = len(content) + 8 if chunk.lie is None else chunk.lie
    return (size & 0xFFFFFFFF).to_bytes(4) + chunk.tag[:4].ljust(4, b" ") + content


def read_riff(data: bytes, depth: int = 0) -> list[Chunk]:
    """Read WAV, AVI and WebP."""
    found, at = [], 0
    while at + 8 <= len(data):
        tag, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        end = min(len(data), at + 8 + size)
        found.append(_chunk(tag, data[at + 8 : end], 4 if tag in (b"RIFF", b"LIST") else None, read_riff, depth))
        at = end + size % 2
    return found


def write_riff(chunk: Chunk) -> bytes:
    content = chunk.lead + b"".join(map(write_riff, chunk.inner))
    size = len(content) if chunk.lie is None else chunk.lie
    return (
        chunk.tag[:4].ljust(4, b" ") + (size & 0xFFFFFFFF).to_bytes(4, "little") + content + b"\0" * (len(content) % 2)
    )


def read_ebml(data: bytes, depth: int = 0) -> list[Chunk]:
    """Read Matroska and WebM."""
    found, at = [], 0
    while at < len(data):
        width = 9 - data[at].bit_length()
        tag = data[at : at + width]
        at += width
        if at >= len(data):
            break
        width = min(8, 9 - data[at].bit_length())
        size = int.from_bytes(data[at : at + width]) & ((1 << 7 * width) - 1)
        at += width
        end = len(data) if size == (1 << 7 * width) - 1 else min(len(data), at + size)
        found.append(_chunk(tag, data[at:end], 0 if tag in _MASTERS else None, read_ebml, depth))
        at = end
    return found


def write_ebml(chunk: Chunk) -> bytes:
    content = chunk.lead + b"".join(map(write_ebml, chunk.inner))
    size = len(content) if chunk.lie is None else chunk.lie
    return chunk.tag + (1 << 56 | size & ((1 << 56) - 1)).to_bytes(8) + content


def read_png(data: bytes, depth: int = 0) -> list[Chunk]:
    found, at = [Chunk(b"", data[:8])], 8
    while at + 12 <= len(data):
        size = int.from_bytes(data[at : at + 4])
        found.append(Chunk(data[at + 4 : at + 8], data[at + 8 : at + 8 + size]))
        at += 12 + size
    return found


def write_png(chunk: Chunk) -> bytes:
    if not chunk.tag:
        return chunk.lead
    size = len(chunk.lead) if chunk.lie is None else chunk.lie
    tag = chunk.tag[:4].ljust(4, b" ")
    return (size & 0xFFFFFFFF).to_bytes(4) + tag + chunk.lead + zlib.crc32(tag + chunk.lead).to_bytes(4)


def read_flac(data: bytes, depth: int = 0) -> list[Chunk]:
    """Read blocks of metadata, then the frames as a whole."""
    found, at, is_last = [Chunk(b"", data[:4])], 4, False
    while not is_last and at + 4 <= len(data):
        is_last, size = bool(data[at] & 128), int.from_bytes(data[at + 1 : at + 4])
        found.append(Chunk(data[at : at + 1], data[at + 4 : at + 4 + size]))
        at += 4 + size
    return [*found, Chunk(b"", data[at:])]


def write_flac(chunk: Chunk) -> bytes:
    if not chunk.tag:
        return chunk.lead
    size = len(chunk.lead) if chunk.lie is None else chunk.lie
    return chunk.tag[:1] + (size & 0xFFFFFF).to_bytes(3) + chunk.lead


def read_ogg(data: bytes, depth: int = 0) -> list[Chunk]:
    """Read pages, each with its head in `tag`."""
    found, at = [], 0
    while data[at : at + 4] == b"OggS" and at + 27 <= len(data):
        head = 27 + data[at + 26]
        size = sum(data[at + 27 : at + head])
        found.append(Chunk(data[at : at + head], data[at + head : at + head + size]))
        at += head + size
    return found


def write_ogg(chunk: Chunk) -> bytes:
    page = chunk.tag[:22] + bytes(4) + chunk.tag[26:] + chunk.lead
    return (
        page[:22] + (_ogg_sum(page) if chunk.lie is None else chunk.lie & 0xFFFFFFFF).to_bytes(4, "little") + page[26:]
    )


def _chunk(tag: bytes, content: bytes, lead: int | None, read: Reader, depth: int) -> Chunk:
    if lead is None or depth > MOST_DEPTH:
        return Chunk(tag, content)
    return Chunk(tag, content[:lead], read(content[lead:], depth + 1))


def _ogg_table() -> list[int]:
    found = []
    for number in range(256):
        number <<= 24
        for _ in range(8):
            number = number << 1 ^ (0x104C11DB7 if number & 1 << 31 else 0)
        found.append(number)
    return found


_TABLE = _ogg_table()


def _ogg_sum(page: bytes) -> int:
    total = 0
    for each in page:
        total = (total << 8 & 0xFFFFFFFF) ^ _TABLE[total >> 24 ^ each]
    return total


def form_of(data: bytes) -> tuple[Reader, Writer] | None:
    """Return the functions that read and write a file's container; None if it has no chunks."""
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide"):
        return read_boxes, write_box
    for beginning, read, write in (
        (b"RIFF", read_riff, write_riff),
        (b"\x1a\x45\xdf\xa3", read_ebml, write_ebml),
        (b"\x89PNG", read_png, write_png),
        (b"fLaC", read_flac, write_flac),
        (b"OggS", read_ogg, write_ogg),
    ):
        if data.startswith(beginning):
            return read, write
    return None


def with_changed_chunks(data: bytes, other: bytes, chance: random.Random) -> tuple[bytes, str]:
    """Return a file with changed chunks, and the kind of the last change; `other` gives chunks of another file."""
    form, foreign = form_of(data), form_of(other)
    if form is None:
        return with_changed_fields(data, chance), "field"
    read, write = form
    root = Chunk(b"", b"", read(data, 0))
    strange = [each[at] for each, at in Chunk(b"", b"", foreign[0](other, 0)).all()] if foreign else []
    kind = "chunk"
    for _ in range(1 + chance.randrange(3)):
        places = list(root.all())
        if not places:
            break
        kind = _change(*chance.choice(places), chance, strange, places)
    try:
        return b"".join(map(write, root.inner))[:MOST_BYTES], kind
    except RecursionError:
        return data, kind


def _change(
    holder: list[Chunk], at: int, chance: random.Random, strange: list[Chunk], places: list[tuple[list[Chunk], int]]
) -> str:
    chunk = holder[at]
    match chance.randrange(11):
        case 0:
            del holder[at]
            return "delete chunk"
        case 1:
            size = 64 + len(chunk.lead) + sum(64 + len(inner[at].lead) for inner, at in chunk.all())
            holder[at:at] = [chunk] * min(chance.choice((1, 2, 50, 3000)), MOST_BYTES // (4 * size))
            return "repeat chunk"
        case 2:
            holder.insert(chance.randrange(len(holder)), holder.pop(at))
            return "move chunk"
        case 3:
            chunk.lie = chance.choice((*NUMBERS, max(0, len(chunk.lead) - 1), len(chunk.lead) + 1))
            return "size of chunk"
        case 4:
            inner, other = chance.choice(places)
            chunk.tag = inner[other].tag if other < len(inner) else b"free"
            return "type of chunk"
        case 5:
            for _ in range(chance.choice((1, 10, 150))):
                chunk = Chunk(chunk.tag, chunk.lead if chance.random() < 0.1 else b"", [chunk])
            holder[at] = chunk
            return "nest chunk"
        case 6:
            chunk.lead, chunk.inner = chunk.lead[: chance.randrange(len(chunk.lead) + 1)], []
            return "cut chunk"
        case 7 if strange:
            holder[at] = deepcopy(chance.choice(strange))  # which must not hold itself
            return "foreign chunk"
        case 8 if len(chunk.tag) > 20:  # the head of a page
            chunk.tag = with_changed_fields(chunk.tag, chance)[: len(chunk.tag)]
            return "field of page"
        case _:
            chunk.lead = with_changed_fields(chunk.lead, chance)
            return "field of chunk"


def with_changed_fields(data: bytes, chance: random.Random) -> bytes:
    """Return bytes with one to four numbers replaced."""
    held = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        if not held:
            break
        width = chance.choice((1, 2, 4, 4, 8))
        if chance.random() < 0.1:
            made = struct.pack(chance.choice((">d", "<d")), chance.choice(FLOATS))
        else:
            made = (chance.choice(NUMBERS) & ((1 << 8 * width) - 1)).to_bytes(width, chance.choice(("big", "little")))
        at = chance.randrange(min(len(held), chance.choice((64, 256, 1 << 20))))
        if chance.random() < 0.7:
            at -= at % min(width, 4)
        held[at : at + len(made)] = made[: len(held) - at]
    return bytes(held)
