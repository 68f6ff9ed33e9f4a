"""An index of replicas' prefix caches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jaxllm.scheduler.state import BlockEvent, BlockRemoved, BlockStored


class PrefixIndex:
    """Block digests by replica.

    A bit mask per digest makes a prompt cost one look-up per block; a set per replica makes its removal cheap.
    """

    def __init__(self) -> None:
        self.replicas: dict[int, tuple[int, set[bytes]]] = {}  # bit (a power of two) and digests
        self.holders: dict[bytes, int] = {}
        self.block_size = 0  # tokens; 0 before the first event

    def apply(self, replica: int, events: Iterable[BlockEvent]) -> None:
        """Apply events in order; an unknown number starts a new replica."""
        if replica not in self.replicas:
            used = sum(bit for bit, _ in self.replicas.values())
            self.replicas[replica] = ~used & (used + 1), set()
        bit, held = self.replicas[replica]
        holders = self.holders
        for event in events:
            if isinstance(event, BlockStored):
                self.block_size = len(event.tokens)
                held.add(event.digest)
                holders[event.digest] = holders.get(event.digest, 0) | bit
            elif isinstance(event, BlockRemoved):
                if event.digest in held:
                    held.remove(event.digest)
                    self._release((event.digest,), bit)
            else:
                self._release(held, bit)
                held.clear()

    def forget(self, replica: int) -> None:
        """Remove a replica that lost its cache or events; apply no later events."""
        if replica in self.replicas:
            bit, held = self.replicas.pop(replica)
            self._release(held, bit)

    def matches(self, digests: Sequence[bytes]) -> Mapping[int, int]:
        """Return the number of leading cached blocks per replica, if any."""
        all_have = sum(bit for bit, _ in self.replicas.values())
        ends: list[tuple[int, int]] = []  # (replicas as bits, number of leading blocks)
        for count, digest in enumerate(digests):
            still_have = all_have & self.holders.get(digest, 0)
            if still_have != all_have:
                ends.append((all_have ^ still_have, count))
                all_have = still_have
            if not all_have:
                break
        ends.append((all_have, len(digests)))
        return {
            replica: count
            for bits, count in ends
            if bits and count
            for replica, (bit, _) in self.replicas.items()
            if bits & bit
        }

    def _release(self, digests: Iterable[bytes], bit: int) -> None:
        holders = self.holders
        for digest in digests:
            left = holders[digest] ^ bit
            if left:
                holders[digest] = left
            else:
                del holders[digest]
