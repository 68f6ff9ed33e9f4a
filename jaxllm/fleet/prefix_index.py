"""Which blocks each replica of a fleet can hit, by what the replicas tell of their prefix caches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jaxllm.scheduler.state import BlockEvent, Removed, Stored


class PrefixIndex:
    """The digests that each replica has, as its events say: as many as there are blocks in the replicas' pools.

    Kept both ways. A dict from digests to the replicas that have them, a bit for each, so that a prompt costs one
    look-up a block however many replicas there are; and a set for each replica, so that one that goes costs no search
    of what the others have.
    """

    def __init__(self) -> None:
        self.replicas: dict[int, tuple[int, set[bytes]]] = {}  # the bit, a power of two, and the blocks
        self.holders: dict[bytes, int] = {}  # sums of bits
        self.block_size = 0  # tokens of a block, as the events say; 0 before the first

    def apply(self, replica: int, events: Iterable[BlockEvent]) -> None:
        """Follow a replica's events, in their order. A number that was not seen, or forgotten, is a new replica's."""
        if replica not in self.replicas:
            used = sum(bit for bit, _ in self.replicas.values())
            self.replicas[replica] = ~used & (used + 1), set()  # the lowest bit that is free
        bit, held = self.replicas[replica]
        holders = self.holders
        for event in events:
            if isinstance(event, Stored):
                self.block_size = len(event.tokens)
                held.add(event.digest)
                holders[event.digest] = holders.get(event.digest, 0) | bit
            elif isinstance(event, Removed):
                if event.digest in held:
                    held.remove(event.digest)
                    self._release((event.digest,), bit)
            else:
                self._release(held, bit)
                held.clear()

    def forget(self, replica: int) -> None:
        """Drop what a replica had: it has gone, or its events were lost. Late events of it must not be applied."""
        if replica in self.replicas:
            bit, held = self.replicas.pop(replica)
            self._release(held, bit)

    def matches(self, digests: Sequence[bytes]) -> Mapping[int, int]:
        """Count the leading blocks of a prompt that each replica has; replicas with none are absent."""
        all_have = sum(bit for bit, _ in self.replicas.values())
        ends: list[tuple[int, int]] = []  # replicas that have so many leading blocks and no more
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
