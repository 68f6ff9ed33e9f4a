"""Which replica runs which request: stands where an engine has its inbox, and finds replicas by `choose`.

Belongs to the event loop. Knows replicas by what they say; starts none and ends none.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxllm.errors import UnavailableError
from jaxllm.fleet.choose import choose
from jaxllm.fleet.prefix_index import PrefixIndex
from jaxllm.fleet.replica import Replica, Routed
from jaxllm.outputs import FinishReason

NONE_TAKES_WORK = "No replica takes work now."
MOST_RUNS = 2  # of a request: one that brings down what runs it must not bring down all of them, one after the other


class Router:
    """The replicas' inbox."""

    def __init__(self, replicas: list[Replica], fail: Callable[[str, Exception], None]) -> None:
        """`replicas` are in the order of their numbers; `fail` ends a request, by its internal id, with an error."""
        self.replicas = replicas
        self.index = PrefixIndex()
        self._fail = fail
        self._of: dict[str, Replica] = {}  # by internal id

    def add(self, request: Routed, num_runs: int = 1) -> None:
        """Send a request to a replica; UnavailableError where none takes work."""
        loads = {each.number: each.num_tokens for each in self.replicas if each.takes_work}
        if not loads:
            raise UnavailableError(NONE_TAKES_WORK)
        replica = self.replicas[choose(request.digests, loads, self.index)]
        replica.add(request, num_runs)
        self._of[request.internal_id] = replica

    def abort(self, internal_id: str, reason: FinishReason) -> None:
        """End a request."""
        replica = self._of.get(internal_id)
        if replica is not None:
            replica.send("abort", internal_id, reason)

    def forget(self, internal_id: str) -> Replica | None:
        """Note that a request has ended; return which replica ran it."""
        replica = self._of.pop(internal_id, None)
        if replica is not None:
            replica.drop(internal_id)
        return replica

    def leave(self, internal_id: str) -> None:
        """End a request whose reader has gone."""
        replica = self.forget(internal_id)
        if replica is not None:
            replica.send("forget", internal_id)

    def set_paused(self, is_paused: bool) -> None:
        """Stop computing; to go on is `FleetLLM.resume`, which waits for it."""
        for replica in self.replicas:
            if is_paused and replica.model is not None:
                replica.call("pause", "keep")

    def stop(self) -> None:
        """Do nothing: `FleetLLM.close` ends the replicas."""

    def lost(self, replica: Replica, error: Exception) -> None:
        """Run what a replica ran elsewhere; what has answered already fails, and what had been run again as well."""
        self.index.forget(replica.number)
        for live in replica.end(error):
            name = live.request.internal_id
            self._of.pop(name, None)
            if live.has_output or live.num_runs == MOST_RUNS:
                self._fail(name, error)
                continue
            try:
                self.add(live.request, live.num_runs + 1)
            except UnavailableError:
                self._fail(name, error)
