"""Requests with a grammar among others without one return the same as alone, and completed outputs are valid.

40 of 400 requests are among the default tests; those under other settings among the ci and slow ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from llguidance.numpy import fill_next_token_bitmask

from jaxllm import LLM, RequestOutput, SamplingParams
from jaxllm.structured_output import grammars
from jaxllm.structured_output.grammars import Grammars
from jaxllm.structured_output.slow_masks import Pace
from tests.engine import structured_requests
from tests.engine.structured_requests import KINDS, asked, check_equal, is_ended_by_itself, is_valid
from tests.support import paths
from tests.support.inspection import set_depth
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
    """Run each request alone, without overlapping steps, and cache its output."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.engine
        self._known: dict[int, RequestOutput] = {}

    def __call__(self, number: int) -> RequestOutput:
        if number not in self._known:
            depth = set_depth(self._engine, 1)
            self._engine.reset_prefix_cache()
            self._known[number] = structured_requests.run(self._engine, [number], aborts=False)[number]
            set_depth(self._engine, depth)
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


def test_masks_that_are_late_or_made_beside_the_loop_change_nothing(
    llm: LLM, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks change no token, whichever rows lack theirs in time and whichever thread makes them."""
    chance = Random(5)
    fill = Grammars.fill
    num_late = 0

    def some(self: Grammars, wanted: list[tuple[Any, int]], masks: Any, until: float = math.inf) -> list[int]:
        nonlocal num_late
        late = [each for each in wanted if until < math.inf and chance.random() < 0.3]
        num_late += len(late)
        return [row for _, row in late] + fill(self, [each for each in wanted if each not in late], masks, until)

    expected = {number: alone(number) for number in FEW}
    monkeypatch.setattr(Grammars, "fill", some)
    monkeypatch.setattr(Pace, "is_slow", property(lambda _: chance.random() < 0.5))
    told = structured_requests.run(llm.engine, FEW, aborts=True)
    assert num_late > 20 and not llm.engine.outputs.sequences
    for number, output in told.items():
        check_equal(number, output, expected[number])


def test_long_masks_of_one_request_hold_up_no_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six rows whose masks together take 0.6 s per step get their tokens, and so does another request."""
    num_made = 0

    def slow(matcher: Any, masks: Any, row: int) -> None:
        nonlocal num_made
        num_made += 1
        time.sleep(0.1)
        fill_next_token_bitmask(matcher, masks, row)

    monkeypatch.setattr(grammars, "fill_next_token_bitmask", slow)
    monkeypatch.setattr(grammars, "NUM_THREADS", 1)
    clocks = SimpleNamespace(perf_counter=time.perf_counter, thread_time=time.perf_counter)
    monkeypatch.setattr(grammars, "time", clocks)
    engine = llm.engine
    plain = SamplingParams(temperature=1.0, max_tokens=500, ignore_eos=True)
    engine.add_request("other", "Once", plain)
    engine.add_request("slow", "Once", replace(plain, n=6, structured_outputs={"regex": "[a-z ]{400}"}))
    seconds, counts = [], [0] * 7
    while min(counts) < 2:
        began = time.perf_counter()
        outputs = engine.step()
        seconds.append(time.perf_counter() - began)
        for output in outputs:
            for one in output.outputs:
                counts[one.index + (output.request_id == "slow")] = len(one.token_ids)
    engine.abort_request(["other", "slow"])
    assert max(seconds) < 0.4, seconds
    assert counts[0] > 2 * max(counts[1:]), counts


@pytest.mark.parametrize("is_slow", [False, True])
def test_bad_words_ban_no_token_that_a_grammar_forces(llm: LLM, is_slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the request alone, and with rows that have too few forced tokens for a step of chunks."""
    monkeypatch.setattr(Pace, "is_slow", is_slow)
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
            set_depth(busy.engine, depth)
            preemptions, cached = metrics.preemptions, metrics.cached_tokens
            check(busy, alone, numbers)
            assert (metrics.preemptions > preemptions) == ("num_kv_blocks" in settings)
            assert (metrics.cached_tokens > cached) == settings.get("enable_prefix_caching", True)
        assert metrics.compilations_after_ready == 0
