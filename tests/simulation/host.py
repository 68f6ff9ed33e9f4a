"""A naive model of the host's tier of blocks; and copies to it and reads from a disk that are slow, failed or lost."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

from jaxllm.runner.disk_tier import Read
from jaxllm.runner.host_tier import Copied, Row
from jaxllm.scheduler.host_tier import DEVICE, HOST, Host, Landed
from tests.simulation.blocks import Blocks
from tests.simulation.device import POISON, Violation


class Tier:
    """The expected content of the host. A key names the content of a block, as in `Blocks`."""

    def __init__(self, num_blocks: Sequence[int], most_stores: int) -> None:
        self.groups = [Blocks(count) for count in num_blocks]
        self.most_stores = most_stores
        self.storing: dict[tuple[int, int], tuple[int, int | None]] = {}  # by group and host block: plan, key
        self.held: list[tuple[int, int, int, int]] = []  # id, group, block, key
        self.due: list[tuple[int, int, int]] = []  # group, key, block of the device: prompts to be stored
        self.passed_over: set[int] = set()  # ids
        self.loads: list[list[int]] = []  # moves of this plan
        self.stores: list[list[int]] = []
        self.num_stored = 0
        self.fired: Counter[str] = Counter()

    def begin(self, moves: Sequence[list[int]]) -> None:
        """Begin to check the moves of a plan."""
        self._unread = deque(move for move in moves if move[3] == HOST)
        self._used: list[tuple[int, int, int]] = []
        self.loads, self.stores = [], []

    def find(self, group: int, key: int) -> int | None:
        """Return ~b for the host block b with this content, or None."""
        there = self.groups[group].index.get(key) if self.groups else None
        return None if there is None else ~there

    def store(self, plan: int, group: int, key: int, block: int) -> int | None:
        """Expect a store, unless the content is stored already or the host is full; return the host block, or None."""
        blocks = self.groups[group]
        there = blocks.index.get(key)
        if there is not None:
            blocks.share([there])
            blocks.release(there, key)
            return there
        for (own, there), (_, of) in self.storing.items():
            if (own, of) == (group, key):
                return there
        if not blocks.num_available or not self._room(group):
            self.fired["store_without_room"] += 1
            return None
        if not self._unread or self._unread[0][:4] != [group, DEVICE, block, HOST]:
            raise Violation(f"block {block} of {group} is evicted, and its content is not stored")
        there = self._unread.popleft()[4]
        self.fired["host_evicted"] += not blocks.free
        blocks.take(there, bool(blocks.free))
        self.storing[group, there] = plan, key
        self.stores.append([group, DEVICE, block, HOST, there])
        return there

    def _room(self, group: int) -> int:
        return self.most_stores - sum(own == group for own, _ in self.storing)

    def load(self, group: int, there: int, block: int, key: int) -> None:
        """Expect a load; the host keeps the block."""
        self.groups[group].share([there])
        self._used.append((group, there, key))
        self.loads.append([group, HOST, there, DEVICE, block])
        self.fired["loads"] += 1

    def hold(self, plan: int, owner: int, group: int, contents: Sequence[tuple[int, int]]) -> None:
        """Expect stores of a preempted request's blocks (key, block), until the host is full, and hold them."""
        for key, block in contents:
            there = self.store(plan, group, key, block)
            if there is None:
                break
            self.groups[group].share([there])
            self.held.append((owner, group, there, key))
            self.fired["swapped_out"] += 1

    def receive(self, owner: int, contents: Sequence[tuple[int, int]], places: Sequence[int]) -> None:
        """Expect places for contents (group, key) from elsewhere that are neither here nor on their way."""
        for (group, key), place in zip(contents, places, strict=True):
            blocks = self.groups[group]
            there = blocks.index.get(key)
            is_new = there is None and (group, key) not in {(own, of) for (own, _), (_, of) in self.storing.items()}
            if not is_new or not blocks.num_available:
                self.fired["received_twice" if not is_new else "received_without_room"] += 1
                if place != -1:
                    raise Violation("a content gets a second block of the host, or one that is used")
            else:
                self.fired["received"] += 1
                blocks.take(place, bool(blocks.free))
                blocks.index[key] = there = place
            if there is not None and (owner, group, there, key) not in self.held:
                blocks.share([there] if place == -1 else [])
                self.held.append((owner, group, there, key))

    def store_due(self, plan: int, indices: Sequence[Mapping[int, int]]) -> None:
        """Expect stores of the blocks of prompts that an earlier plan computed; `indices` are the device's, by key."""
        wait = []
        for group, key, block in self.due:
            if self._room(group) <= 0:
                wait.append((group, key, block))
            elif indices[group].get(key) == block:
                self.fired["prompt_stored"] += 1
                self.store(plan, group, key, block)
        self.fired["prompt_waits"] += bool(wait)
        self.due = wait[: self.most_stores]

    def let_go(self, owners: Collection[int]) -> None:
        for _, own in groupby([each for each in self.held if each[0] in owners], key=lambda each: each[:2]):
            for _, group, there, key in reversed([*own]):
                self.groups[group].release(there, key)
        self.held = [each for each in self.held if each[0] not in owners]

    def forget(self, key: int) -> None:
        """Remove a content that may be wrong."""
        self.due = [each for each in self.due if each[1] != key]
        for group, blocks in enumerate(self.groups):
            blocks.discard(key)
            if key in blocks.index:
                blocks.forget(key, blocks.index[key])
            for place, (plan, of) in self.storing.items():
                if place[0] == group and of == key:
                    self.storing[place] = plan, None
                    self.fired["forgotten_store"] += 1

    def land(self, landed: Sequence[Landed]) -> None:
        for plan, group, there, is_whole in landed:
            due, key = self.storing.get((group, there), (None, None))
            self.fired["stale_store"] += due != plan
            if due != plan:
                continue
            del self.storing[group, there]
            if is_whole and key is not None:
                self.groups[group].index[key] = there
            self.groups[group].release(there, key)
            self.num_stored += is_whole
            self.fired["stored" if is_whole else "store_failed"] += 1

    def finish(self, plan: int, evicted: Sequence[Sequence[tuple[int, int]]]) -> list[list[int]]:
        """Expect stores of the evicted keys and blocks of each group; return the plan's moves between tiers."""
        for group, own in enumerate(evicted):
            for key, block in own[max(0, len(own) - self._room(group)) :]:
                self.store(plan, group, key, block)
        for _, own in groupby(self._used, key=lambda each: each[0]):
            for group, there, key in reversed([*own]):
                self.groups[group].release(there, key)
        if self._unread:
            raise Violation("a block is stored that no plan has evicted")
        return [*self.stores, *self.loads]

    def compare(self, host: Host | None, with_index: bool) -> None:
        if host is None:
            return
        for blocks, pool in zip(self.groups, host.pools, strict=True):
            blocks.compare(pool, with_index)
        storing = {(group, there): (plan, bool(digest)) for plan, group, there, digest in host.storing}
        if storing != {place: (plan, key is not None) for place, (plan, key) in self.storing.items()}:
            raise Violation("other stores are on their way than are due")
        if [each[:3] for each in host.held] != [each[:3] for each in self.held]:
            raise Violation("other blocks of the host are held for preempted requests than are due")
        if [(group, block) for group, _, block in host.due] != [(group, block) for group, _, block in self.due]:
            raise Violation("other blocks of prompts wait to be stored than are due")
        if host.passed_over != self.passed_over:
            raise Violation("other requests are passed over than are due")


