"""The pool of KV blocks: a value, and an editor that makes the next value from it.

A block is used, cached (unused, with content in the prefix index), or free. N blocks in the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import NamedTuple

import numpy as np

# Shards of the prefix index are byte strings: copying dicts took half of a step that replaced 26 of 4,096 requests.
SHARD_BLOCKS = 32  # of the pool per shard
MOST_SHARDS = 8192  # a change copies their list
BLOCK_BYTES = 4
QUEUE_CHUNK = 1024  # an eviction copies the rest of a chunk
MOST_STALE = 1024  # too few to sweep


class Cached(NamedTuple):
    """A cached block; stale if its stamp differs from the block's."""

    block: int
    digest: bytes
    stamp: int


class Chunk(NamedTuple):
    """A link of a persistent list of released blocks: those of one release, then the rest.

    In columns: tuples would be 200,000 objects for Python's garbage collector.
    """

    blocks: tuple[int, ...]
    digests: tuple[bytes, ...]
    stamps: tuple[int, ...]
    rest: Chunk | None


class Pool(NamedTuple):
    """N blocks and their users, in read-only arrays."""

    references: np.ndarray  # int16[N]: block tables with it
    stamps: np.ndarray  # int32[N]: incremented by a hit of a cached block, whose queue entry is then stale
    free: np.ndarray  # int32[F]: without content, taken from the end
    num_cached: int
    num_entries: int  # with stale ones
    oldest: Chunk | None  # cached blocks, least recently released first …
    newest: Chunk | None  # … continued in reverse: a two-list queue
    shards: tuple[bytes, ...]  # of the prefix index, by the digest's first bytes

    @property
    def num_blocks(self) -> int:
        return len(self.references)

    @property
    def num_available(self) -> int:
        return len(self.free) + self.num_cached

    @property
    def index(self) -> dict[bytes, int]:
        return dict(entry for shard in self.shards for entry in _entries(shard))


def make_pool(num_blocks: int) -> Pool:
    return Pool(
        references=_frozen(np.zeros(num_blocks, np.int16)),
        stamps=_frozen(np.zeros(num_blocks, np.int32)),
        free=_frozen(np.arange(num_blocks - 1, -1, -1, dtype=np.int32)),
        num_cached=0,
        num_entries=0,
        oldest=None,
        newest=None,
        shards=make_shards((), num_blocks),
    )


def content_root(*, salt: bytes = b"", content: bytes = b"") -> bytes:
    """Return the root of a chain of digests, for a cache salt and the digest of all inputs except tokens.

    Lengths precede the parts, so different pairs have different roots.
    """
    return sha256(b"".join(len(part).to_bytes(8, "little") + part for part in (salt, content))).digest()


def chain(parent: bytes, tokens: bytes) -> bytes:
    """Return the digest of a full block: of its tokens (int32, little-endian) and the parent's digest.

    SHA-256, because a hit is served without comparing tokens (CVE-2025-25183 of vLLM: a guessable hash).
    """
    return sha256(parent + tokens).digest()


def chained(parent: bytes, tokens: bytes, block_size: int) -> list[bytes]:
    """Return the digests of the full blocks of `tokens`, as `chain`, after `parent`."""
    digests = []
    for end in range(4 * block_size, len(tokens) + 1, 4 * block_size):
        parent = chain(parent, tokens[end - 4 * block_size : end])
        digests.append(parent)
    return digests


