"""Which adapters are resident on the device, and which waiting request's may become one of them.

Residents are numbers in one order: first the idle ones, which no running request has, the least recently used first;
then those in use, longest in use first. A waiting request whose adapter finds no place is skipped, not the queue behind
it; and it claims a place, so that it does not starve. Knows numbers of adapters; knows no queue and no device.
"""

from __future__ import annotations

from collections.abc import Set


def idle_first(residents: tuple[int, ...], in_use: Set[int]) -> tuple[int, ...]:
    """Order residents again after requests have left their slots: adapters that no running request has come first."""
    ordered = tuple(sorted(residents, key=in_use.__contains__))  # which keeps the order of equals
    return residents if ordered == residents else ordered


class AdapterPlaces:
    """The places of one plan while it admits requests, asked from the first in rank to the last.

    Each adapter that waits claims a place: a free one, or, if there is none, that of the adapter longest in use, which
    from then on takes no request from further behind. So it drains, however many more of its requests come, and the
    first in rank that waits is admitted once the requests that run with it have ended.
    Half of the places drain at a time, and none that has come into use in this very plan: it brings along who else
    waits for it, and steps stay full. Without both, 200 adapters with 10 requests each ran 8 rows a step instead of 48.
    """

    def __init__(self, residents: tuple[int, ...], in_use: Set[int], most: int) -> None:
        self.residents = residents
        self._most = most
        self._in_use = [adapter for adapter in residents if adapter in in_use]
        self._most_draining = min(len(self._in_use), max(1, most // 2))
        self._num_claims = 0
        self._has_new = False
        self.closed: set[int] = set()  # which no further request of this plan can have

    def admits(self, adapter: int) -> bool:
        """Say whether the next request in rank may have its adapter in this plan; if not, the adapter claims a place.

        One adapter in a plan may be new: that bounds what is sent to the device before the step, and what is there
        beside the adapters of steps in flight.
        """
        if not adapter:
            return True
        if adapter in self.closed:
            return False
        num_lacking = len(self._in_use) + self._num_claims - self._most  # below 0: so many places are left
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
        """A request with this adapter gets a slot; a new one takes the place of the idle one used longest ago."""
        if not adapter or adapter in self._in_use:
            return
        others = tuple(other for other in self.residents if other != adapter)
        if len(others) == len(self.residents):
            self._has_new = True
            others = others[len(others) == self._most :]
        moved = (*others, adapter)
        self.residents = self.residents if moved == self.residents else moved
        self._in_use.append(adapter)
