"""Selects the adapters resident on the device, and the waiting requests that may use or replace one.

Residents are adapter numbers: idle ones first, least recently used first; then those in use, longest in use first.
"""

from __future__ import annotations

from collections.abc import Set


def idle_first(residents: tuple[int, ...], in_use: Set[int]) -> tuple[int, ...]:
    """Move residents without requests to the front, in order; return the same object if nothing moves."""
    ordered = tuple(sorted(residents, key=in_use.__contains__))
    return residents if ordered == residents else ordered


class AdapterPlaces:
    """The places for adapters while one plan admits requests, called in order of rank.

    Each waiting adapter claims a place: a free one, else that of the adapter longest in use, which drains, as it
    accepts no more requests of lower rank. At most half of the places drain at a time. Without both rules, 200 adapters
    with 10 requests each ran 8 rows a step instead of 48.
    """

    def __init__(self, residents: tuple[int, ...], in_use: Set[int], most: int) -> None:
        self.residents = residents
        self._most = most
        self._in_use = [adapter for adapter in residents if adapter in in_use]
        self._most_draining = min(len(self._in_use), max(1, most // 2))
        self._num_claims = 0
        self._has_new = False
        self.closed: set[int] = set()

    def admits(self, adapter: int) -> bool:
        """Return whether the next request may have its adapter; if not, claim a place.

        A plan adds at most one adapter, to bound the transfer before the step.
        """
        if not adapter:
            return True
        if adapter in self.closed:
            return False
        num_lacking = len(self._in_use) + self._num_claims - self._most  # negative: free places
        if adapter in self._in_use:
            if num_lacking <= 0 or adapter not in self._in_use[: min(num_lacking, self._most_draining)]:
                return True
        elif num_lacking < 0 and (adapter in self.residents or not self._has_new):
            return True
        else:
            self._num_claims += 1
        self.closed.add(adapter)
        return False

    def enter(self, adapter: int) -> None:
        """Record that a request with this adapter got a slot; it may replace the least recently used."""
        if not adapter or adapter in self._in_use:
            return
        others = tuple(other for other in self.residents if other != adapter)
        if len(others) == len(self.residents):
            self._has_new = True
            others = others[len(others) == self._most :]
        moved = (*others, adapter)
        self.residents = self.residents if moved == self.residents else moved
        self._in_use.append(adapter)
