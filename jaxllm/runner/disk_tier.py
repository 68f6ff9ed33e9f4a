"""The disk's tier of KV blocks: threads write the host's blocks to files, and read them back.

The engine's thread finds files in an index in memory, which another thread updates, also with other engines' files.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

import jax
import numpy as np

from jaxllm.metrics import Metrics
from jaxllm.runner.disk_store import DiskStore, Name
from jaxllm.runner.host_tier import Key, Row, on_host

READERS = 4  # threads
LISTED_SECONDS = 1.0  # between updates of the index
MOST_PENDING = 256 << 20  # bytes of blocks that wait to be written; further ones are not written
CLOSE_SECONDS = 10.0
_log = logging.getLogger(__name__)
RowShape = Sequence[jax.ShapeDtypeStruct]


class Read(NamedTuple):
    """A read that has ended."""

    ticket: int
    group: int
    index: int
    row: Row | None  # in the host's memory; None: the file is missing or damaged


class BlockSource(Protocol):
    """Blocks by digest that a thread, or another machine, can fetch. No method blocks except `wait` and `close`."""

    def has(self, group: int, digest: bytes) -> bool:
        """Return whether a block is probably present."""
        ...

    def read(self, blocks: Sequence[tuple[int, int, bytes]]) -> int:
        """Begin to read blocks of (group, index, digest); return a ticket."""
        ...

    def ended(self) -> Sequence[Read]:
        """Return the reads that ended since the last call, in any order."""
        ...

    def cancel(self, ticket: int) -> None:
        """Drop reads that have not begun."""

    def wait(self, seconds: float) -> None:
        """Wait until a read ends."""

    def expect(self, names: Mapping[Key, bytes]) -> None:
        """Take the digests of blocks that are being copied to the host; `copied` follows each success."""

    def forget(self, digests: Collection[bytes]) -> None:
        """Remove blocks that may be wrong, also those being copied or written; the caller cancels reads."""


class DiskTier:
    """Writes and reads blocks of a store in threads."""

    def __init__(self, store: DiskStore, shapes: Sequence[RowShape], metrics: Metrics) -> None:
        self._store = store
        self._shapes = shapes
        self._sizes = [sum(int(np.prod(each.shape)) * each.dtype.itemsize for each in row) for row in shapes]
        self._metrics = metrics
        self._parts: list[set[Name]] = [set() for _ in range(256)]  # of the index, by the digest's first byte
        self._stamps = [0] * 256
        self._forgotten: set[Name] = set()  # until their files are removed
        self._lock = threading.Lock()  # of the next field, with the order of `_to_write`
        self._expected: dict[Key, bytes] = {}
        self._tickets = itertools.count(1)
        self._open: set[int] = set()  # tickets that are not cancelled
        self._to_write: SimpleQueue[tuple[Name, Row | None] | None] = SimpleQueue()
        self._most_pending = max(1, MOST_PENDING // max(self._sizes))
        self._to_read: SimpleQueue[tuple[int, int, int, bytes] | None] = SimpleQueue()
        self._ended: deque[Read] = deque()
        self._changed = threading.Event()
        self._has_warned = False
        self._list()
        self._writer = threading.Thread(target=self._write_all, name="jaxllm-disk-write", daemon=True)
        self._writer.start()
        for _ in range(READERS):
            threading.Thread(target=self._read_all, name="jaxllm-disk-read", daemon=True).start()

    # The engine's thread: `BlockSource`.

    def has(self, group: int, digest: bytes) -> bool:
        name = group, digest
        return name in self._parts[digest[0]] and name not in self._forgotten

    def read(self, blocks: Sequence[tuple[int, int, bytes]]) -> int:
        ticket = next(self._tickets)
        self._open.add(ticket)
        for group, index, digest in blocks:
            self._to_read.put((ticket, group, index, digest))
        return ticket

    def ended(self) -> list[Read]:
        reads = [self._ended.popleft() for _ in range(len(self._ended))]
        self._metrics.disk_read_blocks += sum(read.row is not None for read in reads)
        return reads

    def cancel(self, ticket: int) -> None:
        self._open.discard(ticket)

    def wait(self, seconds: float) -> None:
        self._changed.wait(seconds)
        self._changed.clear()

    def expect(self, names: Mapping[Key, bytes]) -> None:
        with self._lock:
            self._expected.update(names)

    def forget(self, digests: Collection[bytes]) -> None:
        gone = frozenset(digests)
        with self._lock:
            for key in [key for key, digest in self._expected.items() if digest in gone]:
                del self._expected[key]
            for name in itertools.product(range(len(self._shapes)), gone):
                self._forgotten.add(name)
                self._to_write.put((name, None))

    def drop_expected(self) -> None:
        """Write no block that is still being copied to the host."""
        with self._lock:
            self._expected.clear()

    # The thread that copies blocks to the host.

    def copied(self, key: Key, row: Row) -> None:
        """Write a block from the host's memory, unless too many wait."""
        with self._lock:
            digest = self._expected.pop(key, None)
            if digest is None or (name := (key[1], digest)) in self._parts[digest[0]]:
                return
            if self._to_write.qsize() < self._most_pending:
                self._to_write.put((name, row))

    def close(self) -> None:
        """End the threads, after the writes that wait. Idempotent."""
        if not self._writer.is_alive():
            return
        self._to_write.put(None)
        self._writer.join(CLOSE_SECONDS)
        self._open.clear()
        for _ in range(READERS):
            self._to_read.put(None)

    # Background threads.

    def _write_all(self) -> None:
        while True:
            try:
                asked = self._to_write.get(timeout=LISTED_SECONDS)
            except Empty:
                self._list()
                continue
            if asked is None:
                return
            name, row = asked
            try:
                if row is None:
                    self._store.remove(*name)
                    self._parts[name[1][0]].discard(name)
                    self._forgotten.discard(name)
                elif name not in self._forgotten:
                    self._write(name, row)
            except Exception as error:
                self._warn("written", error)

    def _write(self, name: Name, row: Row) -> None:
        parts = [np.ascontiguousarray(np.asarray(array)) for array in row]
        # A device may notice its NaN only after this write.
        if all(_is_finite(part) for part in parts):
            if self._store.write(*name, [part.reshape(-1).view(np.uint8) for part in parts]):
                self._parts[name[1][0]].add(name)
                self._metrics.disk_stored_blocks += 1
            else:
                self._metrics.disk_failures += 1

    def _list(self) -> None:
        for part in range(256):
            listing = self._store.listed(part, self._stamps[part])
            if listing is not None:
                self._parts[part], self._stamps[part] = listing

    def _read_all(self) -> None:
        while (asked := self._to_read.get()) is not None:
            ticket, group, index, digest = asked
            if ticket not in self._open:
                continue
            row = None
            try:
                content = self._store.read(group, digest, self._sizes[group])
                if content is None:
                    self._parts[digest[0]].discard((group, digest))
                else:
                    row = self._as_row(group, content)
            except Exception as error:
                self._warn("read", error)
            self._ended.append(Read(ticket, group, index, row))
            self._changed.set()

    def _as_row(self, group: int, content: np.ndarray) -> Row:
        arrays, at = [], 0
        for shape in self._shapes[group]:
            end = at + int(np.prod(shape.shape)) * shape.dtype.itemsize
            arrays.append(content[at:end].view(shape.dtype).reshape(shape.shape))
            at = end
        return tuple(jax.block_until_ready(jax.device_put(arrays, [on_host(shape) for shape in self._shapes[group]])))

    def _warn(self, done: str, error: Exception) -> None:
        self._metrics.disk_failures += 1
        if not self._has_warned:  # a full disk fails every write
            self._has_warned = True
            _log.warning("a KV block could not be %s on disk, and no further failure is logged: %s", done, error)


def _is_finite(array: np.ndarray) -> bool:
    return array.dtype.kind in "iu" or bool(np.isfinite(array).all())
