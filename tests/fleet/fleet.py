"""A fleet in virtual time: a front end that routes requests to replicas, which start, drain and are killed.

A killed replica loses its requests, and the front end reroutes them. A draining replica accepts no requests, finishes
those that run, and stops. Both start again, with empty caches, after `RESTART` seconds. While no replica accepts
requests, the front end holds them.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from jaxllm.fleet import PrefixIndex
from jaxllm.scheduler.state import Limits
from tests.fleet.replica import LIMITS, Asked, Replica, Yield, digests_of

RESTART = 1.0
WARM = 0.2  # first part of the requests, left out of the balance because no replica has its load yet

Router = Callable[[Sequence[bytes], Mapping[int, int], PrefixIndex], int]


def least_loaded(digests: Sequence[bytes], loads: Mapping[int, int], index: PrefixIndex) -> int:
    """Route without regard to prefixes."""
    return min(loads, key=lambda replica: (loads[replica], replica))


class Change(NamedTuple):
    """A change of a replica's state at a time; has no effect if the replica is not running."""

    time: float
    kind: Literal["kill", "drain"]
    replica: int


def make_changes(num_replicas: int, count: int, seconds: float, seed: int) -> list[Change]:
    """Return `count` kills and `count` drains of replicas, at random times."""
    random = np.random.default_rng(seed)
    return [
        Change(float(random.uniform(0, seconds)), kind, int(random.integers(num_replicas)))
        for kind in ("kill", "drain")
        for _ in range(count)
    ]


class Sent(NamedTuple):
    """A routed request, and the front end's view of the replicas at that time."""

    number: int
    replica: int
    matches: Mapping[int, int]  # leading blocks, by replica that accepts requests and has any
    loads: Mapping[int, int]


@dataclass
class Outcome:
    """Answers, routes and counts of the requests."""

    answers: dict[int, list[array[int]]] = field(default_factory=dict)  # by number; prompt and answer, once each
    sent: list[Sent] = field(default_factory=list)
    first_tokens: dict[int, float] = field(default_factory=dict)  # seconds after the request's arrival
    prompt_tokens: int = 0  # of all admitted requests …
    cached_tokens: int = 0  # … and those found in the cache
    num_again: int = 0  # rerouted requests

    @property
    def hit_rate(self) -> float:
        """Return the fraction of prompt tokens that were found in the cache."""
        return self.cached_tokens / self.prompt_tokens

    @property
    def reached(self) -> float:
        """Return the fraction of requests, among those with a cached block, that were routed to the longest prefix."""
        repeated = [sent for sent in self.sent if sent.matches]
        hits = sum(sent.matches.get(sent.replica, 0) == max(sent.matches.values()) for sent in repeated)
        return hits / len(repeated)

    @property
    def balance(self) -> float:
        """Return the highest load divided by the mean load, averaged over the times of all requests."""
        warm = [list(sent.loads.values()) for sent in self.sent[int(WARM * len(self.sent)) :]]
        return float(np.mean([max(loads) * len(loads) / sum(loads) for loads in warm if sum(loads)]))


class Fleet:
    """Play requests and changes until all requests end, and return the outcome; RuntimeError if some never end."""

    def __init__(
        self,
        route: Router,
        asked: Iterable[Asked],
        num_replicas: int,
        changes: Iterable[Change] = (),
        limits: Limits = LIMITS,
    ) -> None:
        self._route, self._limits = route, limits
        self.index = PrefixIndex()
        self.replicas = {number: Replica(number, limits) for number in range(num_replicas)}
        self.loads = dict.fromkeys(self.replicas, 0)  # tokens of live requests, draining replicas included
        self.draining: set[int] = set()
        self.outcome = Outcome()
        self._held: deque[Asked] = deque()
        self._asked_at: dict[int, float] = {}
        self._now, self._order = 0.0, itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        for each in asked:
            self._at(each.arrival, lambda each=each: self._ask(each))
        for change in changes:
            happen = self._kill if change.kind == "kill" else self._drain
            self._at(change.time, lambda happen=happen, number=change.replica: happen(number))

    def play(self) -> Outcome:
        """Play until all requests end."""
        while self._queue:
            self._now, _, happen = heapq.heappop(self._queue)
            happen()
        if self._held or any(replica.live for replica in self.replicas.values()):
            raise RuntimeError("requests are left, and nothing happens any more")
        return self.outcome

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (time, next(self._order), happen))

    # Requests.

    def _ask(self, asked: Asked) -> None:
        self._asked_at[asked.number] = self._now
        self._send(asked)

    def _send(self, asked: Asked) -> None:
        loads = {number: load for number, load in self.loads.items() if number not in self.draining}
        if not loads:
            self._held.append(asked)
            return
        digests = digests_of(asked.prompt, self._limits.block_size)
        chosen = self._route(digests, loads, self.index)
        matches = {number: count for number, count in self.index.matches(digests).items() if number in loads}
        self.outcome.sent.append(Sent(asked.number, chosen, matches, loads))
        self.loads[chosen] += len(asked.prompt)
        self.replicas[chosen].add(asked)
        self._begin(self.replicas[chosen])

    # Steps.

    def _begin(self, replica: Replica) -> None:
        if replica.plan is None and (seconds := replica.begin(self._now)) is not None:
            self._at(self._now + seconds, lambda: self._end(replica))

    def _end(self, replica: Replica) -> None:
        if self.replicas.get(replica.number) is not replica:
            return  # it was killed during the step: its results are dropped
        asked_of = {number: asked for number, (asked, _) in replica.live.items()}
        self._take(replica, replica.end(), asked_of)
        if replica.number in self.draining and not replica.live:
            self._leave(replica.number)
        else:
            self._begin(replica)

    def _take(self, replica: Replica, step: Yield, asked_of: Mapping[int, Asked]) -> None:
        outcome = self.outcome
        self.index.apply(replica.number, step.events)
        for number, num_cached in step.admitted.items():
            outcome.prompt_tokens += len(asked_of[number].prompt)
            outcome.cached_tokens += num_cached
        for number, count in step.counts.items():
            self.loads[replica.number] += count
            outcome.first_tokens.setdefault(number, self._now - self._asked_at[number])
        for number, tokens in step.finished.items():
            self.loads[replica.number] -= len(tokens)
            outcome.answers.setdefault(number, []).append(tokens)
            follow_up = asked_of[number].follow_up
            if follow_up is not None:
                self._at(self._now + follow_up.arrival, lambda asked=follow_up: self._ask(asked))

    # Replicas.

    def _leave(self, number: int) -> Replica:
        self.draining.discard(number)
        self.index.forget(number)
        del self.loads[number]
        self._at(self._now + RESTART, lambda: self._join(number))
        return self.replicas.pop(number)

    def _kill(self, number: int) -> None:
        if number in self.replicas:
            lost = [asked for asked, _ in self._leave(number).live.values()]
            self.outcome.num_again += len(lost)
            for asked in lost:
                self._send(asked)

    def _drain(self, number: int) -> None:
        if number in self.replicas:
            self.draining.add(number)
            if not self.replicas[number].live:
                self._leave(number)

    def _join(self, number: int) -> None:
        self.replicas[number] = Replica(number, self._limits)
        self.loads[number] = 0
        for _ in range(len(self._held)):
            self._send(self._held.popleft())
