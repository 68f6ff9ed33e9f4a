"""Which replica runs which request: stands where an engine has its inbox, and finds replicas by `choose`.

Belongs to the event loop. Knows replicas by what they say; starts none and ends none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.errors import UnavailableError
from jaxllm.fleet.choose import choose
from jaxllm.fleet.prefix_index import PrefixIndex
from jaxllm.fleet.replica import Replica
from jaxllm.outputs import FinishReason
from jaxllm.sampling_params import SamplingParams

NONE_TAKES_WORK = "No replica takes work now."


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """A request on its way to a replica, which will check it."""

    request_id: str  # the caller's
    internal_id: str  # the fleet's
    name: str  # for logs
    prompt: Any
    prompt_token_ids: Sequence[int]
    digests: Sequence[bytes]  # of the prompt's full blocks
    params: SamplingParams  # by which outputs are merged
    sent: Any  # the parameters as they were given
    options: Mapping[str, Any]  # of `AsyncLLM.generate`
    num_sequences: int


class Router:
    """The replicas' inbox."""

    def __init__(self, replicas: list[Replica], fail: Callable[[str, Exception], None]) -> None:
        """`fail` ends a request, by its internal id, with an error."""
        self.replicas = replicas
        self.index = PrefixIndex()
        self._fail = fail
        self._of: dict[str, Replica] = {}  # by internal id

    def add(self, accepted: Routed) -> None:
        """Send a request to a replica; UnavailableError where none takes work."""
        loads = {each.number: each.num_tokens for each in self.replicas if each.takes_work}
        if not loads:
            raise UnavailableError(NONE_TAKES_WORK)
        number = choose(accepted.digests, loads, self.index)
        (replica,) = (each for each in self.replicas if each.number == number)
        self._of[accepted.internal_id] = replica
        replica.add(accepted)

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
        """Run what a replica ran elsewhere; what has answered already fails."""
        self.index.forget(replica.number)
        for live in replica.end(error):
            name = live.accepted.internal_id
            self._of.pop(name, None)
            if live.has_output:
                self._fail(name, error)
                continue
            try:
                self.add(live.accepted)
            except UnavailableError:
                self._fail(name, error)
