"""Tests of the scheduler: random calls by Hypothesis against a device that checks reads, and examples of rules."""

from __future__ import annotations

import dataclasses
import hashlib
import zlib
from array import array
from collections import deque
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxllm.errors import UserError
from jaxllm.scheduler import block_pool, drafting, scheduler
from jaxllm.scheduler.block_pool import PoolEditor, content_root
from jaxllm.scheduler.recorded import RecordedScheduler
from jaxllm.scheduler.state import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Fork,
    Limits,
    Plan,
    Request,
    Source,
    State,
    initial,
    take_block_events,
)
from tests.support.fake_device import VOCABULARY, FakeDevice, next_token

ROOTS = (b"", b"other", None)
MOST_PROMPT, MOST_SOURCE = 14, 7  # tokens


def fingerprint(value: Any) -> bytes:
    """Return a digest of all values of a state."""
    digest = hashlib.sha256()

    def visit(part: Any) -> None:
        if isinstance(part, np.ndarray):
            digest.update(part.tobytes())
        elif isinstance(part, Request):
            visit(part.sequence_id)  # without its tokens, which belong to the engine and grow
        elif dataclasses.is_dataclass(part):
            for field in dataclasses.fields(part):
                visit(getattr(part, field.name))
        elif isinstance(part, tuple):
            digest.update(b"(%d" % len(part))
            for item in part:
                visit(item)
        elif isinstance(part, dict):
            for key, item in part.items():
                visit((key, item))
        else:
            digest.update(repr(part).encode())

    visit(value)
    return digest.digest()


def plan_bytes(plan: Plan) -> bytes:
    return fingerprint(plan)


def check_accounts(state: State, limits: Limits) -> None:
    """Assert that every block is used, cached or free, and that reference counts are those of the block tables."""
    pool = state.pool
    named = [block for table in (*state.tables, *state.sources) for block in table]
    counts = np.bincount(np.asarray(named, np.int64), minlength=limits.num_blocks)
    assert (pool.references == counts).all(), "references are the tables' own"
    cached, free = block_pool.cached_blocks(pool), pool.free.tolist()
    assert len(cached) == pool.num_cached and len(set(cached)) == len(cached)
    assert sorted([*set(named), *cached, *free]) == list(range(limits.num_blocks)), "free + used + cached = total"
    indexed = list(pool.index.values())
    assert len(set(indexed)) == len(indexed), "a block holds one content"
    assert not set(indexed) & set(free), "a free block cannot be hit"
    for slot, record in enumerate(state.running):
        is_free = record is None
        assert is_free == (state.slots.epochs[slot] == 0)
        is_alone = record is not None and not record.request.beam_group
        assert state.tables[slot] == () if is_free else state.tables[slot] or not is_alone
        if not is_free:
            assert len(state.tables[slot]) * limits.block_size == state.slots.capacity[slot]
    for columns in (state.slots, pool):
        for name, column in columns._asdict().items():
            assert not isinstance(column, np.ndarray) or not column.flags.writeable, f"{name} is read-only"
    ranks = [entry.rank for entry in state.waiting]
    assert ranks == sorted(ranks)
    slots = [slot for beam_group in state.beam_groups for slot in beam_group]
    in_beam_groups = [
        slot for slot, record in enumerate(state.running) if record is not None and record.request.beam_group
    ]
    assert sorted(slots) == in_beam_groups, "a beam group runs as a whole"