class SlowCopies:
    """Copies that end at random turns, in random order; some fail, and in some worlds no copy ends."""

    def __init__(self, setting: Mapping[str, Any], disk: SlowDisk | None) -> None:
        self._disk = disk
        self._chance = random.Random(setting["seed"])
        self._ends, self._fails = setting["transfers"]
        self._on_way: list[tuple[Any, Row]] = []

    def begin(self, copies: Sequence[tuple[tuple[int, int, int], Row]]) -> None:
        self._on_way += copies

    def ended(self) -> list[Copied]:
        self._chance.shuffle(self._on_way)
        count = sum(self._chance.random() < self._ends for _ in self._on_way)
        ended, self._on_way = self._on_way[:count], self._on_way[count:]
        copied = [Copied(key, None if self._chance.random() < self._fails else row) for key, row in ended]
        for key, row in copied:
            if row is not None and self._disk is not None:
                self._disk.copied(key, row)
        return copied

    def close(self) -> None:
        """Do nothing: no thread copies."""


class SlowDisk:
    """Files that outlive the engine, with reads that end at random turns, in random order; some fail or are lost.

    Implements `disk_tier.BlockSource`. Another engine may remove a file.
    """

    def __init__(self, setting: Mapping[str, Any], files: dict[tuple[int, bytes], Row], fired: Counter[str]) -> None:
        self._chance = random.Random(setting["seed"] + 1)
        self._ends, self._fails = setting["reads"]
        self._files = files
        self._fired = fired
        self._expected: dict[tuple[int, int, int], bytes] = {}
        self._on_way: list[Read] = []
        self._num_tickets = 0

    def has(self, group: int, digest: bytes) -> bool:
        return (group, digest) in self._files

    def read(self, blocks: Sequence[tuple[int, int, bytes]]) -> int:
        """Begin to read; a file that is removed later may still be read."""
        self._num_tickets += 1
        self._fired["disk_read"] += 1
        for group, index, digest in blocks:
            is_gone = self._chance.random() < self._fails
            row = (self._files.pop if is_gone else self._files.get)((group, digest))
            self._on_way.append(Read(self._num_tickets, group, index, None if is_gone else row))
        return self._num_tickets

    def ended(self) -> list[Read]:
        self._chance.shuffle(self._on_way)
        count = sum(self._chance.random() < self._ends for _ in self._on_way)
        ended, self._on_way = self._on_way[:count], self._on_way[count:]
        return ended

    def cancel(self, ticket: int) -> None:
        """Drop half of the reads: the others have begun."""
        self._fired["disk_cancelled"] += any(read.ticket == ticket for read in self._on_way)
        self._on_way = [each for each in self._on_way if each.ticket != ticket or self._chance.random() < 0.5]

    def wait(self, seconds: float) -> None:
        self._fired["disk_awaited"] += 1

    def expect(self, names: Mapping[tuple[int, int, int], bytes]) -> None:
        self._expected |= names

    def copied(self, key: tuple[int, int, int], row: Row) -> None:
        digest = self._expected.pop(key, None)
        if digest is not None and POISON not in row[0]:
            self._files[key[1], digest] = row

    def forget(self, digests: Collection[bytes]) -> None:
        self._expected = {key: digest for key, digest in self._expected.items() if digest not in digests}
        gone = [name for name in self._files if name[1] in digests]
        self._fired["disk_forgotten"] += len(gone)
        for name in gone:
            del self._files[name]

    def drop_expected(self) -> None:
        self._expected.clear()