class PoolEditor:
    """The next value of a pool, within one call; copies each array at most once.

    Copying them per request made a step with 6 admissions take 9 ms.
    """

    def __init__(self, pool: Pool, records: bool = False) -> None:
        self._pool = pool
        self._references: np.ndarray | None = None
        self._stamps: np.ndarray | None = None
        self._shards: Sequence[bytes] = pool.shards  # a list after a change
        self._records = records
        self.changes: list[tuple[bool, bytes]] = []
        self.evicted: list[tuple[bytes, int]] = []
        self._free = pool.free
        self._freed: list[int] = []
        self._num_cached = pool.num_cached
        self._num_entries = pool.num_entries
        self._oldest = pool.oldest
        self._newest = pool.newest

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._freed) + self._num_cached

    def find(self, digest: bytes) -> int | None:
        return self._find(digest)

    def look_up(self, digests: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest indexed prefix of `digests`."""
        found = []
        for digest in digests:
            block = self._find(digest)
            if block is None:
                break
            found.append(block)
        return found

    def num_idle(self, blocks: Sequence[int]) -> int:
        """Return the number of unused blocks among `blocks`, which `share` would make unavailable."""
        if not blocks:
            return 0
        references = self._pool.references if self._references is None else self._references
        return int(np.count_nonzero(references[np.asarray(blocks, np.int32)] == 0))

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to indexed blocks; cached ones become used."""
        if not blocks:
            return
        references = self._own_references()
        chosen = np.asarray(blocks, np.int32)
        idle = chosen[references[chosen] == 0]
        references[chosen] += 1
        if len(idle):
            self._own_stamps()[idle] += 1
            self._num_cached -= len(idle)

    def take(self, count: int) -> np.ndarray:
        """Return `count` blocks with one reference each: free ones, then the least recently released cached ones."""
        if count > self.num_available:
            raise ValueError(f"took {count} blocks of {self.num_available} available")
        if self._freed and count > len(self._free):
            self._free, self._freed = self._all_free(), []
        num_free = min(count, len(self._free))
        taken = self._free[len(self._free) - num_free :][::-1]
        self._free = self._free[: len(self._free) - num_free]
        if num_free < count:
            taken = np.concatenate([taken, np.asarray(self._evict(count - num_free), np.int32)])
        self._own_references()[taken] = 1
        return taken

    def publish(self, entries: Iterable[tuple[bytes, int]]) -> None:
        """Add (digest, block) pairs to the index; known digests keep their blocks."""
        shards = self._own_shards()
        num_shards = len(shards)
        for digest, block in entries:
            number = _number(digest, num_shards)
            shard = shards[number]
            if digest not in shard or _place(shard, digest) < 0:
                shards[number] = _extended(shard, digest, block)
                if self._records:
                    self.changes.append((True, digest))

    def forget(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """Remove a request's blocks from the index unless other requests use them."""
        references = self._own_references()
        for block, digest in zip(blocks, digests, strict=False):
            if self._find(digest) == block and references[block] == 1:
                self._drop(digest)

    def discard(self, digests: Iterable[bytes]) -> None:
        references = self._pool.references if self._references is None else self._references
        for digest in digests:
            block = self._find(digest)
            if block is not None and references[block] == 0:
                self._drop(digest)
                self._own_stamps()[block] += 1
                self._num_cached -= 1
                self._freed.append(block)

    def release(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """Remove one reference from each block; unused ones become cached if indexed, else free.

        `digests` are those of the leading full blocks. The last block is evicted first: prefixes outlive their
        continuations.
        """
        if not blocks:
            return
        references = self._own_references()
        chosen = np.asarray(blocks, np.int32)
        references[chosen] -= 1
        if references[chosen].min() < 0:
            raise ValueError("a block was released more often than it was named")
        cached: list[int] = []
        for position in np.flatnonzero(references[chosen] == 0)[::-1].tolist():
            block = blocks[position]
            if position < len(digests) and self._find(digests[position]) == block:
                cached.append(position)
            else:
                self._freed.append(block)
        if cached:
            stamps = self._pool.stamps if self._stamps is None else self._stamps
            kept = chosen[cached]
            self._num_cached += len(cached)
            self._num_entries += len(cached)
            self._newest = Chunk(
                tuple(kept.tolist()),
                tuple([digests[position] for position in cached]),
                tuple(stamps[kept].tolist()),
                self._newest,
            )

    def done(self) -> Pool:
        pool = Pool(
            references=self._pool.references if self._references is None else _frozen(self._references),
            stamps=self._pool.stamps if self._stamps is None else _frozen(self._stamps),
            free=_frozen(self._all_free() if self._freed else self._free),
            num_cached=self._num_cached,
            num_entries=self._num_entries,
            oldest=self._oldest,
            newest=self._newest,
            shards=tuple(self._shards),
        )
        # Hits leave stale entries, which must not outnumber the others.
        return _compact(pool) if pool.num_entries > 2 * pool.num_cached + MOST_STALE else pool

    def _evict(self, count: int) -> list[int]:
        """Remove the least recently released cached blocks from queue and index, and return them."""
        stamps = self._pool.stamps if self._stamps is None else self._stamps
        evicted: list[int] = []
        while len(evicted) < count:
            if self._oldest is None:
                self._oldest, self._newest = _reversed(self._newest), None
                if self._oldest is None:
                    raise RuntimeError("num_cached counts blocks that the queue does not hold")
            blocks, digests, their_stamps, rest = self._oldest
            used = 0
            now = stamps[np.asarray(blocks[: 2 * (count - len(evicted))])].tolist()
            for block, digest, stamp, current in zip(blocks, digests, their_stamps, now, strict=False):
                if len(evicted) == count:
                    break
                used += 1
                if current == stamp:
                    self._drop(digest)
                    evicted.append(block)
                    self.evicted.append((digest, block))
            self._num_entries -= used
            left = Chunk(blocks[used:], digests[used:], their_stamps[used:], rest)
            self._oldest = left if left.blocks else rest
        self._num_cached -= count
        return evicted

    def _drop(self, digest: bytes) -> None:
        number = _number(digest, len(self._shards))
        shard = self._shards[number]
        at = _place(shard, digest)
        if at < 0:
            raise RuntimeError("a cached block is not in the index")
        self._own_shards()[number] = shard[:at] + shard[at + len(digest) + BLOCK_BYTES :]
        if self._records:
            self.changes.append((False, digest))

    def _find(self, digest: bytes) -> int | None:
        shard = self._shards[_number(digest, len(self._shards))]
        at = _place(shard, digest)
        if at < 0:
            return None
        at += len(digest)
        return int.from_bytes(shard[at : at + BLOCK_BYTES])

    def _own_references(self) -> np.ndarray:
        if self._references is None:
            self._references = self._pool.references.copy()
        return self._references

    def _own_stamps(self) -> np.ndarray:
        if self._stamps is None:
            self._stamps = self._pool.stamps.copy()
        return self._stamps

    def _own_shards(self) -> list[bytes]:
        if not isinstance(self._shards, list):
            self._shards = list(self._shards)
        return self._shards

    def _all_free(self) -> np.ndarray:
        return np.concatenate([self._free, np.asarray(self._freed, np.int32)])


def cached_blocks(pool: Pool) -> list[int]:
    return [entry.block for entry in cached_entries(pool)]


def make_shards(entries: Iterable[tuple[bytes, int]], num_blocks: int) -> tuple[bytes, ...]:
    shards = [b""] * min(MOST_SHARDS, -(-num_blocks // SHARD_BLOCKS))
    for digest, block in entries:
        number = _number(digest, len(shards))
        shards[number] = _extended(shards[number], digest, block)
    return tuple(shards)


def _number(digest: bytes, num_shards: int) -> int:
    return (digest[0] << 8 | digest[1]) % num_shards


def _extended(shard: bytes, digest: bytes, block: int) -> bytes:
    """Return a shard with an entry added; the first byte is the length of its digests."""
    return (shard or bytes([len(digest)])) + digest + block.to_bytes(BLOCK_BYTES)


def _entries(shard: bytes) -> Iterator[tuple[bytes, int]]:
    size = shard[0] + BLOCK_BYTES if shard else 1
    for at in range(1, len(shard), size):
        end = at + size - BLOCK_BYTES
        yield shard[at:end], int.from_bytes(shard[end : end + BLOCK_BYTES])


def _place(shard: bytes, digest: bytes) -> int:
    at = shard.find(digest, 1)
    while at > 0 and (at - 1) % (len(digest) + BLOCK_BYTES):  # a match across two entries
        at = shard.find(digest, at + 1)
    return at


def _compact(pool: Pool) -> Pool:
    return pool._replace(num_entries=pool.num_cached, oldest=make_queue(cached_entries(pool)), newest=None)


def make_queue(entries: Iterable[Cached]) -> Chunk | None:
    kept = [*entries]
    chunk = None
    for start in reversed(range(0, len(kept), QUEUE_CHUNK)):
        blocks, digests, stamps = zip(*kept[start : start + QUEUE_CHUNK], strict=True)
        chunk = Chunk(blocks, digests, stamps, chunk)
    return chunk


def cached_entries(pool: Pool) -> Iterator[Cached]:
    for chunk in (pool.oldest, _reversed(pool.newest)):
        while chunk is not None:
            for entry in zip(chunk.blocks, chunk.digests, chunk.stamps, strict=True):
                if pool.stamps[entry[0]] == entry[2]:
                    yield Cached(*entry)
            chunk = chunk.rest


def _reversed(chunk: Chunk | None) -> Chunk | None:
    result = None
    while chunk is not None:
        result = chunk._replace(rest=result)
        chunk = chunk.rest
    return result


def _frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
