"""AsyncLLM with many readers of one engine: no lost outputs, no leaks, and no reader waits for a dead engine."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing, suppress
from typing import Any

import pytest

from jaxllm import AsyncLLM, EngineError, SamplingParams, UserError
from jaxllm.engine.accepted import Accepted
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.engine.sequence import Sequence, SequenceGroup
from jaxllm.errors import (
    DeadlineError,
    DrainingError,
    EngineDeadError,
    OutOfRangeError,
    OverloadedError,
    RequestFailedError,
    RequestIdInUseError,
    UnavailableError,
)
from jaxllm.metrics import StepReport
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import RequestOutputKind
from jaxllm.scheduler.state import AllBlocksCleared, BlockRemoved, BlockStored
from tests.support.sizes import SLOTS

DELTA, CUMULATIVE, FINAL = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY
SETTINGS = SLOTS | {"enable_kv_cache_events": True}
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    loop = asyncio.new_event_loop()
    yield lambda check: loop.run_until_complete(asyncio.wait_for(check, 240.0))
    loop.close()


@pytest.fixture(scope="module")
def engine(run: Run) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(**SETTINGS)
    run(engine.start())
    yield engine
    run(engine.close())


def params(kind: RequestOutputKind = DELTA, **own: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.8, "seed": 1, "max_tokens": 24, "output_kind": kind, **own})


async def read(engine: AsyncLLM, prompt: Any, own: SamplingParams, **more: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, own, **more)]


def joined(outputs: list[RequestOutput]) -> dict[int, tuple[str, list[int], str | None]]:
    """Concatenate the deltas of each sample."""
    whole: dict[int, tuple[str, list[int], str | None]] = {}
    for output in outputs:
        for part in output.outputs:
            text, ids, reason = whole.get(part.index, ("", [], None))
            assert reason is None, "nothing comes after the end"
            whole[part.index] = (text + part.text, ids + list(part.token_ids), part.finish_reason)
    return whole


async def is_empty(engine: AsyncLLM, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while (load := engine.get_load()).kv_blocks_used or load.running or load.waiting:
        assert time.monotonic() < end, load
        await asyncio.sleep(0.01)
    assert not engine.num_live


class Steps:
    """Observer that adds up the numbers of the steps' reports."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def step(self, report: StepReport) -> None:
        self.num_tokens += report.num_tokens

    def tokens(self, seconds: float, count: int, is_first: bool) -> None:
        pass

    def finished(self, output: RequestOutput, params: SamplingParams) -> None:
        pass


@pytest.mark.ci
@pytest.mark.parametrize("num_prompt", [10, 150])  # in one chunk, in several
async def test_the_tokens_of_steps_are_those_of_prompts_and_outputs(engine: AsyncLLM, num_prompt: int) -> None:
    steps = Steps()
    engine.add_observer(steps)
    await read(engine, [5 + num_prompt % 7] * num_prompt, params(max_tokens=10, ignore_eos=True))
    await is_empty(engine)
    assert steps.num_tokens == num_prompt + 10


async def test_all_kinds_of_output_tell_the_same(engine: AsyncLLM) -> None:
    rng = random.Random(0)
    for number in range(12):
        own = {
            "n": rng.choice([1, 1, 3]),
            "stop": rng.choice([(), ("e",), (" the", "an")]),
            "logprobs": rng.choice([None, 2]),
            "stream_interval": rng.choice([None, 1, 5]),
            "include_stop_str_in_output": rng.random() < 0.5,
            "seed": number,
        }
        deltas, cumulative, (final,) = await asyncio.gather(
            *(read(engine, f"What is {number} + 9?", params(kind, **own)) for kind in (DELTA, CUMULATIVE, FINAL))
        )
        told = {part.index: (part.text, list(part.token_ids), part.finish_reason) for part in final.outputs}
        assert joined(deltas) == told
        last = cumulative[-1]
        assert {part.index: (part.text, list(part.token_ids), part.finish_reason) for part in last.outputs} == told
        assert [part.seed for part in final.outputs] == [number + index for index in range(own["n"])]
        if own["logprobs"] is not None:
            for part in final.outputs:
                parts = [entry for output in deltas for one in output.outputs if one.index == part.index
                         for entry in one.logprobs or ()]  # fmt: skip
                assert [list(entry) for entry in parts] == [list(entry) for entry in part.logprobs or ()]


