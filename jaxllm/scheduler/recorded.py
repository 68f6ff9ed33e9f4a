"""The scheduler with its state: every call that changes it goes through here, and a recorder may listen.

An engine drives it with a device; `jaxllm replay` drives it with what a recorder wrote down, and gets the same plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from jaxllm.scheduler import gangs, scheduler, state
from jaxllm.scheduler.host_tier import Landed
from jaxllm.scheduler.state import BlockEvent, Events, Limits, Move, Plan, Request, State


class Recorder(Protocol):
    """Called for every call, in order, after it was made; see recording.py."""

    def begin(self, core: RecordedScheduler) -> None:
        """An engine begins, and `core` is its."""

    def added(self, requests: Sequence[Request]) -> None:
        """Requests were queued."""

    def aborted(self, reasons: Mapping[int, str]) -> None:
        """Requests were taken out, by id, and why."""

    def was_reset(self) -> None:
        """The cache was forgotten."""

    def landed(self, landed: Sequence[Landed]) -> None:
        """Copies to the host have ended."""

    def planned(self, plan: Plan) -> None:
        """A step was planned; it may be empty."""

    def committed(
        self,
        plan: Plan,
        tokens: np.ndarray,
        is_finite: np.ndarray | None,
        counts: np.ndarray | None,
        sampled: np.ndarray | None,
        events: Events,
    ) -> None:
        """A step's tokens were taken in."""

    def forked(self, moves: Sequence[Move]) -> None:
        """The members of a gang went on."""

    def close(self) -> None:
        """The engine has ended."""


class RecordedScheduler:
    """Holds the state; see scheduler.py for what the calls do. Owns the requests' tokens from `add` on."""

    def __init__(self, limits: Limits, recorder: Recorder | None = None) -> None:
        self.limits = limits
        self.state: State = state.initial(limits)
        self._recorder = recorder
        self.requests: dict[int, Request] = {}  # that have not ended, by id
        if recorder is not None:
            recorder.begin(self)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests: all, or none and a UserError."""
        self.state = scheduler.add(self.state, self.limits, requests)
        self.requests.update((request.sequence_id, request) for request in requests)
        if self._recorder is not None:
            self._recorder.added(requests)

    def abort(self, reasons: Mapping[int, str]) -> None:
        """Take requests out by id, in whatever phase they are; unknown ids change nothing."""
        self.state = scheduler.abort(self.state, self.limits, reasons)
        gone = frozenset(reasons)
        if any(request_id in self.requests and self.requests[request_id].gang for request_id in reasons):
            gone = gangs.closure(self.requests.values(), gone)
        for request_id in gone:
            self.requests.pop(request_id, None)
        if self._recorder is not None:
            self._recorder.aborted(reasons)

    def reset(self) -> None:
        """Forget the cache; what ran waits again."""
        self.state = scheduler.reset(self.state, self.limits)
        if self._recorder is not None:
            self._recorder.was_reset()

    def land(self, landed: Sequence[Landed]) -> None:
        """Take in the ends of copies to the host."""
        self.state = scheduler.land(self.state, self.limits, landed)
        if self._recorder is not None:
            self._recorder.landed(landed)

    def plan(self, now: float) -> Plan:
        """Say what the next step computes."""
        self.state, plan = scheduler.plan(self.state, self.limits, now)
        if self._recorder is not None:
            self._recorder.planned(plan)
        return plan

    def commit(
        self,
        plan: Plan,
        tokens: np.ndarray,
        is_finite: np.ndarray | None = None,
        counts: np.ndarray | None = None,
        sampled: np.ndarray | None = None,
    ) -> Events:
        """Take in what a step yielded, and append it to the requests' tokens."""
        self.state, events = scheduler.commit(self.state, self.limits, plan, tokens, is_finite, counts, sampled)
        requests = self.requests
        if counts is None and len(events.tokens) == len(events.ids):
            for request_id, token in zip(events.ids.tolist(), events.tokens.tolist(), strict=True):
                requests[request_id].tokens.append(token)
        else:
            ends = np.cumsum(events.counts).tolist()
            for request_id, count, end in zip(events.ids.tolist(), events.counts.tolist(), ends, strict=True):
                requests[request_id].tokens.extend(events.tokens[end - count : end].tolist())
        for request_id in (*events.finished, *events.failed):
            del requests[request_id]
        if self._recorder is not None:
            self._recorder.committed(plan, tokens, is_finite, counts, sampled, events)
        return events

    def fork(self, moves: Sequence[Move]) -> None:
        """Let the members of a gang go on, and write the tokens of each: those of its parent, and its own."""
        self.state = scheduler.fork(self.state, self.limits, moves)
        parents = {move.source: self.requests[move.source].tokens[:] for move in moves}
        for move in moves:
            tokens = self.requests[move.target].tokens
            tokens[:] = parents[move.source]
            tokens.append(move.token)
        if self._recorder is not None:
            self._recorder.forked(moves)

    def take_block_events(self) -> tuple[BlockEvent, ...]:
        """Return the changes of the prefix index that were not taken yet."""
        self.state, events = state.take_block_events(self.state)
        return events

    def close(self) -> None:
        """End the recording, if there is one."""
        if self._recorder is not None:
            self._recorder.close()