class Machine(RuleBasedStateMachine):
    """Adds and aborts requests, runs steps and resets the cache in any order; the fake device checks each read.

    Up to `depth` steps are in flight: planned and run, but not committed.
    """

    @initialize(
        num_slots=st.integers(1, 5),
        num_blocks=st.integers(4, 24),
        block_size=st.sampled_from([1, 2, 4]),
        extra_tokens=st.integers(0, 12),
        max_chunks=st.integers(1, 4),
        depth=st.integers(1, 3),
        is_whole=st.booleans(),
        max_adapters=st.integers(0, 3),
        max_drafts=st.sampled_from([0, 0, 1, 2, 4]),
        more_verified=st.integers(0, 12),
        costs=st.tuples(st.sampled_from([0, 40, 300]), st.sampled_from([0, 30])),
        max_encoded=st.sampled_from([0, 0, 1, 9]),
        seed=st.integers(0, 99),
    )
    def start(
        self,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        extra_tokens: int,
        max_chunks: int,
        depth: int,
        is_whole: bool,
        max_adapters: int,
        max_drafts: int,
        more_verified: int,
        costs: tuple[int, int],
        max_encoded: int,
        seed: int,
    ) -> None:
        """`max_encoded`: of an encoder-decoder model; 0: of another."""
        self.depth = depth
        max_encoded *= not (is_whole or max_drafts)
        extra_tokens += MOST_PROMPT * is_whole
        most = num_slots + extra_tokens
        drafts = (max_drafts, min(num_slots + more_verified, most), *costs) if max_drafts and not is_whole else ()
        # Steps that are not committed: plan, tokens, counts, which rows are finite, and the requests that sample.
        self.in_flight: deque[tuple[Plan, np.ndarray, np.ndarray | None, np.ndarray, list[int]]] = deque()
        flags = not max_encoded, is_whole
        self.limits = Limits(num_slots, num_blocks, block_size, most, max_chunks, *flags, max_adapters, *drafts)
        if max_encoded:
            self.limits = dataclasses.replace(self.limits, max_encoded=max_encoded, max_source=MOST_SOURCE)
        self.state = initial(self.limits)
        self.indexed: set[bytes] = set()  # digests, according to the block events
        random, share = Random(seed), seed % 4 / 3
        self.device = FakeDevice(self.limits, lambda count: sum(random.random() < share for _ in range(count)))
        self.requests: dict[int, Request] = {}
        self.ended: dict[int, str] = {}
        self.log: list[tuple[Any, ...]] = []
        self.plans: list[bytes] = []

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the scheduler, check that the old state is unchanged, and log the call."""
        before, old = fingerprint(self.state), self.state
        result = getattr(scheduler, name)(self.state, self.limits, *arguments)
        assert fingerprint(old) == before, f"{name} changed the state that it was given"
        self.log.append((name, *arguments))
        return result

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=MOST_PROMPT),
        num_new=st.integers(0, 12),
        root=st.sampled_from(ROOTS),
        adapter=st.integers(0, 4),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        stops=st.sets(st.integers(0, VOCABULARY - 1), max_size=3),
        may_draft=st.sampled_from([True, True, True, False]),
        width=st.sampled_from([1, 1, 1, 2, 3]),
        source_tokens=st.sampled_from([0, 1, 4, MOST_SOURCE]),
    )
    def add(
        self,
        prompt: list[int],
        num_new: int,
        root: bytes | None,
        adapter: int,
        priority: int,
        stops: set[int],
        may_draft: bool,
        width: int,
        source_tokens: int,
    ) -> None:
        source_tokens *= self.limits.max_source > 0
        source = Source(bytes([source_tokens]), source_tokens) if source_tokens else None
        adapter *= self.limits.max_adapters > 0
        first = len(self.requests) + 1
        if self.limits.whole_prompts:  # of models that generate no tokens
            num_new, root = 0, None
        if num_new == 0 or root is None or width > self.limits.num_slots or self.limits.max_drafts:
            width = 1
        size = self.limits.block_size
        group = [
            Request(
                sequence_id=first + index,
                tokens=array("i", prompt),
                num_prompt=len(prompt),
                limit=len(prompt) + num_new,
                stop_ids=tuple(stops),
                priority=priority,
                root=None if root is None else content_root(salt=root, content=bytes([adapter, source_tokens])),
                source=source,
                adapter=adapter,
                may_draft=may_draft,
                beam_group=first if width > 1 else 0,
            )
            for index in range(width)
        ]
        needed = -(-max(len(prompt), group[0].limit - 1) // size)
        if width > 1:
            needed = len(prompt) // size + width * max(1, needed - len(prompt) // size)
        if needed + -(-source_tokens // size) > self.limits.num_blocks:
            with pytest.raises(UserError, match="whole pool"):
                scheduler.add(self.state, self.limits, group)
            return
        self.state = self.call("add", group)
        for request in group:
            self.requests[request.sequence_id] = request
            self.device.full[request.sequence_id] = request.tokens
            if source is not None:
                self.device.sources[request.sequence_id] = source

    @precondition(lambda self: len(self.ended) < len(self.requests))
    @rule(data=st.data(), poison=st.integers(0, 9))
    def step(self, data: st.DataObject, poison: int) -> None:
        if self.issue() and poison == 0:
            is_finite = self.in_flight[-1][3]
            is_finite[data.draw(st.integers(0, len(is_finite) - 1))] = False
        if len(self.in_flight) == self.depth or data.draw(st.booleans()):
            self.take_in()

    def issue(self) -> bool:
        """Plan a step and run it; return False if nothing can be planned before a commit."""
        before = self.state.adapters
        sure = self.num_sure()
        self.state, plan = self.call("plan", 0.0)
        self.plans.append(plan_bytes(plan))
        assert not (plan.admitted and plan.preempted), "no admission in a step that preempted"
        may_preempt = self.depth > 2 or sure or not self.limits.max_drafts
        assert not plan.preempted or may_preempt, "a request is preempted for drafts"
        assert plan.adapters is self.state.adapters and len(plan.adapters) <= self.limits.max_adapters
        assert len(set(plan.adapters) - set(before)) <= 1, "one transfer at most"
        if self.limits.whole_prompts:
            whole = [(each.slot, 0, each.num_known) for each in plan.admitted]
            assert list(zip(*(column.tolist() for column in plan[2:3] + plan[4:6]), strict=True)) == whole
        if not len(plan.slots):
            assert self.in_flight, "work waits but nothing is planned"
            return False
        owners = {
            slot: record.request.sequence_id for slot, record in enumerate(self.state.running) if record is not None
        }
        rows = zip(plan.slots.tolist(), plan.starts.tolist(), plan.lengths.tolist(), strict=True)
        chunks = [self.device.full[owners[slot]][start : start + length].tolist() for slot, start, length in rows]
        history = [
            (slot, start, self.device.full[owners[slot]][start])
            for slot, start in zip(plan.slots[: plan.num_decodes].tolist(), plan.starts.tolist(), strict=False)
            if self.requests[owners[slot]].beam_group
        ]
        tokens, counts = self.device.run(plan, chunks[plan.num_decodes :], owners, history, self.state.sources)
        sampling = [owners[slot] for slot in plan.slots[plan.samples].tolist()]
        self.in_flight.append((plan, tokens, counts, np.ones(len(tokens), np.bool_), sampling))
        drafting_rows = [owners[slot] for slot in plan.slots[plan.lengths > 1].tolist()] if plan.num_drafts else []
        assert not plan.num_drafts or plan.proposes
        assert not drafting_rows or all(self.requests[owner].may_draft for owner in sampling)
        return True

    def num_sure(self) -> int:
        """Return the number of blocks that running requests lack if all drafts in flight are rejected."""
        slots, size = self.state.slots, self.limits.block_size
        bounds = slots.length - self.drafts_in_flight()
        missing = np.where(slots.length < slots.limit, -(-(bounds - slots.capacity) // size), 0)
        return max(0, int(np.maximum(0, missing).sum()) - self.state.pool.num_available)

    def drafts_in_flight(self) -> np.ndarray:
        """Return the number of drafts in uncommitted steps, by slot."""
        counts = np.zeros(self.limits.num_slots, np.int64)
        for plan, *_ in self.in_flight:
            own = plan.epochs[plan.slots] == self.state.slots.epochs[plan.slots]
            if plan.num_drafts:
                counts[plan.slots[own]] += plan.lengths[own] - 1
        return counts

    def take_in(self) -> None:
        """Commit the oldest step in flight, if any, and check its events."""
        if not self.in_flight:
            return
        plan, tokens, counts, is_finite, sampling = self.in_flight.popleft()
        # Requests that have ended, or were preempted since, get no result from this step.
        waiting = {
            row_id
            for row_id, slot in zip(sampling, plan.slots[plan.samples].tolist(), strict=True)
            if self.state.slots.epochs[slot] == plan.epochs[slot]
        }
        self.state, events = self.call("commit", plan, tokens, is_finite, counts, counts)
        answered = [row_id for row_id in waiting if self.requests[row_id].beam_group and row_id not in events.failed]
        assert sorted(self.state.slots.ids[plan.slots[events.answered]].tolist()) == sorted(answered)
        failed = {each for each in events.failed if each in waiting or not self.requests[each].beam_group}
        assert {*events.ids.tolist(), *failed, *answered} == waiting, "who is awaited is answered"
        given = iter(events.tokens.tolist())
        for request_id, count in zip(events.ids.tolist(), events.counts.tolist(), strict=True):
            if count == 0:
                assert self.requests[request_id].limit == self.requests[request_id].num_prompt
                assert events.finished[request_id] == "length"
                self.end(request_id, "length")
            for number in range(count):
                self.receive(request_id, next(given), events.finished.get(request_id) if number == count - 1 else None)
        for request_id in events.failed:
            self.end(request_id, "error")
        for leader in events.complete:
            self.go_on(leader)
        # A second commit of a result, or one for a request that has ended, changes nothing.
        again, none = scheduler.commit(self.state, self.limits, plan, tokens, is_finite, counts, counts)
        assert not len(none.ids) and not none.failed and fingerprint(again) == fingerprint(self.state)

    def go_on(self, leader: int) -> None:
        """Fork a beam group after all its results; a hash of its tokens chooses the parents. At its limit, abort it."""
        beam_group = [request_id for request_id, request in self.requests.items() if request.beam_group == leader]
        parents = [each for each in beam_group if len(self.device.full[each]) > self.requests[each].num_prompt] or [
            leader
        ]
        assert len({len(self.device.full[each]) for each in parents}) == 1, "they keep in step"
        if len(self.device.full[leader]) + 1 == self.requests[leader].limit:
            self.state = self.call("abort", beam_group[:1])
            self.ended.update(dict.fromkeys(beam_group, "length"))
            return
        chosen = zlib.crc32(repr([self.device.full[each].tolist() for each in parents]).encode())
        moves = [
            Fork(each, parents[chosen // 7**at % len(parents)], at) for at, each in enumerate(beam_group)
        ]  # distinct tokens
        before = {each: self.device.full[each][:] for each in parents}
        self.state = self.call("fork", moves)
        for target, source, token in moves:
            self.device.full[target][:] = before[source]
            self.device.full[target].append(token)

    def receive(self, request_id: int, token: int, reason: str | None) -> None:
        request, tokens = self.requests[request_id], self.device.full[request_id]
        assert request_id not in self.ended, "a token after the end"
        assert token == next_token(tuple(tokens), request_id), "the token is the sequence's own"
        tokens.append(token)
        expected = "stop" if token in request.stop_ids else "length" if len(tokens) == request.limit else None
        assert reason == expected
        if reason is not None:
            self.end(request_id, reason)

    def end(self, request_id: int, reason: str) -> None:
        assert request_id not in self.ended, "a request ends once"
        self.ended[request_id] = reason

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        self.state = self.call("abort", [request_id])
        beam_group = self.requests[request_id].beam_group
        for each, request in self.requests.items():
            if each == request_id or (beam_group and request.beam_group == beam_group):
                self.ended.setdefault(each, "abort")

    @rule()
    def lose_cache(self) -> None:
        self.state = self.call("reset")
        self.in_flight.clear()
        self.device.tables.clear()
        self.device.written.clear()

    @invariant()
    def events_tell_the_index(self) -> None:
        if not hasattr(self, "state"):
            return
        for event in self.state.block_events or ():
            match event:
                case BlockStored(digest, _, tokens):
                    assert digest not in self.indexed and len(tokens) == self.limits.block_size
                    self.indexed.add(digest)
                case BlockRemoved(digest):
                    self.indexed.remove(digest)
                case AllBlocksCleared():
                    self.indexed.clear()
        assert not self.limits.records_blocks or self.indexed == self.state.pool.index.keys()
        self.state = take_block_events(self.state)[0]

    @invariant()
    def accounts(self) -> None:
        if hasattr(self, "state"):
            check_accounts(self.state, self.limits)
            drafts = self.drafts_in_flight().tolist()
            for slot, record in enumerate(self.state.running):
                if record is None or record.request.beam_group:
                    continue
                if self.state.slots.num_prefill[slot] <= self.state.slots.num_computed[slot]:
                    slack = int(self.state.slots.length[slot]) - min(len(self.device.truth[slot]), record.request.limit)
                    assert 0 <= slack <= drafts[slot], "the host knows how long a sequence is but for drafts in flight"
            alive = [entry.request.sequence_id for entry in self.state.waiting]
            alive += [record.request.sequence_id for record in self.state.running if record is not None]
            in_use = {record.request.adapter for record in self.state.running if record is not None} - {0}
            idle = len(self.state.adapters) - len(in_use)
            assert set(self.state.adapters[idle:]) == in_use and not in_use & set(self.state.adapters[:idle])
            assert sorted(alive) == sorted(set(self.requests) - set(self.ended)), "no request is lost or kept"

    def teardown(self) -> None:
        if not hasattr(self, "state"):
            return
        core, plans = RecordedScheduler(self.limits), []
        for name, *arguments in self.log:
            if name == "add":
                arguments = [
                    [dataclasses.replace(each, tokens=each.tokens[: each.num_prompt]) for each in arguments[0]]
                ]
            if name == "abort":
                arguments = [dict.fromkeys(arguments[0], "")]
            result = getattr(core, name)(*arguments)
            core.take_block_events()
            if name == "plan":
                plans.append(plan_bytes(result))
        assert plans == self.plans, "same events, same plans"
        assert fingerprint(core.state) == fingerprint(self.state)
        # The remaining requests finish: tokens bound the work, and a preemption only delays it.
        for _ in range(4000):
            if len(self.ended) == len(self.requests):
                break
            self.step_without_faults()
        assert len(self.ended) == len(self.requests), "a request never ended"
        check_accounts(self.state, self.limits)
        assert self.state.pool.num_available == self.limits.num_blocks, "all blocks came back"

    def step_without_faults(self) -> None:
        if len(self.in_flight) == self.depth or not self.issue():
            self.take_in()


@pytest.fixture(autouse=True)
def shrunk_for_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink failures for 20 seconds: Hypothesis takes five minutes, and has no setting for that."""
    monkeypatch.setattr("hypothesis.internal.conjecture.engine.MAX_SHRINKING_SECONDS", 20)


