"""The blocks that a producer keeps for pulls, until released or some time after the last pull or heartbeat.
Thread-safe.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jaxllm.engine.features.transfer.frames import Block


@dataclass(eq=False)
class Lease:
    """The blocks of one prompt."""

    name: str
    num_bytes: int  # reserved
    ends: float
    blocks: Mapping[Block, bytes] = field(default_factory=dict)
    is_filled: threading.Event = field(default_factory=threading.Event)


class Leases:
    """Leases by name."""

    def __init__(self, most_bytes: int, seconds: float, clock: Callable[[], float]) -> None:
        self._most_bytes = most_bytes
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[str, Lease] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def open(self, num_bytes: int) -> Lease | None:
        """Reserve room for blocks; return None if the buffer is full."""
        self.sweep()
        with self._lock:
            if self._num_bytes + num_bytes > self._most_bytes:
                return None
            lease = Lease(uuid.uuid4().hex, num_bytes, self._clock() + self._seconds)
            self._leases[lease.name] = lease
            self._num_bytes += num_bytes
            return lease

    def fill(self, lease: Lease, blocks: Mapping[Block, bytes]) -> None:
        """Add a lease's blocks, unless it has ended."""
        with self._lock:
            if lease.name in self._leases:
                lease.blocks = blocks
                self._resize(lease, sum(map(len, blocks.values())))
        lease.is_filled.set()

    def find(self, name: str) -> Lease | None:
        """Return a lease, renewed; None if it has ended."""
        self.sweep()
        with self._lock:
            lease = self._leases.get(name)
            if lease is not None:
                lease.ends = self._clock() + self._seconds
            return lease

    def release(self, name: str) -> bool:
        """End a lease; return whether it was open."""
        with self._lock:
            return self._end(name)

    def sweep(self) -> None:
        with self._lock:
            now = self._clock()
            for name in [lease.name for lease in self._leases.values() if lease.ends <= now]:
                self._end(name)

    def _end(self, name: str) -> bool:
        lease = self._leases.pop(name, None)
        if lease is None:
            return False
        self._resize(lease, 0)
        lease.blocks = {}
        lease.is_filled.set()
        return True

    def _resize(self, lease: Lease, num_bytes: int) -> None:
        self._num_bytes += num_bytes - lease.num_bytes
        lease.num_bytes = num_bytes
