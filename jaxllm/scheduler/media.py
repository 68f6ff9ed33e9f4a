"""Images in prompts: the budget of their encoder, and the cache of its outputs on the device.

A segment is a run of placeholder tokens, which get an image's embeddings. A plan encodes the images that its chunks
read, if not cached; a chunk ends before an image that exceeds budget or room.

The cache is an array of units, each of a fixed number of embeddings. Images are evicted in order of last use, except
those that are being read. The device encodes after all earlier steps, so evicted units may be overwritten at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from typing import NamedTuple

from jaxllm.scheduler.block_pool import chain


class Segment(NamedTuple):
    """An image in a prompt."""

    start: int  # of its first placeholder
    length: int  # tokens
    digest: bytes  # of all that its embeddings depend on

    @property
    def end(self) -> int:
        return self.start + self.length


class Encoded(NamedTuple):
    """An image in the cache."""

    digest: bytes
    units: tuple[int, ...]


class Encode(NamedTuple):
    """An image or source to encode before a step."""

    sequence_id: int
    index: int  # of the request's segments; of a source: number of cached blocks
    units: tuple[int, ...]


class EncoderCache(NamedTuple):
    """The encoder's outputs on the device."""

    entries: tuple[Encoded, ...]  # least recently used first
    free: tuple[int, ...]  # units, taken from the end


def make_cache(num_units: int) -> EncoderCache:
    return EncoderCache((), tuple(range(num_units - 1, -1, -1)))


def cut(segments: Sequence[Segment], num_blocks: int, block_size: int) -> int:
    """Return the number of cached leading blocks that do not end inside an image."""
    for segment in reversed(segments):
        if segment.start < num_blocks * block_size < segment.end:
            num_blocks = segment.start // block_size
    return num_blocks


def chained(
    parent: bytes, tokens: bytes, block_size: int, segments: Sequence[Segment], first_block: int
) -> list[bytes]:
    """Return digests as `block_pool.chained`, with images and parts in those of their blocks."""
    digests, first = [], 0
    for number in range(len(tokens) // (4 * block_size)):
        start = (first_block + number) * block_size
        while first < len(segments) and segments[first].end <= start:
            first += 1
        images = b""
        for segment in islice(segments, first, None):
            if segment.start >= start + block_size:
                break
            images += segment.digest + (start - segment.start).to_bytes(8, "little", signed=True)
        parent = chain(parent, tokens[4 * number * block_size : 4 * (number + 1) * block_size] + images)
        digests.append(parent)
    return digests


def whole(segments: Sequence[Segment], start: int, length: int) -> int:
    """Return the length of a chunk from `start`, at most `length`, that does not end inside an image."""
    for segment in segments:
        if segment.start < start + length < segment.end:
            return max(0, segment.start - start)
    return length


def next_end(segments: Sequence[Segment], start: int) -> int:
    """Return the end of the shortest chunk from `start` that does not end inside an image."""
    return next((segment.end for segment in segments if segment.start <= start < segment.end), start + 1)


def held(segments: Sequence[Segment], num_computed: int) -> list[bytes]:
    """Return the digests of images that a request has read in part."""
    return [segment.digest for segment in segments if segment.start < num_computed < segment.end]


class EncoderEditor:
    """The next value of the cache, within one call."""

    def __init__(self, cache: EncoderCache, kept: Collection[bytes]) -> None:
        """`kept`: images that must not be evicted."""
        self._entries = dict(cache.entries)
        self._free = [*cache.free]
        self._kept = set(kept)
        self._num_encoded = 0  # tokens
        self.encodes: list[Encode] = []

    def reach(
        self, sequence_id: int, segments: Sequence[Segment], start: int, length: int, budget: int, unit: int
    ) -> int:
        """Encode the images of a chunk; return its length, at most `length`, before the first that does not fit.

        `budget`: tokens of images in a plan, unless the first has more.
        """
        for index, segment in enumerate(segments):
            if segment.start >= start + length:
                break
            if segment.end > start and not self._bring(sequence_id, index, segment, budget, unit):
                return max(0, segment.start - start)
        return length

    def forget(self, segments: Sequence[Segment]) -> None:
        """Remove a failed request's images."""
        for segment in segments:
            self._free += self._entries.pop(segment.digest, ())

    def done(self) -> EncoderCache:
        return EncoderCache(tuple(Encoded(*entry) for entry in self._entries.items()), tuple(self._free))

    def _bring(self, sequence_id: int, index: int, segment: Segment, budget: int, unit: int) -> bool:
        units = self._entries.pop(segment.digest, None)
        if units is None:
            units = self._take(segment.length, budget, unit)
            if units is None:
                return False
            self._num_encoded += segment.length
            self.encodes.append(Encode(sequence_id, index, units))
        self._entries[segment.digest] = units
        self._kept.add(segment.digest)
        return True

    def _take(self, num_tokens: int, budget: int, unit: int) -> tuple[int, ...] | None:
        if self._num_encoded and self._num_encoded + num_tokens > budget:
            return None
        count = -(-num_tokens // unit)
        idle = [digest for digest in self._entries if digest not in self._kept]
        if count > len(self._free) + sum(len(self._entries[digest]) for digest in idle):
            return None
        while count > len(self._free):
            self._free += self._entries.pop(idle.pop(0))
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return tuple(taken)