class TestMachine(Machine.TestCase):
    settings = settings(max_examples=15, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.ci
class TestMachineLonger(Machine.TestCase):
    settings = settings(TestMachine.settings, max_examples=40)


LIMITS = Limits(num_slots=4, num_blocks=32, block_size=4, max_step_tokens=16, max_step_chunks=4)


def request(request_id: int, length: int = 8, num_new: int = 4, **options: Any) -> Request:
    tokens = array("i", range(length))
    return Request(sequence_id=request_id, tokens=tokens, num_prompt=length, limit=length + num_new, **options)


def start(*requests: Request, limits: Limits = LIMITS) -> State:
    state = initial(limits)
    for item in requests:
        state = scheduler.add(state, limits, [item])
    return state


def run(state: State, token: int = 1, limits: Limits = LIMITS) -> tuple[State, Plan]:
    state, plan = scheduler.plan(state, limits, 0.0)
    owners = {record.request.sequence_id: record.request for record in state.running if record is not None}
    state, events = scheduler.commit(state, limits, plan, np.full(len(plan.slots), token, np.int32))
    for request_id in events.ids.tolist():
        owners[request_id].tokens.append(token)
    return state, plan


@pytest.mark.parametrize("has_drafts", [False, True])
def test_a_row_that_is_not_sampled_in_time_is_computed_again_and_keeps_its_blocks(has_drafts: bool) -> None:
    limits = dataclasses.replace(LIMITS, max_drafts=2, max_verified=8) if has_drafts else LIMITS
    state, first = scheduler.plan(start(request(1, may_draft=False), limits=limits), limits, 0.0)
    state, ahead = scheduler.plan(state, limits, 0.0)
    late = np.array([[5]], np.int32), None, np.zeros(1, np.int32)
    state, events = scheduler.commit(state, limits, first, *late)
    assert not len(events.ids) and not events.finished
    assert not scheduler.is_live(state, ahead).any(), "it continues a token that is none"
    gone = scheduler.abort(state, limits, [1])
    check_accounts(gone, limits)
    assert len(gone.pool.index) == gone.pool.num_cached == 2, "both blocks of the prompt can be hit"
    state, again = scheduler.plan(state, limits, 0.0)
    assert (again.starts.tolist(), again.lengths.tolist(), again.samples.tolist()) == ([7], [1], [True])
    assert again.num_decodes == (not has_drafts), "a device that drafts is told where the row begins"
    state, events = scheduler.commit(state, limits, again, np.array([6], np.int32))
    assert events.tokens.tolist() == [6]


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks() -> None:
    state, first = run(start(request(1, length=40)))
    state, second = run(state)
    _, third = run(state)
    assert [plan.lengths.tolist() for plan in (first, second, third)] == [[16], [16], [8]]
    assert [plan.samples.tolist() for plan in (first, second, third)] == [[False], [False], [True]]


def test_decode_rows_ride_along_with_a_chunk() -> None:
    state, _ = run(start(request(1)))
    state = scheduler.add(state, LIMITS, [request(2, length=40, root=None)])
    _, plan = run(state)
    assert plan.num_decodes == 1 and plan.lengths.tolist() == [1, 15]


def test_an_equal_prompt_hits_in_the_step_that_computes_it_and_its_last_token_is_computed_again() -> None:
    _, plan = run(start(request(1), request(2)))
    assert [admission.num_cached for admission in plan.admitted] == [0, 4]
    assert plan.lengths.tolist() == [8, 4]


@pytest.mark.parametrize(("root", "cached"), [(b"", 4), (b"tenant", 0), (None, 0)])
def test_blocks_are_shared_only_under_one_root(root: bytes | None, cached: int) -> None:
    _, plan = run(start(request(1), request(2, root=root)))
    assert plan.admitted[1].num_cached == cached


def test_a_request_may_leave_the_cache_unread_and_fills_it_all_the_same() -> None:
    _, plan = run(start(request(1), request(2, reads_cache=False)))
    assert [admission.num_cached for admission in plan.admitted] == [0, 0]
    _, plan = run(start(request(1, reads_cache=False), request(2)))
    assert [admission.num_cached for admission in plan.admitted] == [0, 4]


def test_tokens_that_were_sampled_are_hit_by_the_next_turn() -> None:
    state = start(request(1, length=4, num_new=9))
    for _ in range(9):
        state, _ = run(state, token=7)
    assert state.num_running == 0
    turn = Request(sequence_id=2, tokens=array("i", [0, 1, 2, 3] + [7] * 9), num_prompt=13, limit=20)
    _, plan = run(scheduler.add(state, LIMITS, [turn]))
    assert plan.admitted[0].num_cached == 12


def test_priority_goes_before_arrival_and_the_last_in_rank_is_preempted() -> None:
    limits = dataclasses.replace(LIMITS, num_blocks=6)
    low, high = request(1, num_new=9, priority=1, root=None), request(2, num_new=9, priority=0, root=None)
    state, plan = run(start(low, high, limits=limits), limits=limits)
    assert [admission.request.sequence_id for admission in plan.admitted] == [2, 1]
    preempted: list[int] = []
    while not preempted:
        state, plan = run(state, limits=limits)
        preempted += plan.preempted
    assert preempted == [1] and state.waiting[0].num_tokens > 8, "it keeps the tokens that it had"


def test_the_least_recently_released_block_is_evicted_first_and_prefixes_outlive_their_continuations() -> None:
    digests = [block_pool.chain(b"", bytes([number])) for number in range(2)]
    editor = PoolEditor(block_pool.make_pool(4))
    first = editor.take(2).tolist()
    editor.publish(zip(digests, first, strict=True))
    editor.release(first, digests)
    pool = editor.done()
    assert block_pool.cached_blocks(pool) == [first[1], first[0]]
    editor = PoolEditor(pool)
    assert first[1] in editor.take(3).tolist() and editor.look_up(digests) == [first[0]]
    assert block_pool.cached_blocks(pool) == [first[1], first[0]], "the pool itself has not changed"


def test_releasing_twice_is_an_error() -> None:
    editor = PoolEditor(block_pool.make_pool(2))
    taken = editor.take(1).tolist()
    editor.release(taken, [])
    with pytest.raises(ValueError, match="more often"):
        editor.release(taken, [])
    with pytest.raises(ValueError, match="of 2 available"):
        editor.take(3)


def test_a_prefix_that_is_hit_for_ever_does_not_grow_the_eviction_queue() -> None:
    editor = PoolEditor(block_pool.make_pool(2))
    block, digest = editor.take(1).tolist(), block_pool.chain(b"", b"prefix")
    editor.publish([(digest, block[0])])
    editor.release(block, [digest])
    pool = editor.done()
    for _ in range(3000):
        editor = PoolEditor(pool)
        editor.share(block)
        editor.release(block, [digest])
        pool = editor.done()
    assert pool.num_entries < 2000 and block_pool.cached_blocks(pool) == block


def adapted(request_id: int, adapter: int, num_new: int = 4, **options: Any) -> Request:
    return request(request_id, num_new=num_new, adapter=adapter, root=None, **options)


def admitted(plan: Plan) -> list[int]:
    return [admission.request.sequence_id for admission in plan.admitted]


def test_who_finds_no_place_for_its_adapter_is_skipped_and_the_queue_behind_it_is_not() -> None:
    limits = dataclasses.replace(LIMITS, num_slots=8, max_step_tokens=64, max_step_chunks=8, max_adapters=2)
    waiting = [adapted(1, 7), adapted(2, 8), adapted(3, 7), adapted(4, 0), adapted(5, 9)]
    state, plan = run(start(*waiting, limits=limits), limits=limits)
    assert admitted(plan) == [1, 3, 4], "one new adapter in a plan"
    assert plan.adapters == (7,) and [entry.request.sequence_id for entry in state.waiting] == [2, 5]
    state, plan = run(state, limits=limits)
    assert admitted(plan) == [2] and plan.adapters == (7, 8)
    state = scheduler.add(state, limits, [adapted(6, 7), adapted(7, 8), adapted(8, 0)])
    state, plan = run(state, limits=limits)
    assert admitted(plan) == [7, 8], "7 is the longest in use, and drains for 9"
    assert [entry.request.sequence_id for entry in state.waiting] == [5, 6] and state.num_deferred(limits) == 2
    full = dataclasses.replace(limits, num_slots=state.num_running)
    assert state.num_deferred(full) == 0, "they wait for slots"
    state = scheduler.abort(state, limits, [1, 3])
    assert state.adapters == (7, 8)
    state, plan = run(state, limits=limits)
    assert admitted(plan) == [5] and plan.adapters == (8, 9), "9 was first in rank"
    assert [entry.request.sequence_id for entry in state.waiting] == [6]


def test_an_idle_adapter_stays_until_its_place_is_needed_and_the_one_used_longest_ago_goes_first() -> None:
    limits = dataclasses.replace(LIMITS, max_adapters=2)
    state = initial(limits)
    plans = []
    for number, adapter in enumerate((7, 8, 7, 9, 0)):
        state, plan = run(scheduler.add(state, limits, [adapted(number, adapter, num_new=1)]), limits=limits)
        plans.append(plan.adapters)
    assert plans == [(7,), (7, 8), (8, 7), (7, 9), (7, 9)]
    _, again = run(scheduler.add(state, limits, [adapted(9, 9)]), limits=limits)
    assert again.adapters is state.adapters, "nothing to do"
    assert scheduler.reset(state, limits).adapters == (), "the device may have lost them"


def test_a_request_with_an_adapter_needs_places_for_some() -> None:
    with pytest.raises(ValueError, match="no places"):
        start(adapted(1, 7))


@pytest.mark.parametrize("num_hot", [0, 8])
def test_no_adapter_starves(num_hot: int) -> None:
    """Test that 200 requests, each with a new adapter, are admitted in order, with `num_hot` others in every step."""
    limits = Limits(
        num_slots=80, num_blocks=4096, block_size=4, max_step_tokens=512, max_step_chunks=64, max_adapters=8
    )
    random, longest = np.random.default_rng(0), 12
    state, step, served = initial(limits), 0, []
    while len(served) < 200 and step < 220 * longest:
        own = [adapted(1000 * step, 100 + step, num_new=longest)] if 20 <= step < 220 else []
        hot = [
            adapted(1000 * step + number, number, num_new=int(random.integers(1, longest)))
            for number in range(1, num_hot + 1)
        ]
        state, plan = run(scheduler.add(state, limits, [*own, *hot]), limits=limits)
        served += [request_id for request_id in admitted(plan) if request_id % 1000 == 0]
        step += 1
    assert served == [1000 * number for number in range(20, 220)], "each in its turn"


DRAFTING = dataclasses.replace(LIMITS, max_step_tokens=32, max_drafts=3, max_verified=32)


def verify(state: State, counts: list[int], plan: Plan, limits: Limits = DRAFTING) -> State:
    """Commit a step whose rows have sampled `counts` tokens."""
    tokens = np.full((len(counts), max(counts)), 1, np.int32)
    sampled = np.array(counts, np.int32)
    owners = {record.request.sequence_id: record.request for record in state.running if record is not None}
    state, events = scheduler.commit(state, limits, plan, tokens, None, sampled, sampled)
    for request_id, count in zip(events.ids.tolist(), events.counts.tolist(), strict=True):
        owners[request_id].tokens.extend([1] * count)
    return state


def drafting_state(*requests: Request, limits: Limits = DRAFTING) -> State:
    """Run requests until the device has drafts for them."""
    state, plan = run(start(*requests, limits=limits), limits=limits)
    assert not plan.proposes and not plan.num_drafts, "beside chunks nothing is drafted"
    state, plan = run(state, limits=limits)
    assert plan.proposes and not plan.num_drafts, "the device drafts, and has none to verify"
    return state


def bounds(state: State, slot: int = 0) -> tuple[int, ...]:
    slots = state.slots
    return tuple(
        int(column[slot])
        for column in (slots.num_computed, slots.length, slots.num_tokens, slots.num_drafted, slots.num_accepted)
    )


def test_a_bound_grows_by_all_drafts_and_is_settled_by_those_that_were_kept() -> None:
    state = drafting_state(request(1, num_new=40))
    assert bounds(state) == (9, 10, 10, 1, 1)
    state, first = scheduler.plan(state, DRAFTING, 0.0)
    state, second = scheduler.plan(state, DRAFTING, 0.0)
    assert first.lengths.tolist() == second.lengths.tolist() == [4] and first.num_drafts == 3
    assert (first.starts.tolist(), second.starts.tolist()) == ([9], [13]) and bounds(state) == (17, 18, 10, 1, 1)
    state = verify(state, [2], first)
    assert bounds(state) == (15, 16, 12, 3, 2), "two drafts were compared, and one kept"
    state = verify(state, [4], second)
    assert bounds(state) == (15, 16, 16, 6, 5), "exact, with nothing in flight"


def test_a_row_at_its_bound_waits_until_its_drafts_are_counted() -> None:
    state = drafting_state(request(1, num_new=6), request(2, num_new=40, root=None))
    state, first = scheduler.plan(state, DRAFTING, 0.0)
    assert first.lengths.tolist() == [4, 4] and bounds(state)[:2] == (13, 14), "its limit is 14"
    state, second = scheduler.plan(state, DRAFTING, 0.0)
    assert second.slots.tolist() == [1]
    state = verify(state, [1, 1], first)
    _, third = scheduler.plan(state, DRAFTING, 0.0)
    assert third.slots.tolist() == [0, 1] and third.starts[0] == 10 and third.lengths[0] == 3, "limit, and no further"


def test_drafts_take_blocks_that_are_spare_and_preempt_nobody() -> None:
    """Test two requests with 10 tokens each, the drafts of which reach beyond their third block of 4 tokens."""
    for num_blocks, lengths in ((10, [4, 4]), (9, [2, 2]), (7, [2, 2]), (6, [2, 2])):
        limits = dataclasses.replace(DRAFTING, num_blocks=num_blocks)
        pair = request(1, num_new=14, root=None), request(2, num_new=10, root=None)
        state = drafting_state(*pair, limits=limits)
        state, first = scheduler.plan(state, limits, 0.0)
        assert first.lengths.tolist() == lengths and not first.preempted
        state, second = scheduler.plan(state, limits, 0.0)
        assert not second.preempted and second.num_decodes == 2


@pytest.mark.parametrize("beside", ["row", "chunk"])
def test_beside_a_row_that_may_have_no_drafts_and_beside_chunks_nothing_is_verified(beside: str) -> None:
    state = drafting_state(request(1, num_new=40))
    other = request(2, num_new=40, root=None, may_draft=beside == "chunk")
    state, plan = run(scheduler.add(state, DRAFTING, [other]), limits=DRAFTING)
    assert plan.num_drafts == 0 and not plan.proposes and not state.slots.has_drafts.any()
    state, plan = run(state, limits=DRAFTING)
    assert plan.num_drafts == 0 and plan.proposes is (beside == "chunk")
    _, plan = scheduler.plan(scheduler.abort(state, DRAFTING, [2]), DRAFTING, 0.0)
    assert plan.num_drafts == (3 if beside == "chunk" else 0) and plan.proposes


def test_who_was_guessed_wrongly_gets_no_drafts_for_a_while_and_then_tries_again() -> None:
    limits = dataclasses.replace(DRAFTING, token_cost=300, num_blocks=64)
    state, drafts = drafting_state(request(1, num_new=200), limits=limits), []
    for _ in range(150):
        state, plan = scheduler.plan(state, limits, 0.0)
        drafts.append(plan.num_drafts)
        state = verify(state, [1], plan, limits) if plan.num_drafts else commit_one(state, plan, limits)
    tried = [number for number, count in enumerate(drafts) if count]
    assert drafts[0] and len(tried) < 15 and any(number > drafting.PROBE_ROWS for number in tried)


def commit_one(state: State, plan: Plan, limits: Limits) -> State:
    owner = next(record.request for record in state.running if record is not None)
    state, events = scheduler.commit(state, limits, plan, np.full(len(plan.slots), 1, np.int32))
    owner.tokens.extend(events.tokens.tolist())
    return state


@pytest.mark.parametrize(("token_cost", "draft_cost"), [(0, 0), (4, 0), (90, 0), (90, 25), (400, 100), (0, 300)])
def test_as_many_drafts_are_verified_as_yield_the_most_tokens_in_a_time(token_cost: int, draft_cost: int) -> None:
    limits = dataclasses.replace(LIMITS, max_drafts=6, token_cost=token_cost, draft_cost=draft_cost)
    for num_rows in (1, 2, 7, 40, 256):
        table = drafting.best(limits, num_rows).tolist()
        for kept, count in enumerate(table):
            speeds, tokens, time = [], Fraction(0), Fraction(1000 + num_rows * token_cost, 1000)
            each = Fraction(num_rows * token_cost, 1000) + time * Fraction(draft_cost, 1000)
            for drafts in range(limits.max_drafts + 1):
                tokens += Fraction(kept, len(table) - 1) ** drafts
                speeds.append(tokens / (time + drafts * each))
            assert speeds[count] == max(speeds) and (count == 0 or speeds[count - 1] < speeds[count])
        assert table == sorted(table) and table[-1] == (6 if draft_cost < 100 or num_rows == 1 else table[-1])


def beams(width: int = 3, length: int = 6, num_new: int = 9, first: int = 1, **options: Any) -> list[Request]:
    return [request(first + index, length, num_new, beam_group=first, **options) for index in range(width)]


def fork(state: State, owners: list[Request], parents: list[int], limits: Limits = LIMITS) -> State:
    """Continue each member of a beam group as a child of the member at its index in `parents`; write their tokens."""
    moves = [
        Fork(own.sequence_id, owners[parent].sequence_id, 50 + at)
        for at, (own, parent) in enumerate(zip(owners, parents, strict=True))
    ]
    state = scheduler.fork(state, limits, moves)
    before = [own.tokens[:] for own in owners]
    for own, parent, move in zip(owners, parents, moves, strict=True):
        own.tokens[:] = before[parent]
        own.tokens.append(move.token)
    return state


def test_a_beam_group_is_admitted_as_one_and_waits_as_one_until_there_are_slots_for_all() -> None:
    state = scheduler.add(start(request(1), request(2, root=None)), LIMITS, beams(first=10))
    state = scheduler.add(state, LIMITS, [request(20, root=None)])
    state, plan = run(state)
    assert admitted(plan) == [1, 2], "the beam group needs three slots, two are free, and no later request is admitted"
    state, plan = run(scheduler.abort(state, LIMITS, [1]))
    assert admitted(plan) == [10, 11, 12] and state.beam_groups == ((0, 2, 3),)
    assert plan.lengths.tolist() == [1, 2], "the leader alone computes the prompt, of which a block is cached"
    with pytest.raises(ValueError, match="of the beam group of those before it"):
        scheduler.add(state, LIMITS, [*beams(2, first=30)[:1], request(31, 7, beam_group=30)])
    with pytest.raises(UserError, match="would need 10 KV blocks"):
        start_all(beams(), dataclasses.replace(LIMITS, num_blocks=9))


def start_all(requests: list[Request], limits: Limits = LIMITS) -> State:
    return scheduler.add(initial(limits), limits, requests)


def test_children_share_full_blocks_and_all_but_one_of_a_parent_get_a_copy_of_the_last() -> None:
    owners = beams(length=6)
    state, plan = run(start_all(owners))
    assert len(plan.slots) == 1 and not len(plan.moves)
    assert not len(scheduler.plan(state, LIMITS, 0.0)[1].slots), "all wait until their tokens are chosen"
    full, last = state.tables[0]
    state = fork(state, owners, [0, 0, 0])
    assert state.tables == ((full, last), (full,), (full,), ()) and state.pool.references[full] == 3
    state, plan = run(state)
    assert plan.moves[:, [2, 4]].tolist() == [[last, state.tables[1][1]], [last, state.tables[2][1]]]
    assert plan.table.tolist() == [
        [slot, index, state.tables[slot][index]] for slot, index in ((1, 0), (2, 0), (1, 1), (2, 1))
    ]
    assert plan.num_decodes == 1 and plan.lengths.tolist() == [1, 1, 1], "first rows are chunks of a token"
    before = state.tables
    state = fork(state, owners, [2, 1, 2])  # the first one has no child
    assert state.tables[:3] == ((full,), before[1], before[2])
    state, plan = run(state)
    assert plan.num_decodes == 3 and plan.moves[:, [2, 4]].tolist() == [[before[2][1], state.tables[0][1]]]
    assert before[0][1] in plan.moves[:, 4], "what the dead one had is free, and taken again"
    state = fork(state, owners, [0, 0, 0])
    state, plan = run(state)
    assert not len(plan.moves), "a full block is never copied"
    check_accounts(state, LIMITS)


def test_a_fork_of_others_than_those_that_have_answered_is_refused() -> None:
    owners = beams(2)
    state, _ = scheduler.plan(start_all(owners), LIMITS, 0.0)
    with pytest.raises(ValueError, match="when all have answered"):
        fork(state, owners, [0, 0])
    state, _ = run(start_all(owners))
    for moves in ([Fork(1, 1, 5)], [Fork(1, 1, 5), Fork(3, 1, 5)], [Fork(1, 1, 5)] * 2):
        with pytest.raises(ValueError, match="all members of one beam group"):
            scheduler.fork(state, LIMITS, moves)
    with pytest.raises(ValueError, match="parents that have tokens"):
        fork(state, owners, [1, 0])
    ending = beams(2, num_new=1)
    state, _ = run(start_all(ending))
    with pytest.raises(ValueError, match="children that may have more"):
        fork(state, ending, [0, 0])


def test_a_beam_group_is_preempted_as_one_and_comes_back_with_the_tokens_of_each() -> None:
    limits = dataclasses.replace(LIMITS, num_blocks=9)
    first, owners = request(1, 8, 20, root=None), beams(2, length=7, first=10)
    state = scheduler.add(start(first, limits=limits), limits, owners)
    state, _ = run(state, limits=limits)
    preempted: tuple[int, ...] = ()
    while not preempted:
        if all(state.slots.num_tokens[slot] + 1 == state.slots.length[slot] for slot in state.beam_groups[0][:1]):
            state = fork(state, owners, [0, 1] if len(owners[1].tokens) > 7 else [0, 0], limits)
        state, plan = run(state, limits=limits)
        preempted = plan.preempted
    assert preempted == (10, 11) and not state.beam_groups and not state.entries and not state.copies
    assert {entry.num_tokens for entry in state.waiting} == {len(owners[0].tokens)} and len(owners[0].tokens) > 8
    state, plan = run(scheduler.abort(state, limits, [1]), limits=limits)
    assert admitted(plan) == [10, 11] and plan.samples.all()
    assert state.tables[0][0] == state.tables[1][0] != state.tables[0][-1] != state.tables[1][-1]
