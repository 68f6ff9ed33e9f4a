"""Requests that obey a grammar among others that do not: each gets what it gets alone, and what ends is valid.

40 of 400 requests are among the default tests; those under other settings among the ci and slow ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jaxllm import LLM, RequestOutput, SamplingParams
from tests.engine import structured_requests
from tests.engine.structured_requests import KINDS, asked, check_equal, is_ended_by_itself, is_valid
from tests.support import paths
from tests.support.sizes import FEW_BLOCKS, SLOTS

STORIES = str(paths.STORIES)
FEW, ALL = range(40), range(400)
SETTINGS: list[tuple[dict[str, Any], range]] = [
    (FEW_BLOCKS, FEW),
    (SLOTS | {"max_num_batched_tokens": 8}, FEW),
    (SLOTS | {"tensor_parallel_size": 2}, FEW),
    (SLOTS | {"deterministic": True}, FEW),
    (SLOTS | {"enable_prefix_caching": False}, ALL),
    (FEW_BLOCKS, ALL),
    (SLOTS | {"max_num_batched_tokens": 8}, ALL),
    (SLOTS | {"tensor_parallel_size": 2}, ALL),
    (SLOTS | {"deterministic": True}, ALL),
    (FEW_BLOCKS | {"tensor_parallel_size": 2, "max_num_batched_tokens": 16}, ALL),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(STORIES, **SLOTS) as llm:
        yield llm


class Alone:
    """What each request gets in an engine that has nothing else to do, one step after the other."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.engine
        self._known: dict[int, RequestOutput] = {}

    def __call__(self, number: int) -> RequestOutput:
        if number not in self._known:
            depth, self._engine._depth = self._engine._depth, 1
            self._engine.reset_prefix_cache()
            self._known[number] = structured_requests.run(self._engine, [number], aborts=False)[number]
            self._engine._depth = depth
        return self._known[number]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> Alone:
    return Alone(llm)


def check(llm: LLM, alone: Alone, numbers: range) -> None:
    engine, tokenizer = llm.engine, llm.get_tokenizer()
    expected = {number: alone(number) for number in numbers}
    valid: dict[str | None, int] = dict.fromkeys([None, *KINDS], 0)
    forced = engine.metrics.forced_tokens
    told = structured_requests.run(engine, numbers, aborts=True)
    assert engine.metrics.forced_tokens > forced and not engine.outputs.sequences
    assert engine.scheduler.state.pool.num_available == engine.scheduler.state.pool.num_blocks
    for number, output in told.items():
        request = asked(number)
        check_equal(number, output, expected[number])
        for one in output.outputs:
            if one.finish_reason == "error":
                assert "could be sampled" in str(one.stop_reason), (number, one.stop_reason, request)
            if is_ended_by_itself(one):
                valid[request.kind] += 1
                assert is_valid(tokenizer, request, one), (number, one.text, request)
    assert sum(valid.values()) > len(numbers) / 4, valid
    assert len(numbers) < len(ALL) or all(valid[kind] for kind in KINDS), valid


def test_a_constrained_request_gets_in_a_busy_batch_what_it_gets_alone(llm: LLM, alone: Alone) -> None:
    check(llm, alone, FEW)
    assert llm.engine.metrics.compilations_after_ready == 0


def test_bad_words_ban_no_token_that_a_grammar_forces(llm: LLM) -> None:
    """Run the request alone, and with rows that have too few forced tokens for a step of chunks."""
    once, *_ = llm.get_tokenizer().encode("Once", add_special_tokens=False)
    text = " Once upon a"
    params = SamplingParams(
        temperature=0.0,
        max_tokens=20,
        bad_words=["upon"],
        logit_bias={once: 100.0},
        structured_outputs={"choice": [text, "No"]},
    )
    others = [SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)] * (SLOTS["max_num_seqs"] - 1)
    (alone,) = llm.generate(["Say it"], params, use_tqdm=False)
    beside = llm.generate(["Say it"] * (1 + len(others)), [*others, params], use_tqdm=False)[-1]
    for output in (alone, beside):
        assert output.outputs[0].text == text, output.outputs[0]
        assert len(output.outputs[0].token_ids) == 4


@pytest.mark.ci
@pytest.mark.parametrize(
    ("settings", "numbers"),
    [pytest.param(*own, marks=[pytest.mark.slow] * (own[1] is ALL)) for own in SETTINGS],
    ids=str,
)
def test_settings_change_nothing_of_constrained_requests(
    settings: dict[str, Any], numbers: range, alone: Alone
) -> None:
    with LLM(STORIES, **settings) as busy:
        metrics = busy.engine.metrics
        for depth in (2, 1, 2):  # with overlap and without, in the same programs
            busy.engine._depth = depth
            preemptions, cached = metrics.preemptions, metrics.cached_tokens
            check(busy, alone, numbers)
            assert (metrics.preemptions > preemptions) == ("num_kv_blocks" in settings)
            assert (metrics.cached_tokens > cached) == settings.get("enable_prefix_caching", True)
        assert metrics.compilations_after_ready == 0
