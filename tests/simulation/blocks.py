"""A naive model of the blocks of one group of layers: reference counts, a set of free blocks, and two dicts."""

from __future__ import annotations

from collections.abc import Collection

from jaxllm.scheduler import block_pool
from jaxllm.scheduler.block_pool import Pool
from tests.simulation.device import Violation


class Blocks:
    """Blocks that are used, cached or free. A key names the content of a block."""

    def __init__(self, count: int) -> None:
        self.references = [0] * count
        self.free = set(range(count))
        self.cached: dict[int, int] = {}  # by block: key; the first is evicted first
        self.index: dict[int, int] = {}  # by key: block
        self.evicted: list[tuple[int, int]] = []  # keys and blocks, in this plan

    @property
    def num_available(self) -> int:
        return len(self.free) + len(self.cached)

    @property
    def num_used(self) -> int:
        return len(self.references) - self.num_available

    def num_left(self, shared: Collection[int]) -> int:
        """Count the blocks that are available once these are shared."""
        return self.num_available - len({block for block in shared if self.references[block] == 0})

    def share(self, blocks: Collection[int]) -> None:
        for block in blocks:
            self.references[block] += 1
            self.cached.pop(block, None)

    def take(self, block: int, any_free: bool) -> None:
        """Allocate the block that production chose; check that it is free, or else the least recently released."""
        if any_free:
            if block not in self.free:
                raise Violation(f"I1: block {block} is handed out, and is not free")
            self.free.remove(block)
        else:
            oldest = next(iter(self.cached))
            if block != oldest:
                raise Violation(f"block {block} is evicted, where {oldest} is the least recently used")
            self.evicted.append((self.cached.pop(block), block))
            del self.index[self.evicted[-1][0]]
        self.references[block] = 1

    def release(self, block: int, key: int | None) -> None:
        """Release a reference of a block; the last one caches it if the index has it under `key`, and else frees it."""
        self.references[block] -= 1
        if self.references[block]:
            return
        if key is not None and self.index.get(key) == block:
            self.cached[block] = key
        else:
            self.free.add(block)

    def forget(self, key: int, block: int) -> None:
        """Remove a block from the index, if exactly one request uses it."""
        if self.index.get(key) == block and self.references[block] == 1:
            del self.index[key]

    def discard(self, key: int) -> None:
        """Free the cached block of a key, if it exists."""
        block = self.index.get(key)
        if block in self.cached:
            del self.index[key], self.cached[block]
            self.free.add(block)

    def compare(self, pool: Pool, with_index: bool) -> None:
        if pool.references.tolist() != self.references:
            raise Violation("I2: a block is not named as often as tables name it")
        if sorted(pool.free.tolist()) != sorted(self.free):
            raise Violation("I1: the free blocks are not those that no request uses")
        if pool.num_cached != len(self.cached) or block_pool.cached_blocks(pool) != list(self.cached):
            raise Violation("I1: the cached blocks are not in order of their release")
        if self.num_available + sum(count > 0 for count in self.references) != len(self.references):
            raise Violation("I1: a block is lost")
        if pool.num_entries > 2 * pool.num_cached + block_pool.MOST_STALE:
            raise Violation("I13: the queue of cached blocks grows")
        if with_index and sorted(pool.index.values()) != sorted(self.index.values()):
            raise Violation("the prefix index holds other blocks")