async def test_a_slow_reader_finds_one_merged_output(engine: AsyncLLM) -> None:
    own = params(max_tokens=64, ignore_eos=True, stream_interval=1)
    outputs = []
    async for output in engine.generate("Once", own):
        outputs.append(output)
        await asyncio.sleep(0.2)
    assert len(outputs) < 20
    (whole,) = joined(outputs).values()
    (final,) = await read(engine, "Once", params(FINAL, max_tokens=64, ignore_eos=True))
    assert whole == (final.outputs[0].text, list(final.outputs[0].token_ids), "length")


async def test_the_stop_string_is_shown_where_asked_for(engine: AsyncLLM) -> None:
    own = {"temperature": 0.0, "stop": ("e",), "max_tokens": 40, "ignore_eos": True}
    (without,) = await read(engine, "Once upon a", params(FINAL, **own))
    (shown,) = await read(engine, "Once upon a", params(FINAL, **own, include_stop_str_in_output=True))
    assert without.outputs[0].stop_reason == "e"
    assert shown.outputs[0].text == without.outputs[0].text + "e"


async def test_without_detokenizing_there_is_no_text_and_the_same_tokens(engine: AsyncLLM) -> None:
    (silent,) = await read(engine, "What is 2 + 2?", params(FINAL, detokenize=False))
    (spoken,) = await read(engine, "What is 2 + 2?", params(FINAL))
    assert silent.outputs[0].text == ""
    assert list(silent.outputs[0].token_ids) == list(spoken.outputs[0].token_ids)


async def test_a_prompt_is_truncated_from_its_beginning(engine: AsyncLLM) -> None:
    (cut,) = await read(engine, [5, 6, 7, 8], params(FINAL, truncate_prompt_tokens=2))
    assert list(cut.prompt_token_ids) == [7, 8]
    long = [9] * (2 * engine.model.max_model_len)
    (cut,) = await read(engine, long, params(FINAL, truncate_prompt_tokens=-1, max_tokens=3, ignore_eos=True))
    assert len(cut.prompt_token_ids) == engine.model.max_model_len - 3
    assert cut.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
async def test_a_reader_that_goes_frees_its_blocks_in_any_phase(engine: AsyncLLM, phase: str) -> None:
    async def one(number: int) -> None:
        prompt = [7 + number % 50] * (200 if phase == "prefill" else 20)
        own = params(max_tokens=200, ignore_eos=True, n=2 if number % 3 == 0 else 1)
        with suppress(TimeoutError, OverloadedError):  # of the queue, not yet empty
            async with aclosing(engine.generate(prompt, own)) as outputs:
                if phase == "decode":
                    await anext(outputs)
                    return
                async with asyncio.timeout(0.001 + number * 0.002):
                    await anext(outputs)

    for _ in range(3):
        await asyncio.gather(*(one(number) for number in range(24 if phase == "queued" else 8)))
    await is_empty(engine)


async def test_an_aborted_request_ends_with_what_it_has(engine: AsyncLLM) -> None:
    outputs = engine.generate("Once", params(CUMULATIVE, max_tokens=200, ignore_eos=True, n=2), "mine")
    first = await anext(outputs)
    await engine.abort(["mine", "unknown"])
    rest = [output async for output in outputs]
    assert [part.finish_reason for part in rest[-1].outputs] == ["abort", "abort"]
    assert len(rest[-1].outputs[0].token_ids) >= len(first.outputs[0].token_ids)
    await is_empty(engine)


async def test_a_time_limit_ends_with_what_there_is_and_a_timeout_fails(engine: AsyncLLM) -> None:
    own = params(FINAL, max_tokens=400, ignore_eos=True)
    (partial,) = await read(engine, "Once", own, time_limit=0.15)
    assert partial.outputs[0].finish_reason == "time_limit"
    assert 0 < len(partial.outputs[0].token_ids) < 400
    began = time.monotonic()
    with pytest.raises(DeadlineError):
        await read(engine, "Once", own, timeout=0.1)
    assert time.monotonic() - began < 0.5
    await is_empty(engine)


async def test_an_id_is_unique_among_the_living(engine: AsyncLLM) -> None:
    outputs = engine.generate("Once", params(max_tokens=100, ignore_eos=True), "same")
    await anext(outputs)
    with pytest.raises(RequestIdInUseError):
        await read(engine, "Once", params(), request_id="same")
    await outputs.aclose()
    assert await read(engine, "Once", params(), request_id="same")


