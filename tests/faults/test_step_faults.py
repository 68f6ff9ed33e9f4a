"""After steps that fail, run out of memory or sample non-finite numbers, other requests return the same tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm import LLM, EngineError, SamplingParams
from jaxllm.engine.sequence import SequenceGroup
from jaxllm.outputs import RequestOutput
from jaxllm.runner.model_runner import StepInFlight
from jaxllm.runner.results import StepOutput
from jaxllm.runner.step_input import StepInput
from jaxllm.scheduler.block_pool import PoolEditor
from tests.faults.served import ENGINE
from tests.support import inspection

PREFIX = list(range(20, 60))  # two and a half blocks, shared by all prompts but two
PROMPTS = [[*PREFIX, 70 + number, 9 + number] for number in range(22)] + [[5, 6, 7], [8]]
PARAMS = [
    SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=10 + number, ignore_eos=True)
    for number in range(len(PROMPTS))
]
BIG = 50  # the device has no memory for a chunk of this many tokens


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**ENGINE) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    return tokens_of(llm.generate(PROMPTS, PARAMS, use_tqdm=False))


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    assert all(output.outputs[0].finish_reason in ("length", "stop") for output in outputs)
    return [list(output.outputs[0].token_ids) for output in outputs]


def out_of_memory() -> Exception:
    return jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9876543210 bytes.")


class Failing:
    """`Runner.dispatch` that fails in each possible way in turn, and never more than twice in a row."""

    WAYS = ("before it began", "after donation", "in its middle", "when it is read")

    def __init__(self, llm: LLM, every: int) -> None:
        self._llm = llm
        self._real: Callable[..., StepInFlight] = llm.engine.runner.dispatch
        self._every = every
        self._before = llm.engine.metrics.recoveries
        self.calls = self.failures = 0
        self.times: list[float] = []

    def __call__(self, *arguments: Any) -> StepInFlight:
        self.calls += 1
        metrics = self._llm.engine.metrics
        if metrics.recoveries - self._before >= 20 or self.calls % self._every not in (0, 1):
            return self._real(*arguments)
        way = self.WAYS[self.failures % len(self.WAYS)]
        self.failures += 1
        self.times.append(time.monotonic())
        match way:
            case "after donation":
                inspection.lose_state(self._llm.engine.runner)
            case "in its middle":
                self._real(*arguments)
            case "when it is read":
                flight = self._real(*arguments)
                flight.joined.delete()  # reading it raises the same error as a step that failed on the device
                return flight
        raise RuntimeError(f"the device said no {way}")


@pytest.mark.ci
def test_twenty_failed_steps_cost_no_token_and_nobody_his_place(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = llm.engine
    failing = Failing(llm, every=6)
    reset, before = engine.scheduler.reset, engine.metrics.recoveries
    monkeypatch.setattr(engine.runner, "dispatch", failing)

    def checked_reset() -> None:
        waiting, running = len(engine.scheduler.state.waiting), engine.scheduler.state.num_running
        reset()
        state = engine.scheduler.state
        assert state.pool.num_available == state.pool.num_blocks and not state.num_running
        assert len(state.waiting) == waiting + running, "no request is lost"
        assert not any(PoolEditor(state.pool).look_up(entry.digests) for entry in state.waiting), "a stale hit"

    monkeypatch.setattr(engine.scheduler, "reset", checked_reset)
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert engine.metrics.recoveries == before + 20 and failing.failures >= 20
    assert tokens_of(outputs) == expected
    gaps = np.diff([*failing.times, time.monotonic()])
    assert gaps.max() < 5.0, "it serves again at once"
    assert engine.scheduler.state.pool.num_available == engine.scheduler.state.pool.num_blocks


class Exhausted:
    """Result of a step that ran out of device memory: reading it raises the error."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise out_of_memory()


