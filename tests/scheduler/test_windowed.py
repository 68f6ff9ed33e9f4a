"""Tests of windowed layers' blocks: their number, their release, and the cached prefixes that stay usable."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxllm.errors import UserError
from jaxllm.scheduler import block_pool, scheduler, windowed
from jaxllm.scheduler.state import Limits, Plan, Request, State, initial

SIZE, WINDOW, NOTHING = 4, 8, 12
LIMITS = Limits(
    num_slots=4,
    num_blocks=60,
    block_size=SIZE,
    max_step_tokens=16,
    max_step_chunks=4,
    window=WINDOW,
    num_window_blocks=NOTHING,
)


def request(number: int, length: int, num_new: int = 4, **options: Any) -> Request:
    tokens = array("i", range(length))
    return Request(sequence_id=number, tokens=tokens, num_prompt=length, limit=length + num_new, **options)


def run(state: State, limits: Limits = LIMITS) -> tuple[State, Plan]:
    state, plan = scheduler.plan(state, limits, 0.0)
    owners = {record.request.sequence_id: record.request for record in state.running if record is not None}
    state, events = scheduler.commit(state, limits, plan, np.ones(len(plan.slots), np.int32))
    for number in events.ids.tolist():
        owners[number].tokens.append(1)
    return state, plan


def finish(state: State, limits: Limits = LIMITS) -> State:
    while state.num_running or state.waiting:
        state, _ = run(state, limits)
    return state


def free(state: State) -> int:
    assert state.window_pool is not None
    return state.window_pool.num_available


def test_a_request_keeps_its_window_and_its_chunk_and_the_device_is_told_what_has_gone() -> None:
    state = scheduler.add(initial(LIMITS), LIMITS, [request(1, 60, 40)])
    device = np.full((LIMITS.num_slots, 2 * 25), -1)
    lengths = []
    while state.num_running or state.waiting:
        state, plan = run(state)
        slots, columns, blocks = plan.table.T
        assert len({*zip(slots.tolist(), columns.tolist(), strict=True)}) == len(slots), "no entry is written twice"
        device[slots, columns] = blocks
        lengths += [plan.starts[0] + plan.lengths[0]]
        first, last = max(0, plan.starts[0] - WINDOW + 1) // SIZE, (lengths[-1] - 1) // SIZE
        own = device[0, 1::2]
        assert (own[first : last + 1] < NOTHING).all(), "what a query sees has blocks"
        assert len({*own[first : last + 1].tolist()}) == last - first + 1
        assert (own[: max(0, first - 1)] == NOTHING).all(), "what lies before is nothing"
        named = len(state.window_tables[0])
        assert named <= -(-(WINDOW + LIMITS.max_step_tokens) // SIZE) + 1
        assert named <= windowed.most(WINDOW, SIZE) or lengths[-1] <= 60
    assert max(lengths) == 99 and free(state) == NOTHING


@pytest.mark.parametrize("window", [1, 2, 4, 5, 8, 9, 13])
def test_a_conversation_that_goes_on_finds_its_whole_prefix(window: int) -> None:
    for length in range(1, 30):
        limits = replace(LIMITS, window=window)
        state = scheduler.add(initial(limits), limits, [request(1, length, 6)])
        (own,) = [entry.request for entry in state.waiting]
        state = finish(state, limits)
        turn = Request(sequence_id=2, tokens=own.tokens[:] + array("i", [5]), num_prompt=length + 7, limit=length + 8)
        _, plan = scheduler.plan(scheduler.add(state, limits, [turn]), limits, 0.0)
        assert plan.admitted[0].num_cached == (length + 5) // SIZE * SIZE


def test_a_prefix_is_cut_where_its_window_has_gone() -> None:
    state = finish(scheduler.add(initial(LIMITS), LIMITS, [request(1, 40)]))
    branch = request(2, 21)  # needs blocks 3 and 4 of the first request, which were released and are cached
    _, plan = scheduler.plan(scheduler.add(state, LIMITS, [branch]), LIMITS, 0.0)
    assert plan.admitted[0].num_cached == 20
    other = Request(sequence_id=3, tokens=array("i", range(100, 140)), num_prompt=40, limit=44)
    state = finish(scheduler.add(state, LIMITS, [other]))  # uses all blocks of windowed layers
    assert len(block_pool.cached_blocks(state.pool)) == 20, "those of other layers are all there"
    _, plan = scheduler.plan(scheduler.add(state, LIMITS, [branch]), LIMITS, 0.0)
    assert plan.admitted[0].num_cached == 0


def test_who_needs_a_block_of_windowed_layers_preempts_the_last_in_rank() -> None:
    limits = replace(LIMITS, num_window_blocks=5)
    state = scheduler.add(initial(limits), limits, [request(number, 7, 20, root=None) for number in (1, 2, 3)])
    preempted: list[int] = []
    while state.num_running or state.waiting:
        state, plan = run(state, limits)
        preempted += plan.preempted
        assert state.pool.num_available > 40, "other layers have enough"
    assert preempted and 1 not in preempted and free(state) == 5


def test_a_beam_group_that_could_not_run_alone_is_refused() -> None:
    members = [request(number, 12, 9, beam_group=1) for number in (1, 2, 3, 4)]
    assert scheduler.add(initial(LIMITS), LIMITS, members[:3]).waiting
    with pytest.raises(UserError, match="4 sequences that run together would need 16 KV blocks of windowed layers"):
        scheduler.add(initial(LIMITS), LIMITS, members)


def test_with_a_window_as_long_as_any_request_there_is_one_plan_for_both_groups() -> None:
    """Test that both groups then have equally many blocks, but the second allocates those of a prompt by chunk."""
    limits = replace(LIMITS, window=200, num_window_blocks=60)
    state = scheduler.add(initial(limits), limits, [request(1, 50, 9)])
    while state.num_running or state.waiting:
        state, _ = run(state, limits)
        count = -(-int(state.slots.num_computed[0]) // SIZE)
        assert state.slots.num_freed[0] == 0 and len(state.window_tables[0]) in (count, len(state.tables[0]))
