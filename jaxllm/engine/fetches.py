"""Fetches of KV blocks into the host's tier, before the admission of the requests that begin with them.

Plans pass over these for at most `MOST_SECONDS`. The scheduler's calls are recorded, so a replay needs no source.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from jaxllm.runner.disk_tier import BlockSource
from jaxllm.runner.model_runner import Runner
from jaxllm.scheduler import fetching
from jaxllm.scheduler.recorded import RecordedScheduler
from jaxllm.scheduler.state import Plan, State

AHEAD = 8  # waiting requests with fetches
MOST_SECONDS = 1.0
REST_SECONDS = 10.0  # without fetches after a late one
WAIT_SECONDS = 0.005  # of a step in which all requests wait for blocks; also delays new ones


@dataclass
class Fetch:
    """Blocks on the way for one request."""

    ticket: int
    began: float
    blocks: dict[tuple[int, int], bytes]  # digests by group and index


class Fetches:
    """Fetches from one source; call `update` before each plan, `expect` after it."""

    def __init__(
        self, source: BlockSource, scheduler: RecordedScheduler, runner: Runner, clock: Callable[[], float]
    ) -> None:
        self._source = source
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._fetches: dict[int, Fetch] = {}  # by `Request.sequence_id`
        self._seen: set[int] = set()  # considered requests near the head of the queue
        self._rests_since: float | None = None

    def update(self) -> None:
        """Take in fetched blocks, begin fetches, and end late ones."""
        state, reads = self._scheduler.state, self._source.ended()
        if not state.waiting and not self._fetches:
            return
        now = self._clock()
        waiting = {entry.request.sequence_id for entry in state.waiting} if self._fetches else ()
        owners = {fetch.ticket: owner for owner, fetch in self._fetches.items()}
        for read in reads:
            owner = owners.get(read.ticket)
            if owner is None:
                continue
            del self._fetches[owner].blocks[read.group, read.index]
            if read.row is not None:
                (place,) = self._scheduler.receive(owner, [(read.group, read.index)])
                if place >= 0:
                    self._runner.receive(read.group, place, read.row)
        for owner, fetch in [*self._fetches.items()]:
            is_late = not 0.0 <= now - fetch.began < MOST_SECONDS
            if is_late and fetch.blocks:
                self._rests_since = now
            if is_late or not fetch.blocks or owner not in waiting:
                self._source.cancel(fetch.ticket)
                del self._fetches[owner]
        if self._rests_since is not None and not 0.0 <= now - self._rests_since < REST_SECONDS:
            self._rests_since = None
        self._begin(now)
        state = self._scheduler.state
        if state.host is not None and state.host.passed_over != self._fetches.keys():
            self._scheduler.pass_over(sorted(self._fetches))

    def expect(self, plan: Plan) -> None:
        """Name the blocks that a plan stores in the host's tier."""
        host = self._scheduler.state.host
        if host is not None and len(plan.moves):
            own = [each for each in host.storing if each.plan == plan.number and each.digest]
            self._source.expect({(each.plan, each.group, each.block): each.digest for each in own})

    def wait(self) -> bool:
        """Wait a short time for blocks, if any are wanted; return whether they are."""
        if self._fetches:
            self._source.wait(WAIT_SECONDS)
        return bool(self._fetches)

    def forget(self, before: State, failed: Collection[int]) -> None:
        """Forget the blocks of requests with non-finite results, which ran in state `before`."""
        records = [each for each in before.running if each is not None and each.request.sequence_id in failed]
        gone = {digest for each in records for digest in each.digests}
        self._source.forget(gone)
        for owner, fetch in [*self._fetches.items()]:
            if not gone.isdisjoint(fetch.blocks.values()):
                self._source.cancel(fetch.ticket)
                del self._fetches[owner]

    def _begin(self, now: float) -> None:
        state, limits = self._scheduler.state, self._scheduler.limits
        head = state.waiting[:AHEAD]
        self._seen.intersection_update([entry.request.sequence_id for entry in head])
        for entry in head:
            owner = entry.request.sequence_id
            if owner in self._seen or owner in self._fetches:
                continue
            self._seen.add(owner)
            blocks = fetching.wanted(state, limits, entry, self._source.has) if self._rests_since is None else []
            room = fetching.room(state, limits)
            for fetch in self._fetches.values():
                for group, _ in fetch.blocks:
                    room[group] -= 1
            chosen: list[tuple[int, int, bytes]] = []
            for group, index in blocks:
                room[group] -= 1
                if room[group] >= 0:
                    chosen.append((group, index, entry.digests[index]))
            if chosen:
                ticket = self._source.read(chosen)
                self._fetches[owner] = Fetch(ticket, now, {(group, at): digest for group, at, digest in chosen})
