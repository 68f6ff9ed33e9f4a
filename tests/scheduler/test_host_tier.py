"""Tests of the host's tier in the scheduler: tokens that a preempted request computes again, and held blocks."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from jaxllm.scheduler import scheduler
from jaxllm.scheduler.host_tier import HOST, Landed
from jaxllm.scheduler.state import Limits, Request, initial


@pytest.mark.parametrize("window", [0, 5])
def test_who_is_swapped_out_computes_a_block_at_most(window: int) -> None:
    limits = Limits(
        num_slots=4,
        num_blocks=12,
        block_size=2,
        max_step_tokens=16,
        max_step_chunks=4,
        num_host_blocks=64,
        max_stores=64,
        swaps=True,
        window=window,
        num_window_blocks=12 if window else 0,
        num_host_window_blocks=64 if window else 0,
    )
    requests = {
        number: Request(sequence_id=number, tokens=array("i", [number] * 5), num_prompt=5, limit=20)
        for number in range(1, 7)
    }
    state, had_slot, again = scheduler.add(initial(limits), limits, [*requests.values()]), set[int](), 0
    while state.waiting or state.num_running:
        state, plan = scheduler.plan(state, limits, 0.0)
        for admission in plan.admitted:
            if admission.request.sequence_id in had_slot:
                again += 1
                assert admission.num_known - admission.num_cached <= limits.block_size
            had_slot.add(admission.request.sequence_id)
        landed = [
            Landed(plan.number, group, block, True) for group, _, _, tier, block in plan.moves.tolist() if tier == HOST
        ]
        state = scheduler.land(state, limits, landed)
        state, events = scheduler.commit(state, limits, plan, np.full(len(plan.slots), 1, np.int32))
        for number, token in zip(events.ids.tolist(), events.tokens.tolist(), strict=True):
            requests[number].tokens.append(token)
    assert again > 4
    assert state.host is not None and not state.host.held and not state.host.storing
    assert all(pool.num_available == pool.num_blocks for pool in state.host.pools)
