"""Ranks that divide the experts of a mixture return the tokens of one device (engine/ranks.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from jaxllm import LLM, AsyncLLM, SamplingParams, UserError, combinations
from jaxllm.config import EngineConfig
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.engine.ranks import RankedEngine
from jaxllm.setup.model_setup import prepare
from jaxllm_server.launch import new_server
from jaxllm_server.shared.options import ServerOptions
from tests.engine.test_parallel import SIZES, answers, check_equal, greedy, write_random, write_stories
from tests.support.paths import GOLDEN

DP2: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
FEW = 20  # blocks of a rank: its requests preempt each other
DP4, DP2_TP2 = DP2 | {"data_parallel_size": 4}, DP2 | {"tensor_parallel_size": 2}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mixtral", "qwen3-moe", "qwen3-moe, w4a16", "deepseek-v3", "gpt-oss"])
def test_ranks_change_no_token(case: str, tmp_path: Path) -> None:
    """Three prompts of different lengths, with the log-probabilities of their tokens."""
    folder = write_random(tmp_path, case)
    alone = greedy(folder, {})
    for division in (DP2, DP4, DP2_TP2):
        check_equal(greedy(folder, division), alone)


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stories(tmp_path_factory.mktemp("mixture") / "model", has_experts=True)


@pytest.mark.parametrize(
    ("division", "cache"),
    [
        pytest.param(DP2_TP2, "auto", marks=pytest.mark.ci),
        pytest.param(DP4, "int8", marks=pytest.mark.slow),
    ],
)
def test_requests_of_all_kinds_get_what_one_device_gives(division: dict[str, Any], cache: str, stories: Path) -> None:
    """All sampling fields, beams and a grammar, with prefix hits, preemptions and chunks."""
    sizes = {"kv_cache_dtype": cache, "speculative_config": None, "max_num_batched_tokens": 24}
    due, _ = answers(stories, sizes, has_adapters=False)
    found, counts = answers(stories, sizes | {"num_kv_blocks": FEW} | division, has_adapters=False)
    assert found.keys() == due.keys()
    for name, (tokens, values) in found.items():
        assert tokens == due[name][0], name
        np.testing.assert_allclose(values, due[name][1], rtol=0, atol=1e-4 if cache == "auto" else 2e-3, err_msg=name)
    assert counts["preempted"] > 0 and counts["hits"] > 0


@pytest.fixture(scope="module")
def engine(stories: Path) -> Iterator[RankedEngine]:
    with LLM(str(stories), **SIZES | DP2 | {"max_num_batched_tokens": 32}) as llm:
        yield cast("RankedEngine", llm.engine)


def prompt(number: int, length: int = 9) -> dict[str, Any]:
    return {"prompt_token_ids": np.random.default_rng(number).integers(3, 500, length).tolist()}


def run(engine: LLMEngine, numbers: Sequence[int], **params: Any) -> dict[int, list[int]]:
    for number in numbers:
        sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | params)
        engine.add_request(str(number), prompt(number), sampling)
    return finish(engine)


def finish(engine: LLMEngine) -> dict[int, list[int]]:
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[int(output.request_id)] = [*output.outputs[0].token_ids]
    return found


@pytest.mark.ci
def test_a_rank_may_be_idle_or_lose_its_requests(engine: RankedEngine) -> None:
    """A request gets equal tokens alone, with others, and after others were aborted."""
    together = run(engine, range(6))
    for number in (0, 3):
        assert run(engine, [number]) == {number: together[number]}
    assert {rank.load().running for rank in engine.ranks} == {0}

    for number in range(6):
        engine.add_request(str(number), prompt(number), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert [rank.load().waiting for rank in engine.ranks] == [3, 3]
    engine.step()
    ranks = [[*rank.unfinished] for rank in engine.ranks]
    aborted = engine.abort_requests([(name, "abort") for name in ranks[1]])
    assert [output.request_id for output in aborted] == ranks[1]
    assert finish(engine) == {int(name): together[int(name)] for name in ranks[0]}
    assert engine.load().running == engine.load().kv_blocks_used == 0


@pytest.mark.ci
@pytest.mark.parametrize("at", ["dispatch_all", "sample_all"])
def test_a_failed_step_is_computed_again(at: str, engine: RankedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    due, failures = run(engine, range(10, 14)), [False, False, True]
    whole = getattr(engine.runner, at)

    def failing(*given: Any) -> Any:
        if failures and failures.pop(0):
            raise RuntimeError("planted")
        return whole(*given)

    monkeypatch.setattr(engine.runner, at, failing)
    before = engine.metrics.recoveries
    assert run(engine, range(10, 14)) == due
    assert engine.metrics.recoveries == before + 1 and not failures


@pytest.mark.ci
def test_the_largest_request_of_all_ranks_ends_when_memory_is_exhausted(
    engine: RankedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    due, failures = run(engine, range(4)), [True] * 3
    whole = engine.runner.dispatch_all

    def failing(*given: Any) -> Any:
        if failures:
            failures.pop()
            raise MemoryError("planted")
        return whole(*given)

    monkeypatch.setattr(engine.runner, "dispatch_all", failing)
    for number in range(4):
        asked = prompt(number) if number != 1 else prompt(number, 27)
        engine.add_request(str(number), asked, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    assert "1" in engine.ranks[1].unfinished
    found = finish(engine)
    assert found.pop(1) == [] and found == {number: due[number] for number in (0, 2, 3)}


@pytest.mark.ci
def test_a_prompt_goes_where_its_blocks_are(engine: RankedEngine) -> None:
    engine.reset_prefix_cache()
    long = {"prompt_token_ids": [5] * 41}
    places, cached = [], []
    for number in range(4):
        engine.add_request(str(number), long, SamplingParams(max_tokens=2, n=1 + number % 2, ignore_eos=True))
        places.append([bool(rank.unfinished) for rank in engine.ranks])
        while engine.has_unfinished_requests():
            cached += [output.num_cached_tokens for output in engine.step() if output.finished]
    assert places == [[True, False]] * 4 and cached == [0, 40, 40, 40]


@pytest.mark.ci
async def test_streams_of_several_ranks_end_when_they_are_closed(stories: Path) -> None:
    async with AsyncLLM(str(stories), **SIZES | DP2 | {"max_num_batched_tokens": 32}) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)

        async def stream(number: int, most: int = 99) -> list[int]:
            tokens: list[int] = []
            async with aclosing(llm.generate(prompt(number), params)) as outputs:
                async for output in outputs:
                    tokens = [*output.outputs[0].token_ids]
                    if len(tokens) >= most:
                        break
            return tokens

        whole = await asyncio.gather(*map(stream, range(4)))
        again = await asyncio.gather(*(stream(number, 5 if number % 2 else 99) for number in range(4)))
        assert [len(tokens) for tokens in whole] == [20] * 4
        assert all(tokens == due[: len(tokens)] for tokens, due in zip(again, whole, strict=True))
        await llm.pause("keep")
        await llm.resume()
        assert await stream(0) == whole[0]
        assert (await asyncio.wait_for(llm.drain(10), 20)) and llm.get_load().running == 0


SETTINGS: dict[str, dict[str, Any]] = {
    "enable_lora": {"enable_lora": True},
    "speculative_config": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    "pipeline_parallel_size": {"pipeline_parallel_size": 2},
    "kv_offloading_size": {"kv_offloading_size": 0.1},
    "kv_transfer_config": {"kv_transfer_config": {"kv_role": "kv_producer"}},
    "enable_sleep_mode": {"enable_sleep_mode": True},
    "enable_kv_cache_events": {"enable_kv_cache_events": True},
    "deterministic": {"deterministic": True},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "record": {"record": "f"},
    "data_parallel_address": {"data_parallel_address": "h:1", "admin_api_key": ("k",)},
    "data_parallel_size_local": {"data_parallel_size_local": 1},
}


def test_settings_of_the_table_are_refused(tmp_path: Path) -> None:
    model = str(GOLDEN / "mixtral")
    asked = {one.asked for one in combinations.REFUSED if one.other == combinations.RANKS}
    assert asked == SETTINGS.keys() | OPTIONS.keys()
    for name, own in SETTINGS.items():
        with pytest.raises(UserError, match=f"^{name} is not supported with {combinations.RANKS}"):
            prepare(EngineConfig(model=model, **DP2 | own))
    for name, own in OPTIONS.items():
        with pytest.raises(UserError, match=f"^{name} is not supported with {combinations.RANKS}"):
            new_server(EngineConfig(model=model, **DP2), ServerOptions(**own))
    with pytest.raises(UserError, match="enable_expert_parallel is not supported with a model without experts"):
        prepare(EngineConfig(model=str(GOLDEN / "qwen3"), **DP2))
    with pytest.raises(UserError, match=f"^{combinations.RANKS} is not supported with {combinations.POOLS}"):
        prepare(EngineConfig(model=model, runner="pooling", **DP2))
    with pytest.raises(UserError, match="data_parallel_size 4 and tensor_parallel_size 2 take 8 devices"):
        prepare(EngineConfig(model=model, **DP4 | {"tensor_parallel_size": 2}))


def test_only_expert_parallelism_makes_ranks_of_replicas() -> None:
    fleets = (
        EngineConfig(model="m", data_parallel_size=2),
        EngineConfig(
            model="m", prefill_replicas=1, decode_replicas=1, kv_offloading_size=1.0, enable_expert_parallel=True
        ),
    )
    assert [(own.is_fleet, own.shares_experts) for own in fleets] == [(True, False)] * 2
    assert EngineConfig(model="m", **DP2).shares_experts and not EngineConfig(model="m", **DP2).is_fleet
    assert not EngineConfig(model="m", enable_expert_parallel=True).shares_experts