async def test_an_id_is_one_requests_of_each_owner_and_to_abort_it_ends_all(engine: AsyncLLM) -> None:
    long = params(max_tokens=200, ignore_eos=True)
    owners = ("", "a", "b")
    requests = [asyncio.ensure_future(read(engine, "Once", long, request_id="same", owner=own)) for own in owners]
    while engine.num_live < len(requests):
        await asyncio.sleep(0.001)
    with pytest.raises(RequestIdInUseError):
        await read(engine, "Once", params(), request_id="same", owner="b")
    await engine.abort(["other", "same"])
    for outputs in await asyncio.gather(*requests):
        assert {output.request_id for output in outputs} == {"same"}
        assert outputs[-1].outputs[0].finish_reason == "abort"
    await is_empty(engine)


async def test_bad_requests_are_refused_before_the_engine_sees_them(engine: AsyncLLM) -> None:
    for prompt, own in [("", params()), ([], params()), ([10**6], params()), ("x", params(stop_token_ids=[10**6]))]:
        with pytest.raises(UserError):
            await read(engine, prompt, own)
    with pytest.raises(UserError, match="scheduling_policy"):
        await read(engine, "x", params(), priority=1)
    assert not engine.num_live


async def test_the_queue_is_bounded_in_requests_and_in_tokens(engine: AsyncLLM) -> None:
    async def one(prompt: list[int]) -> bool:
        try:
            await read(engine, prompt, params(FINAL, max_tokens=4))
        except OverloadedError as error:
            assert error.retry_after > 0
            return False
        return True

    engine.max_queued_requests = 32
    try:
        taken = await asyncio.gather(*(one([number % 99 + 1] * 8) for number in range(300)))
    finally:
        engine.max_queued_requests = None
    assert 8 + 32 <= sum(taken) < 100  # eight slots
    engine.max_queued_tokens = 1000
    try:
        taken = await asyncio.gather(*(one([number + 1] * 200) for number in range(30)))
    finally:
        engine.max_queued_tokens = None
    assert 5 <= sum(taken) < 25
    await is_empty(engine)


async def test_pausing_keeps_or_ends_what_runs(engine: AsyncLLM) -> None:
    own = params(max_tokens=60, ignore_eos=True)
    (alone,) = joined(await read(engine, "Once", own)).values()
    task = asyncio.ensure_future(read(engine, "Once", own))
    await asyncio.sleep(0.05)
    await engine.pause("keep")
    await asyncio.sleep(0.1)
    steps = engine.metrics.steps
    await asyncio.sleep(0.1)
    assert engine.metrics.steps == steps and engine.is_paused and not task.done()
    with pytest.raises(UnavailableError):
        await read(engine, "Once", own)
    await engine.resume()
    assert joined(await task) == {0: alone}
    task = asyncio.ensure_future(read(engine, "Once", own))
    await asyncio.sleep(0.05)
    await engine.pause("abort")
    assert joined(await task)[0][2] == "abort"
    await engine.resume()
    task = asyncio.ensure_future(read(engine, "Once", own))
    await asyncio.sleep(0.02)
    await engine.pause("wait")
    assert joined(task.result()) == {0: alone}
    await engine.resume()


async def test_the_prefix_cache_tells_what_enters_and_leaves_it(engine: AsyncLLM) -> None:
    prompt = list(range(1, 50))
    await read(engine, prompt, params(FINAL, max_tokens=2))
    await engine.reset_prefix_cache()
    seen: list[Any] = []
    hashes: set[bytes] = set()
    async with aclosing(engine.kv_events(0)) as batches:
        async for batch in batches:
            assert batch.sequence == (seen[-1].sequence + 1 if seen else 0) and batch.block_size == 16
            seen.append(batch)
            for event in batch.events:
                match event:
                    case BlockStored(digest, parent, tokens):
                        assert len(tokens) == 16 and (parent is None or parent in hashes)
                        hashes.add(digest)
                    case BlockRemoved(digest):
                        hashes.remove(digest)
                    case AllBlocksCleared():
                        hashes.clear()
            if batch.events[-1] == AllBlocksCleared():
                stored = [event.tokens for one in seen for event in one.events if isinstance(event, BlockStored)]
                if tuple(prompt[:16]) in stored:
                    break
    assert not hashes
    with pytest.raises(OutOfRangeError):
        await anext(engine.kv_events(10**9))


class FakeEngine(LLMEngine):
    """Engine that behaves normally until a chosen step, in which it fails, hangs or waits."""

    accident: Callable[[], None] | None = None

    def step(self) -> list[RequestOutput]:
        if self.accident is not None:
            self.accident()
        return super().step()


