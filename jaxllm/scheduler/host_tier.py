"""A second tier of blocks in the host's memory: evicted blocks are stored there, and loaded when hit.

A block is (group, tier, index). The plan that evicts a device block stores it before its step overwrites it; the plan
that admits a request loads its blocks before its step reads them. Both copies run in the device's order. A store ends
later, in any order, or fails: the block can be found after `land`.

The host's blocks are used during a copy, or while held for a waiting request; otherwise cached, and evicted in order of
last use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from jaxllm.scheduler import block_pool
from jaxllm.scheduler.block_pool import Pool, PoolEditor

DEVICE, HOST = 0, 1  # tiers
Moved = tuple[int, int, int, int, int]  # group, tier and block of the source, tier and block of the target


class Storing(NamedTuple):
    """A store in progress, not indexed yet."""

    plan: int
    group: int
    block: int
    digest: bytes  # empty: drop the content


class Landed(NamedTuple):
    """The end of a store."""

    plan: int
    group: int
    block: int
    is_whole: bool  # False: the copy failed


class Held(NamedTuple):
    """A host block kept until its owner runs or ends."""

    owner: int  # `Request.sequence_id`
    group: int
    block: int
    digest: bytes


class Host(NamedTuple):
    """The host's blocks by group, stores in progress, and held blocks."""

    pools: tuple[Pool, ...]  # by group
    storing: tuple[Storing, ...] = ()
    held: tuple[Held, ...] = ()
    due: tuple[tuple[int, bytes, int], ...] = ()  # prompts' blocks to store: group, digest, device block
    passed_over: frozenset[int] = frozenset()  # waiting requests whose blocks are being fetched


def make_host(num_blocks: Iterable[int]) -> Host:
    return Host(tuple(map(block_pool.make_pool, num_blocks)))


