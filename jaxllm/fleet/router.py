"""Routes requests to replicas, in place of an engine's inbox."""

from __future__ import annotations

from collections.abc import Callable

from jaxllm.errors import UnavailableError
from jaxllm.fleet.choose import choose
from jaxllm.fleet.prefix_index import PrefixIndex
from jaxllm.fleet.replica import Replica, RoutedRequest
from jaxllm.outputs import FinishReason

NONE_TAKES_WORK = "No replica is available; retry later."
MOST_RUNS = 2  # replicas that a faulty request can crash


class Router:
    """Sends requests to replicas."""

    def __init__(self, replicas: list[Replica], fail: Callable[[str, Exception], None]) -> None:
        """`replicas` are by number; `fail(internal_id, error)` fails a request."""
        self.replicas = replicas
        self.index = PrefixIndex()
        self._fail = fail
        self._of: dict[str, Replica] = {}

    def add(self, request: RoutedRequest, num_runs: int = 1) -> None:
        """Send a request to the best replica; raise UnavailableError if none is available.

        `num_runs` counts the replicas tried, with this one.
        """
        allowed = self.replicas if request.replicas is None else [self.replicas[each] for each in request.replicas]
        loads = {each.number: each.num_tokens for each in allowed if each.takes_work}
        if not loads:
            raise UnavailableError(NONE_TAKES_WORK)
        replica = self.replicas[choose(request.digests, loads, self.index)]
        replica.add(request, num_runs)
        self._of[request.internal_id] = replica

    def abort(self, internal_id: str, reason: FinishReason) -> None:
        """Stop a request; its last output is still delivered."""
        replica = self._of.get(internal_id)
        if replica is not None:
            replica.send("abort", internal_id, reason)

    def forget(self, internal_id: str) -> Replica | None:
        replica = self._of.pop(internal_id, None)
        if replica is not None:
            replica.drop(internal_id)
        return replica

    def leave(self, internal_id: str) -> None:
        """Cancel a request without a reader; no output is delivered."""
        replica = self.forget(internal_id)
        if replica is not None:
            replica.send("forget", internal_id)

    def set_paused(self, is_paused: bool) -> None:
        """Pause all replicas; `FleetLLM.resume` resumes."""
        for replica in self.replicas:
            if is_paused and replica.model is not None:
                replica.call("pause", "keep")

    def stop(self) -> None:
        """Do nothing: `FleetLLM.close` stops the replicas."""

    def lost(self, replica: Replica, error: Exception) -> None:
        """Reroute the requests of a lost replica; fail those with delivered output or `MOST_RUNS` runs."""
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