@pytest.fixture
def fragile(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncLLM]:
    monkeypatch.setattr("jaxllm.engine.engine_thread.engine_type", lambda config: FakeEngine)
    engine = AsyncLLM(**SETTINGS, hang_timeout=0.2)
    run(engine.start())
    yield engine
    monkeypatch.setattr(engine.engine, "accident", None)
    run(engine.close())


@pytest.mark.ci
async def test_death_is_told_to_everybody_within_a_second(
    fragile: AsyncLLM, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die() -> None:
        raise EngineError("the device is gone")

    tasks = [asyncio.ensure_future(read(fragile, "Once", params(max_tokens=300, ignore_eos=True))) for _ in range(20)]
    await asyncio.sleep(0.1)
    began = time.monotonic()
    monkeypatch.setattr(fragile.engine, "accident", die)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert time.monotonic() - began < 1.0
    assert all(isinstance(result, EngineDeadError) for result in results)
    assert str(await fragile.wait_dead()) == "the device is gone"
    assert fragile.state == "dead"
    with pytest.raises(EngineDeadError):
        await read(fragile, "Once", params())
    with pytest.raises(EngineDeadError):
        await fragile.check_health()
    with pytest.raises(EngineDeadError):
        await fragile.reset_prefix_cache()


async def test_a_step_that_hangs_shows_and_passes(fragile: AsyncLLM, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang() -> None:
        monkeypatch.setattr(fragile.engine, "accident", None)
        time.sleep(0.6)

    monkeypatch.setattr(fragile.engine, "accident", hang)
    task = asyncio.ensure_future(read(fragile, "Once", params()))
    await asyncio.sleep(0.4)
    assert fragile.state == "hung"
    with pytest.raises(UnavailableError):
        await fragile.check_health()
    assert joined(await task)[0][2] is not None
    assert fragile.state == "serving"


@pytest.mark.parametrize("method", ["add_logprobs", "advance", "read", "flush"])
async def test_a_request_that_fails_fails_alone(
    fragile: AsyncLLM, run: Run, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    real = getattr(Sequence, method)

    def failing(sequence: Sequence, *arguments: Any) -> Any:
        if sequence.params.seed == 99 and len(sequence.tokens) > 30:
            raise RuntimeError("secret at 0xdeadbeef")
        return real(sequence, *arguments)

    own = params(max_tokens=40, ignore_eos=True, logprobs=1)
    (alone,) = joined(await read(fragile, "Once", own)).values()
    monkeypatch.setattr(Sequence, method, failing)
    good, bad = await asyncio.gather(
        read(fragile, "Once", own),
        read(fragile, "Once", dataclasses.replace(own, seed=99)),
        return_exceptions=True,
    )
    assert isinstance(bad, RequestFailedError) and "secret" not in str(bad)
    assert not isinstance(good, BaseException) and joined(good) == {0: alone}
    await is_empty(fragile)


@pytest.mark.ci
async def test_a_request_that_cannot_be_taken_in_fails_alone(
    fragile: AsyncLLM, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fragile.engine.inputs.pack

    def pack(accepted: Accepted, group: SequenceGroup) -> None:
        if accepted.params.seed == 99:
            raise RuntimeError("secret")
        real(accepted, group)

    monkeypatch.setattr(fragile.engine.inputs, "pack", pack)
    own = [params(seed=seed) for seed in (1, 99, 2)]
    results = await asyncio.gather(*(read(fragile, "Once", one) for one in own), return_exceptions=True)
    assert isinstance(results[1], RequestFailedError)
    assert all(not isinstance(results[number], BaseException) for number in (0, 2))
    await is_empty(fragile)


@pytest.mark.ci
async def test_one_of_several_samples_that_fails_fails_the_request(
    fragile: AsyncLLM, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Sequence.advance

    def advance(sequence: Sequence, *arguments: Any) -> Any:
        if sequence.index == 1 and sequence.num_tokens > 5:
            raise RuntimeError("secret")
        return real(sequence, *arguments)

    monkeypatch.setattr(Sequence, "advance", advance)
    with pytest.raises(RequestFailedError):
        await read(fragile, "Once", params(n=3, max_tokens=40, ignore_eos=True))
    await is_empty(fragile)


@pytest.mark.ci
async def test_resuming_while_a_pause_waits_takes_it_back(fragile: AsyncLLM, run: Run) -> None:
    running = asyncio.ensure_future(read(fragile, "Once", params(max_tokens=100, ignore_eos=True)))
    await asyncio.sleep(0.05)
    pausing = asyncio.ensure_future(fragile.pause("wait"))
    await asyncio.sleep(0.02)
    await fragile.resume()
    await asyncio.gather(running, pausing)
    assert joined(await read(fragile, "Once", params()))[0][2] is not None


@pytest.mark.ci
def test_a_pause_that_was_resumed_does_not_take_another_for_its_own(
    fragile: AsyncLLM, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed pause does not mistake another pause for itself; the simulation finds this in some 150,000 steps."""
    resets: list[bool] = []

    async def reset() -> bool:
        resets.append(True)
        return True

    async def check() -> None:
        stream = fragile.generate("Once", params(max_tokens=400, ignore_eos=True, stream_interval=1))
        await anext(stream)
        pausing = asyncio.ensure_future(fragile.pause("wait"))
        await asyncio.sleep(0.05)
        await fragile.resume()
        await fragile.pause("keep")
        await stream.aclose()
        await asyncio.wait_for(pausing, 10.0)
        assert not resets, "a caller that had resumed would find the cache gone"
        await fragile.resume()
        assert joined(await read(fragile, "Once", params()))

    monkeypatch.setattr(fragile, "reset_prefix_cache", reset)
    run(check())


@pytest.mark.ci
async def test_a_pause_does_not_wait_for_readers(fragile: AsyncLLM, run: Run) -> None:
    outputs = fragile.generate("Once", params(max_tokens=300, ignore_eos=True))
    await anext(outputs)
    await asyncio.wait_for(fragile.pause("abort"), 5.0)
    rest = [output async for output in outputs]
    assert rest[-1].outputs[0].finish_reason == "abort"
    await fragile.resume()


@pytest.mark.ci
async def test_closing_is_told_to_whoever_waits(run: Run) -> None:
    engine = AsyncLLM(**SETTINGS)
    await engine.start()
    waiting = [
        asyncio.ensure_future(anext(engine.kv_events(0))),
        asyncio.ensure_future(read(engine, "Once", params(max_tokens=400, ignore_eos=True))),
    ]
    await asyncio.sleep(0.05)
    assert await engine.close()
    results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5.0)
    assert isinstance(results[1], EngineDeadError)
    assert isinstance(await engine.wait_dead(), EngineDeadError)
    with pytest.raises(EngineDeadError):
        await engine.reset_prefix_cache()


async def test_a_long_text_is_refused_without_being_tokenized(engine: AsyncLLM) -> None:
    began = time.monotonic()
    with pytest.raises(UserError, match="maximum context length"):
        await read(engine, "word " * 2_000_000, params())
    assert time.monotonic() - began < 0.5


async def test_draining_lets_requests_end_and_fails_those_that_are_late(fragile: AsyncLLM, run: Run) -> None:
    short = [asyncio.ensure_future(read(fragile, "Once", params())) for _ in range(12)]
    await asyncio.sleep(0.02)
    assert await fragile.drain(20.0)
    assert all(joined(task.result())[0][2] is not None for task in short)
    with pytest.raises(DrainingError):
        await read(fragile, "Once", params())
    assert fragile.state == "draining"


async def test_a_drain_without_time_tells_every_stream(fragile: AsyncLLM, run: Run) -> None:
    long = [asyncio.ensure_future(read(fragile, "Once", params(max_tokens=400, ignore_eos=True))) for _ in range(12)]
    await asyncio.sleep(0.1)
    assert not await fragile.drain(0.05)
    results = await asyncio.gather(*long, return_exceptions=True)
    assert all(isinstance(result, DrainingError) for result in results)


async def test_nobody_waits_for_an_engine_that_was_never_started(run: Run) -> None:
    engine = AsyncLLM(**SETTINGS)
    with pytest.raises(UnavailableError, match="not started"):
        await engine.wait_dead()
    for use in (lambda: read(engine, "Once", params()), engine.check_health, engine.reset_prefix_cache):
        with pytest.raises(UnavailableError, match=r"not started: use `async with AsyncLLM\(...\)` or"):
            await use()
    with pytest.raises(UnavailableError, match="not started"):
        _ = engine.model.tokenizer
    assert await engine.close()


async def test_a_model_that_cannot_be_loaded_is_told_to_whoever_starts(run: Run) -> None:
    engine = AsyncLLM("/nowhere/at/all")
    with pytest.raises(UserError):
        await engine.start()
    assert engine.state == "dead"
    await engine.close()
