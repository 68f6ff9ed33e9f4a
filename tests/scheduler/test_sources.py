"""Encoders' inputs in the scheduler: their budget, their blocks after a failure, and what cannot fit."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from jaxllm.errors import ContextLengthError
from jaxllm.scheduler import scheduler
from jaxllm.scheduler.media import Encode
from jaxllm.scheduler.state import Limits, Plan, Request, Source, State, initial

LIMITS = Limits(4, 12, 4, 16, 4, max_source=20, max_encoded=10)


def request(sequence_id: int, digest: bytes, num_tokens: int, **options: int) -> Request:
    source = Source(digest, num_tokens)
    return Request(sequence_id=sequence_id, tokens=array("i", [1]), num_prompt=1, limit=4, source=source, **options)


def planned(*requests: Request) -> tuple[State, Plan]:
    return scheduler.plan(scheduler.add(initial(LIMITS), LIMITS, requests), LIMITS, 0.0)


def test_a_plan_encodes_within_its_budget_except_for_its_first_source() -> None:
    state, plan = planned(request(1, b"a", 6), request(2, b"b", 6), request(3, b"a", 6))
    assert [each.request.sequence_id for each in plan.admitted] == [1]
    state, plan = scheduler.plan(state, LIMITS, 0.0)
    assert [each.request.sequence_id for each in plan.admitted] == [2, 3], "the last source is cached"
    assert [each.sequence_id for each in plan.encodes] == [2]
    assert state.sources[0] == state.sources[2]
    assert len(planned(request(1, b"a", 20), request(2, b"b", 1))[1].encodes) == 1


def test_the_source_of_a_failed_request_is_encoded_again_unless_others_use_it() -> None:
    for others in (0, 1):
        state, plan = planned(*(request(1 + index, b"a", 6) for index in range(1 + others)))
        is_finite = np.arange(len(plan.slots)) > 0
        state, _ = scheduler.commit(state, LIMITS, plan, np.ones(len(plan.slots), np.int32), is_finite)
        state = scheduler.add(state, LIMITS, [request(9, b"a", 6)])
        _, plan = scheduler.plan(state, LIMITS, 0.0)
        assert [each.sequence_id for each in plan.encodes] == [9] * (not others)


def test_the_rest_of_a_source_of_which_blocks_were_evicted_is_encoded() -> None:
    state, plan = planned(request(1, b"a", 10))
    (first,) = plan.encodes
    state = scheduler.abort(state, LIMITS, [1])
    taken = Request(sequence_id=2, tokens=array("i", range(40)), num_prompt=40, limit=40)
    state, _ = scheduler.plan(scheduler.add(state, LIMITS, [taken]), LIMITS, 0.0)  # 10 of 12 blocks
    state = scheduler.abort(state, LIMITS, [2])
    _, plan = scheduler.plan(scheduler.add(state, LIMITS, [request(3, b"a", 10)]), LIMITS, 0.0)
    (again,) = plan.encodes
    assert isinstance(again, Encode) and again.index == 2 and again.units[:2] == first.units[:2]


def test_a_request_is_refused_if_its_source_leaves_no_room() -> None:
    limits = Limits(4, 5, 4, 16, 4, max_source=20, max_encoded=10)
    with pytest.raises(ContextLengthError, match="6 KV blocks"):
        scheduler.add(initial(limits), limits, [request(1, b"a", 20)])
    with pytest.raises(ValueError, match="no encoder reads"):
        scheduler.add(initial(LIMITS), LIMITS, [request(1, b"a", 21)])