@pytest.mark.parametrize("is_late", [False, True])
def test_a_request_for_which_there_is_no_memory_ends_and_the_engine_goes_on(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """The request ends, whether its step fails when it is dispatched or when its sampled tokens are read."""
    real: Callable[..., Any] = llm.engine.runner.dispatch

    def dispatch(step: StepInput) -> Any:
        if step.plan.lengths.max() < BIG:
            return real(step)
        if not is_late:
            raise out_of_memory()
        return real(step)._replace(joined=Exhausted())

    llm.reset_prefix_cache()
    monkeypatch.setattr(llm.engine.runner, "dispatch", dispatch)
    prompts = [[300] * 100, *PROMPTS[:12], [301] * 100, *PROMPTS[12:]]
    short = [replace(own, max_tokens=5) for own in PARAMS]
    params = [SamplingParams(max_tokens=4), *short[:12], SamplingParams(max_tokens=4), *short[12:]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [outputs.pop(number).outputs[0].finish_reason for number in (13, 0)] == ["error", "error"]
    assert tokens_of(outputs) == [tokens[:5] for tokens in expected]
    monkeypatch.undo()
    (output,) = llm.generate([[300] * 100], SamplingParams(max_tokens=4), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length", "there is memory again"


def test_an_engine_without_any_memory_dies_after_nine_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def dispatch(*_: Any) -> Any:
        nonlocal calls
        calls += 1
        raise out_of_memory()

    monkeypatch.setattr(llm.engine.runner, "dispatch", dispatch)
    with pytest.raises(EngineError, match="9 steps in a row failed"):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert calls == 9
    inspection.forgive(llm.engine)


@pytest.mark.parametrize("after", [0, 7])
def test_a_row_without_numbers_ends_its_request_and_leaves_nothing_in_the_cache(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """The victim ends at its first token, or at a later one."""
    engine = llm.engine
    victim = [*range(400, 450)]
    real: Callable[[StepInFlight], StepOutput] = StepInFlight.result

    def result(flight: StepInFlight) -> StepOutput:
        found = real(flight)
        plan = inspection.planned_by(engine)
        assert plan is not None
        for row, slot in enumerate(plan.slots.tolist()):
            sample = inspection.batch_of(engine).owner(slot)
            if sample.tokens[: len(victim)].tolist() == victim and sample.num_tokens == after:
                is_finite = found.is_finite.copy()
                is_finite[row] = False
                found = replace(found, is_finite=is_finite)
        return found

    llm.reset_prefix_cache()
    monkeypatch.setattr(StepInFlight, "result", result)
    own = SamplingParams(max_tokens=30, ignore_eos=True)
    outputs = llm.generate([victim, *PROMPTS], [own, *PARAMS], use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "error"
    assert len(outputs[0].outputs[0].token_ids) == after
    assert tokens_of(outputs[1:]) == expected
    monkeypatch.undo()
    (cured,) = llm.generate([victim], own, use_tqdm=False)
    assert cured.num_cached_tokens == 0 and cured.outputs[0].finish_reason == "length"


def test_a_request_that_cannot_be_made_ready_for_a_step_fails_alone(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request's preparation fails at each attempt, and not once as in test_request_faults."""
    batch = inspection.batch_of(llm.engine)
    real = batch.place
    monkeypatch.setattr(batch, "place", lambda slot, sample: 1 // 0 if sample.tokens[0] == 450 else real(slot, sample))
    outputs = llm.generate([[450, 451], *PROMPTS], [SamplingParams(max_tokens=3), *PARAMS], use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "error"
    assert tokens_of(outputs[1:]) == expected


def test_what_cannot_be_shown_ends_as_failed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    real, errors = SequenceGroup.show, llm.engine.metrics.finished.get("error", 0)
    monkeypatch.setattr(
        SequenceGroup, "show", lambda group: 1 // 0 if group.prompt_token_ids[0] == 450 else real(group)
    )
    bad, good = llm.generate([[450], [5]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert (bad.outputs[0].finish_reason, good.outputs[0].finish_reason) == ("error", "length")
    assert llm.engine.metrics.finished["error"] == errors + 1, "counted as it was told"
