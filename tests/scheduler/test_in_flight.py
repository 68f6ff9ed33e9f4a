"""Plans with batches in flight in pipeline stages; the simulation compares them with a naive scheduler."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator

import numpy as np
import pytest

from jaxllm.scheduler import scheduler
from jaxllm.scheduler.state import Limits, Plan, Request, initial


def plans(num_ticks: int, prompts: list[int], count: int, num_outputs: int = 1000) -> Iterator[Plan]:
    """Plan `count` ticks of requests with prompts of these lengths; commit each plan after `num_ticks` further ones."""
    limits = Limits(
        num_slots=16, num_blocks=2000, block_size=16, max_step_tokens=32, max_step_chunks=16, num_ticks=num_ticks
    )
    requests = [
        Request(sequence_id=at, tokens=array("i", [5] * size), num_prompt=size, limit=size + num_outputs, root=None)
        for at, size in enumerate(prompts)
    ]
    state, flying = scheduler.add(initial(limits), limits, requests), deque[Plan]()
    for _ in range(count):
        state, plan = scheduler.plan(state, limits, 0.0)
        yield plan
        flying.append(plan)
        if len(flying) > num_ticks:
            left = flying.popleft()
            state, _ = scheduler.commit(state, limits, left, np.full(len(left.slots), 7, np.int32))


@pytest.mark.parametrize("num_ticks", [2, 3, 4])
@pytest.mark.parametrize("num_requests", [1, 2, 5, 9, 16])
def test_requests_divide_themselves_evenly(num_ticks: int, num_requests: int) -> None:
    """All prompts fit one plan. A row returns after `num_ticks` plans, and none waits longer once batches are even."""
    made = [plan.slots.tolist() for plan in plans(num_ticks, [2] * num_requests, 60)]
    for at in range(20, 60 - num_ticks):
        together = [slot for slots in made[at : at + num_ticks] for slot in slots]
        assert sorted(together) == list(range(num_requests))
        assert made[at] == made[at + num_ticks]
        assert num_requests // num_ticks <= len(made[at]) <= -(-num_requests // num_ticks)


def test_chunks_of_a_prompt_follow_each_other_and_its_first_token_is_awaited() -> None:
    made = list(plans(4, [70], 12))
    assert [plan.lengths.tolist() for plan in made[:3]] == [[32], [32], [6]]
    assert [len(plan.slots) for plan in made[3:]] == [0, 0, 0, 1, 0, 0, 0, 1, 0]


def test_one_stage_notes_no_batches() -> None:
    limits = Limits(num_slots=2, num_blocks=4, block_size=16, max_step_tokens=8, max_step_chunks=2)
    assert initial(limits).batches == ()
