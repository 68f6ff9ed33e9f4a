"""Faults in requests with a grammar affect these requests alone, and refused requests leave no state."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from jaxllm import LLM, AsyncLLM, RequestOutput, SamplingParams, UserError
from jaxllm.config import config_of
from jaxllm.engine.language import Language
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.engine.loader import load_parts
from jaxllm.metrics import Metrics
from jaxllm.structured_output.constraint import Constraint
from jaxllm.structured_output.grammars import Grammar, Grammars
from jaxllm.structured_outputs_params import StructuredOutputsParams
from tests.engine.structured_requests import FLAT
from tests.support import paths
from tests.support.inspection import lose_state, num_preparing, random_state_of
from tests.support.sizes import SLOTS

STORIES = str(paths.STORIES)
PROMPT = "Once upon a time"
DATE = r"On \d\d of the month of (May|June), in the year of our lord \d\d\d\d"
# Compiles, and exceeds the lexer's limits after some text.
TOO_MUCH = 'start: "Once upon a time: " A\nA: ' + " & ".join(f"/.*[{one}-m].{{40}}{one}.*/" for one in "abc") + "\n"


def sampled(asked: Any = None, **own: Any) -> SamplingParams:
    params = {"temperature": 1.0, "seed": 1, "max_tokens": 60, **own}
    return SamplingParams(**params, structured_outputs=asked)


def generate(llm: LLM, *params: SamplingParams) -> list[RequestOutput]:
    return llm.generate([PROMPT] * len(params), list(params), use_tqdm=False)


def told(outputs: list[RequestOutput]) -> list[tuple[list[int], str, str | None]]:
    return [(list(one.token_ids), one.text, one.finish_reason) for output in outputs for one in output.outputs]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(STORIES, **SLOTS) as llm:
        yield llm


def test_forced_tokens_are_counted_and_what_is_written_without_them_is_valid_too(llm: LLM) -> None:
    metrics = llm.engine.metrics
    for seed in range(4):
        with_forced, sampled_only = sampled({"regex": DATE}, seed=seed), sampled({"regex": DATE}, seed=seed, logprobs=0)
        before, steps = metrics.forced_tokens, metrics.steps
        (output,) = generate(llm, with_forced)
        assert re.fullmatch(DATE, output.outputs[0].text) and output.outputs[0].finish_reason == "stop"
        assert metrics.forced_tokens - before > 20
        assert metrics.steps - steps < len(output.outputs[0].token_ids)
        before = metrics.forced_tokens
        (output,) = generate(llm, sampled_only)
        assert re.fullmatch(DATE, output.outputs[0].text) and output.outputs[0].finish_reason == "stop"
        assert metrics.forced_tokens == before
        assert len(output.outputs[0].logprobs or ()) == len(output.outputs[0].token_ids)


def test_all_of_an_output_can_be_forced_and_is_cut_where_it_must_end(llm: LLM) -> None:
    whole = "She said hello to the big, red ball and they played all day"
    ids = llm.get_tokenizer().encode("a " + whole, add_special_tokens=False)[1:]
    asked: dict[str, Any] = {"choice": [whole]}
    (output,) = generate(llm, sampled(asked, max_tokens=99))
    assert output.outputs[0].text == whole and output.outputs[0].finish_reason == "stop"
    for most in (1, 2, 3, len(output.outputs[0].token_ids) - 1, len(output.outputs[0].token_ids)):
        (cut,) = generate(llm, sampled(asked, max_tokens=most))
        assert cut.outputs[0].finish_reason == "length" or most == len(output.outputs[0].token_ids)
        assert cut.outputs[0].token_ids == output.outputs[0].token_ids[:most]
        assert whole.startswith(cut.outputs[0].text.rstrip("\ufffd"))
    (stopped,) = generate(llm, sampled(asked, max_tokens=99, stop=[" red"]))
    assert stopped.outputs[0].text == "She said hello to the big," and stopped.outputs[0].stop_reason == " red"
    token = output.outputs[0].token_ids[5]
    (stopped,) = generate(llm, sampled(asked, max_tokens=99, stop_token_ids=[token]))
    assert stopped.outputs[0].stop_reason == token
    assert stopped.outputs[0].token_ids == output.outputs[0].token_ids[: output.outputs[0].token_ids.index(token) + 1]
    assert len(ids) > 5


def test_an_end_is_held_back_only_where_the_grammar_allows_anything_else(llm: LLM) -> None:
    (output,) = generate(llm, sampled({"regex": "[a-z]{1,30}"}, min_tokens=9))
    assert len(output.outputs[0].token_ids) >= 9 and re.fullmatch("[a-z]{1,30}", output.outputs[0].text)
    (output,) = generate(llm, sampled({"choice": ["no"]}, min_tokens=20))
    assert output.outputs[0].text == "no" and output.outputs[0].finish_reason == "stop"
    (output,) = generate(llm, sampled({"regex": "(ab)*"}, ignore_eos=True, max_tokens=20))
    assert output.outputs[0].finish_reason == "length" and len(output.outputs[0].token_ids) == 20


def test_a_grammar_that_comes_to_its_limits_ends_its_request_alone(llm: LLM) -> None:
    fine = [sampled(), sampled({"regex": DATE}), sampled({"regex": "[a-z ]{30,50}"}, n=2)]
    expected = told([output for own in fine for output in generate(llm, own)])
    pool = llm.engine.scheduler.state.pool
    for _ in range(2):
        *others, failed = generate(llm, *fine, sampled({"grammar": TOO_MUCH}, n=2))
        assert told(others) == expected
        assert [one.finish_reason for one in failed.outputs] == ["error"] * 2
        for one in failed.outputs:
            assert "cannot go on" in str(one.stop_reason) and str(one.stop_reason).isprintable()
        assert llm.engine.scheduler.state.pool.num_available == pool.num_blocks and not llm.engine.outputs.sequences


class Faulty(Constraint):
    """Constraint that fails at its third token."""

    def __init__(self, of: Constraint, where: str) -> None:
        self.__dict__.update(of.__dict__)
        self._where, self._num_consumed = where, 0

    def consume(self, token: int) -> None:
        self._num_consumed += 1
        if self._num_consumed == 3 and self._where == "consume":
            raise RuntimeError("a fault")
        if self._num_consumed == 3 and self._where == "fail":
            self.fail("a fault")
        super().consume(token)

    def forced(self) -> list[int]:
        if self._num_consumed == 3 and self._where == "forced":
            raise RuntimeError("a fault")
        return super().forced()


class FaultyGrammars(Grammars):
    """Grammars that fail in forced tokens for a regex that begins with "(?:a fault in forced)?"."""

    def compile(self, asked: StructuredOutputsParams) -> Grammar:
        grammar = super().compile(asked)
        found = re.match(r"\(\?:a fault in (\w+)\)\?", asked.regex or "")
        return grammar if found is None else _FaultyGrammar(grammar, found[1])


class _FaultyGrammar(Grammar):
    def __init__(self, of: Grammar, where: str) -> None:
        self._of, self._where = of, where

    def begin(self) -> Constraint:
        return Faulty(self._of.begin(), self._where)


def test_a_constraint_that_goes_wrong_ends_its_request_alone(llm: LLM) -> None:
    config, metrics = config_of(STORIES, SLOTS), Metrics()
    parts = load_parts(config, False, metrics)
    model = parts.model
    grammars = FaultyGrammars(model.tokenizer, model.vocab_size, model.eos_ids)
    engine = LLMEngine(config, metrics=metrics, parts=replace(parts, language=Language(model=model, grammars=grammars)))
    fine = [sampled({"regex": "[a-z]{20,40}"}, seed=seed) for seed in range(3)]
    expected = told([output for own in fine for output in generate(llm, own)])
    try:
        for where in ("fail", "consume", "forced"):
            bad = sampled({"regex": rf"(?:a fault in {where})?[a-z]{{20,40}}"})
            for number, own in enumerate([fine[0], bad, *fine[1:]]):  # its row is between others
                engine.add_request(str(number), PROMPT, own)
            ended: dict[str, RequestOutput] = {}
            while engine.has_unfinished_requests():
                ended |= {output.request_id: output for output in engine.step() if output.finished}
            assert ended["1"].outputs[0].finish_reason == "error" and len(ended["1"].outputs[0].token_ids) <= 4
            assert told([ended[name] for name in "023"]) == expected, where
            assert engine.scheduler.state.pool.num_available == engine.scheduler.state.pool.num_blocks
    finally:
        engine.close()


@pytest.mark.parametrize("half", ["dispatch", "sample"])
def test_a_half_of_a_step_that_fails_costs_no_token(llm: LLM, half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, calls = llm.engine, 0
    own = [sampled({"regex": DATE}, n=2), sampled(), sampled({"regex": "[a-z ]{30,50}"}), sampled({"json": FLAT})]
    expected = told([output for each in own for output in generate(llm, each)])
    real = getattr(engine.runner, half)

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (1, 4, 9, 10, 23):
            lose_state(engine.runner)
            raise RuntimeError("the device said no")
        return real(*arguments)

    monkeypatch.setattr(engine.runner, half, failing)
    before = engine.metrics.recoveries
    assert told(generate(llm, *own)) == expected
    assert engine.metrics.recoveries == before + 5


REFUSED: list[dict[str, Any]] = [
    {"json": {"type": "object", "properties": {"a": {"$ref": "https://example.org/schema"}}}},
    {"json": {"x-guidance": {}}},
    {"json": {"type": "no such type"}},
    {"json": False},
    {"regex": "(a"},
    {"regex": r"(a)\1"},
    {"regex": "(?=a)b"},
    {"grammar": "start: unknown_rule"},
    {"grammar": 'root ::= "unfinished'},
    {"choice": ["a" * 9000]},
]


@pytest.mark.parametrize("asked", REFUSED, ids=lambda asked: str(asked)[:40])
def test_what_is_refused_leaves_the_engine_as_it_was(llm: LLM, asked: dict[str, Any]) -> None:
    engine, plain = llm.engine, SamplingParams(max_tokens=8)  # the engine draws its seed
    engine.step()
    state, random = engine.scheduler.state, random_state_of(engine)
    with pytest.raises(UserError) as caught:
        engine.add_request("1", PROMPT, sampled(asked))
    assert caught.value.parameter == "structured_outputs" and str(caught.value).isprintable()
    assert engine.scheduler.state is state and random_state_of(engine) == random
    assert not engine.has_unfinished_requests() and not engine.outputs.sequences
    engine.add_request("1", PROMPT, plain)  # its id is free
    assert engine.abort_request("1") is not None


def slow_schema(number: int) -> dict[str, Any]:
    """Make a schema that takes long to compile and differs from all others."""
    names = [f"p{number}_{i}" for i in range(1500)]
    return {"properties": {name: {"maxLength": 5 + i} for i, name in enumerate(names)}, "required": names}


async def _worst_lag(until: asyncio.Future[Any] | asyncio.Task[Any]) -> float:
    worst, last = 0.0, time.perf_counter()
    while not until.done():
        await asyncio.sleep(0.001)
        worst, last = max(worst, time.perf_counter() - last), time.perf_counter()
    return worst


async def _last(engine: AsyncLLM, params: SamplingParams) -> RequestOutput:
    return [output async for output in engine.generate(PROMPT, params)][-1]


def test_a_grammar_is_compiled_beside_the_event_loop_and_what_is_cancelled_meanwhile_leaves_nothing() -> None:
    async def check() -> None:
        async with AsyncLLM(STORIES, **SLOTS) as engine:
            await _last(engine, sampled({"regex": "a"}))  # reads the vocabulary
            worst = []
            for number in range(3):
                params = sampled({"json": slow_schema(number)}, max_tokens=2)
                began = time.perf_counter()
                task = asyncio.create_task(_last(engine, params))
                worst.append(await _worst_lag(task))
                assert (await task).finished
                took = time.perf_counter() - began
            assert took > 0.05, "that was not slow"
            assert min(worst) < 0.05, worst
            slow = [sampled({"json": slow_schema(10 + number)}, max_tokens=2) for number in range(4)]
            tasks = [asyncio.create_task(_last(engine, params)) for params in slow]
            await asyncio.sleep(0.03)
            assert num_preparing(engine) == 4
            with engine.preparing(3):
                assert num_preparing(engine) == 7
            assert num_preparing(engine) == 4
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            assert num_preparing(engine) == 0 and engine.num_live == 0
            assert engine.get_load().running == 0
            assert (await _last(engine, sampled({"choice": ["yes"]}))).outputs[0].text == "yes"

    asyncio.run(asyncio.wait_for(check(), 120))
