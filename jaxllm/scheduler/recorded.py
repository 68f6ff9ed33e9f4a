"""The scheduler with its state, and a recorder of all calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np

from jaxllm.scheduler import beam_groups, scheduler, state
from jaxllm.scheduler.host_tier import Landed
from jaxllm.scheduler.state import BlockEvent, Events, Fork, Limits, Plan, Request, State


class Recorder(Protocol):
    """Called after each call, in order; see recording.py."""

    def begin(self, core: RecordedScheduler) -> None:
        """Begin, with the engine's scheduler."""

    def added(self, requests: Sequence[Request]) -> None:
        """Record queued requests."""

    def aborted(self, reasons: Mapping[int, str]) -> None:
        """Record aborted requests with their reasons, by id."""

    def was_reset(self) -> None:
        """Record a reset of the cache."""

    def landed(self, landed: Sequence[Landed]) -> None:
        """Record the ends of copies to the host."""

    def received(self, owner: int, blocks: Sequence[tuple[int, int]], places: Sequence[int]) -> None:
        """Record fetched blocks of a prompt, and the host blocks given to them."""

    def passed_over(self, request_ids: Collection[int]) -> None:
        """Record the waiting requests to pass over."""

    def planned(self, plan: Plan) -> None:
        """Record a plan, which may be empty."""

    def committed(
        self,
        plan: Plan,
        tokens: np.ndarray,
        is_finite: np.ndarray | None,
        counts: np.ndarray | None,
        sampled: np.ndarray | None,
        events: Events,
    ) -> None:
        """Record a step's tokens."""

    def forked(self, moves: Sequence[Fork]) -> None:
        """Record a fork of a beam group."""

    def close(self) -> None:
        """End the recording."""


class RecordedScheduler:
    """The scheduler's state, with the functions of scheduler.py as methods; owns request tokens."""

    def __init__(self, limits: Limits, recorder: Recorder | None = None) -> None:
        self.limits = limits
        self.state: State = state.initial(limits)
        self._recorder = recorder
        self.requests: dict[int, Request] = {}  # unfinished, by id
        if recorder is not None:
            recorder.begin(self)

    def add(self, requests: Sequence[Request]) -> None:
        self.state = scheduler.add(self.state, self.limits, requests)
        self.requests.update((request.sequence_id, request) for request in requests)
        if self._recorder is not None:
            self._recorder.added(requests)

    def abort(self, reasons: Mapping[int, str]) -> None:
        self.state = scheduler.abort(self.state, self.limits, reasons)
        gone = frozenset(reasons)
        if any(request_id in self.requests and self.requests[request_id].beam_group for request_id in reasons):
            gone = beam_groups.closure(self.requests.values(), gone)
        for request_id in gone:
            self.requests.pop(request_id, None)
        if self._recorder is not None:
            self._recorder.aborted(reasons)

    def reset(self) -> None:
        self.state = scheduler.reset(self.state, self.limits)
        if self._recorder is not None:
            self._recorder.was_reset()

    def land(self, landed: Sequence[Landed]) -> None:
        self.state = scheduler.land(self.state, self.limits, landed)
        if self._recorder is not None:
            self._recorder.landed(landed)

    def receive(self, owner: int, blocks: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        self.state, places = scheduler.receive(self.state, self.limits, owner, blocks)
        if self._recorder is not None:
            self._recorder.received(owner, blocks, places)
        return places

    def pass_over(self, request_ids: Collection[int]) -> None:
        self.state = scheduler.pass_over(self.state, self.limits, request_ids)
        if self._recorder is not None:
            self._recorder.passed_over(request_ids)

    def plan(self, now: float) -> Plan:
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
        """Commit as `scheduler.commit`, and append the tokens to the requests'."""
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

    def fork(self, moves: Sequence[Fork]) -> None:
        """Fork a beam group, and set each member's tokens: its parent's, and a new one."""
        self.state = scheduler.fork(self.state, self.limits, moves)
        parents = {move.source: self.requests[move.source].tokens[:] for move in moves}
        for move in moves:
            tokens = self.requests[move.target].tokens
            tokens[:] = parents[move.source]
            tokens.append(move.token)
        if self._recorder is not None:
            self._recorder.forked(moves)

    def take_block_events(self) -> tuple[BlockEvent, ...]:
        self.state, events = state.take_block_events(self.state)
        return events

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