class HostEditor:
    """The next value of the host's blocks, within one call. Among found blocks, ~b is host block b."""

    def __init__(self, host: Host) -> None:
        self._pools = [PoolEditor(pool) for pool in host.pools]
        self._storing = {(each.group, each.block): each for each in host.storing}
        self._on_way = {(each.group, each.digest): each.block for each in host.storing}
        self._num_storing = [sum(each.group == group for each in host.storing) for group in range(len(host.pools))]
        self._held = host.held
        self._due = host.due
        self.passed_over = host.passed_over
        self._stores: list[Moved] = []
        self._loads: list[Moved] = []
        self._loaded: list[tuple[int, int, bytes]] = []  # group, block, digest: used until the plan is made

    def find(self, device: PoolEditor, group: int, digest: bytes) -> int | None:
        """Return the device's block of a digest, else the host's as ~block, else None."""
        block = device.find(digest)
        if block is None:
            there = self._pools[group].find(digest)
            return None if there is None else ~there
        return block

    def look_up(self, device: PoolEditor, group: int, digests: Iterable[bytes]) -> list[int]:
        found: list[int] = []
        for digest in digests:
            block = self.find(device, group, digest)
            if block is None:
                break
            found.append(block)
        return found

    def load(self, device: PoolEditor, group: int, digests: Sequence[bytes], found: Sequence[int]) -> list[int]:
        """Load the host's blocks in `found` to new, indexed device blocks; return `found` with these.

        Blocks must be available; device blocks in `found` are already shared.
        """
        places = [at for at, block in enumerate(found) if block < 0]
        blocks = list(found)
        self._pools[group].share([~found[at] for at in places])
        for at, block in zip(places, device.take(len(places)).tolist(), strict=True):
            self._loads.append((group, HOST, ~found[at], DEVICE, block))
            self._loaded.append((group, ~found[at], digests[at]))
            blocks[at] = block
        device.publish([(digests[at], blocks[at]) for at in places])
        return blocks

    def keep(
        self, plan: int, most: int, owner: int, group: int, digests: Sequence[bytes], blocks: Sequence[int]
    ) -> None:
        """Store and hold the blocks of a preempted request until the host is full."""
        for digest, block in zip(digests, blocks, strict=False):
            there = self._store(plan, most, group, digest, block)
            if there is None:
                break
            self._pools[group].share([there])
            self._held += (Held(owner, group, there, digest),)

    def receive(self, owner: int, blocks: Iterable[tuple[int, bytes]]) -> list[int]:
        """Index and hold fetched blocks, (group, digest) each.

        Returns the host block to write each to; -1 if its content is stored or being stored, or all blocks are used.
        """
        places: list[int] = []
        held = {(each.group, each.block) for each in self._held if each.owner == owner}  # once each
        new: list[Held] = []
        for group, digest in blocks:
            pool, place = self._pools[group], -1
            there = pool.find(digest)
            if there is not None and (group, there) not in held:
                pool.share([there])
            elif there is None and (group, digest) not in self._on_way and pool.num_available:
                there = place = int(pool.take(1)[0])
                pool.publish([(digest, place)])
            if there is not None and (group, there) not in held:
                held.add((group, there))
                new.append(Held(owner, group, there, digest))
            places.append(place)
        self._held += tuple(new)
        return places

    def note_due(self, group: int, contents: Iterable[tuple[bytes, int]]) -> None:
        """Let the next plans store blocks that this plan's step writes."""
        self._due += tuple((group, digest, block) for digest, block in contents)

    def store_due(self, plan: int, most: int, device: Sequence[PoolEditor]) -> None:
        """Store computed blocks of prompts; at most `most` others wait."""
        wait: list[tuple[int, bytes, int]] = []
        for group, digest, block in self._due:
            if self._num_storing[group] >= most:
                wait.append((group, digest, block))
            elif device[group].find(digest) == block:
                self._store(plan, most, group, digest, block)
        self._due = tuple(wait[:most])

    def let_go(self, owners: Collection[int]) -> None:
        gone = [each for each in self._held if each.owner in owners]
        if gone:
            self._held = tuple(each for each in self._held if each.owner not in owners)
            for _, own in groupby(gone, key=lambda each: each.owner):  # two may hold one block
                self._release([(each.group, each.block, each.digest) for each in own])

    def forget(self, digests: Collection[bytes]) -> None:
        """Remove digests from the index; copies in progress go on, unindexed."""
        gone = frozenset(digests)
        self._due = tuple(each for each in self._due if each[1] not in gone)
        for digest in digests:
            for group, pool in enumerate(self._pools):
                pool.discard([digest])
                there = pool.find(digest)
                if there is not None:
                    pool.forget([there], [digest])
                on_way = self._on_way.pop((group, digest), None)
                if on_way is not None:
                    self._storing[group, on_way] = self._storing[group, on_way]._replace(digest=b"")

    def land(self, landed: Iterable[Landed]) -> None:
        """Record the ends of stores; ignore those from before a reset."""
        for each in landed:
            place = each.group, each.block
            if place not in self._storing or self._storing[place].plan != each.plan:
                continue
            digest = self._storing.pop(place).digest
            self._num_storing[each.group] -= 1
            self._on_way.pop((each.group, digest), None)
            if each.is_whole and digest:
                self._pools[each.group].publish([(digest, each.block)])
            self._pools[each.group].release([each.block], [digest] if digest else [])

    def finish(self, plan: int, most: int, device: Sequence[PoolEditor]) -> list[Moved]:
        """Store this plan's evicted blocks while at most `most` stores of a group run; return all moves, in order."""
        for group, pool in enumerate(device):
            # Prefixes are evicted from the end; if not all fit, store their beginning.
            first = max(0, len(pool.evicted) - most + self._num_storing[group])
            for digest, block in pool.evicted[first:]:
                self._store(plan, most, group, digest, block)
        self._release(self._loaded)
        return [*self._stores, *self._loads]

    def done(self) -> Host:
        pools = tuple(pool.done() for pool in self._pools)
        return Host(pools, tuple(self._storing.values()), self._held, self._due, self.passed_over)

    def _store(self, plan: int, most: int, group: int, digest: bytes, block: int) -> int | None:
        """Store a device block unless its content is stored; return the host's block, None if all are used or too many
        stores run.
        """
        pool = self._pools[group]
        there = pool.find(digest)
        if there is not None:
            pool.share([there])
            pool.release([there], [digest])
            return there
        if (group, digest) in self._on_way:
            return self._on_way[group, digest]
        if not pool.num_available or self._num_storing[group] >= most:
            return None
        there = int(pool.take(1)[0])
        self._num_storing[group] += 1
        self._storing[group, there] = Storing(plan, group, there, digest)
        self._on_way[group, digest] = there
        self._stores.append((group, DEVICE, block, HOST, there))
        return there

    def _release(self, used: Iterable[tuple[int, int, bytes]]) -> None:
        for group, own in groupby(used, key=lambda each: each[0]):
            _, blocks, digests = zip(*own, strict=True)
            self._pools[group].release(blocks, digests)


def as_array(moves: Sequence[Moved]) -> np.ndarray:
    return np.array(moves, np.int32).reshape(-1, 5)
