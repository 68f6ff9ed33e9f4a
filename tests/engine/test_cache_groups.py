"""Models with a second group of blocks for windowed layers: tokens depend neither on the group nor on the load."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.beam_search_params import BeamSearchParams
from jaxllm.setup import kv_cache
from tests.support.inspection import named_params_of, set_params
from tests.support.paths import GOLDEN, STORIES
from tests.support.sizes import SHORT_BLOCKS

FEW = {"num_kv_blocks": 30}  # of 4 tokens; a request of 72 tokens needs 18 blocks
FAMILIES = ["gemma3", *(pytest.param(name, marks=pytest.mark.ci) for name in ("gemma2", "gpt-oss", "cohere2"))]


def make(model: str, **settings: Any) -> LLM:
    return LLM(str(GOLDEN / model), tokenizer=str(STORIES), dtype="float32", **SHORT_BLOCKS | FEW | settings)


def golden(model: str) -> tuple[list[int], list[int]]:
    with np.load(GOLDEN / model / "golden.npz") as stored:
        return stored["prompt"].tolist(), stored["tokens"].tolist()


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [list(each.token_ids) for output in outputs for each in output.outputs]


@pytest.mark.parametrize("model", FAMILIES)
def test_tokens_are_those_of_transformers_with_chunks_preemption_and_cached_prefixes(model: str) -> None:
    prompt, expected = golden(model)
    greedy = SamplingParams(temperature=0.0, max_tokens=len(expected), ignore_eos=True)
    with make(model) as llm:
        limits, metrics = llm.engine.scheduler.limits, llm.engine.metrics
        assert limits.window == 10 and limits.num_window_blocks < limits.num_blocks
        assert generate(llm, [prompt], greedy) == [expected]
        cached = metrics.cached_tokens
        assert generate(llm, [prompt], greedy) == [expected]
        assert metrics.cached_tokens - cached == (len(prompt) - 1) // 4 * 4, "the whole prompt is found again"
        turn = [*prompt, *expected[:-1]]  # the conversation's next turn
        cached = metrics.cached_tokens
        assert generate(llm, [turn], SamplingParams(temperature=0.0, max_tokens=1)) == [expected[-1:]]
        assert metrics.cached_tokens - cached == (len(turn) - 1) // 4 * 4
        for _ in range(2):
            others = [[7, number, *prompt[2:]] for number in range(4)]
            found = generate(llm, [prompt, *others, prompt], greedy)
            assert found[0] == found[-1] == expected
        assert metrics.preemptions > 0, "they were not busy"
        state = llm.engine.scheduler.state
        assert state.window_pool is not None and state.window_pool.num_available == limits.num_window_blocks


def requests(vocabulary: int) -> tuple[list[list[int]], list[SamplingParams]]:
    random = np.random.default_rng(7)
    base = random.integers(3, vocabulary, 60).tolist()
    prompts = [[*base[: int(random.integers(1, 60))], number + 3] for number in range(24)]
    params = [
        SamplingParams(
            temperature=0.8 * (number % 2),
            seed=number,
            max_tokens=int(random.integers(1, 40)),
            n=1 + (number % 6 == 1),
            ignore_eos=True,
            prompt_logprobs=1 if number % 7 == 0 else None,
        )
        for number in range(24)
    ]
    return prompts, params


@pytest.mark.ci
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"tensor_parallel_size": 2},
        {"deterministic": True},
        {"kv_cache_dtype": "int8", "block_size": 16},
    ],
    ids=str,
)
def test_requests_get_what_they_get_where_all_layers_share_blocks(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = requests(128)
    found = []
    for _ in range(2):
        with make("gemma3", **settings) as llm:
            found.append([generate(llm, prompts, params) for _ in range(2)])  # the second run uses cached prefixes
            assert llm.engine.scheduler.limits.num_groups == 2 - len(found) + 1
        monkeypatch.setattr(kv_cache, "window_of", lambda *_: 0)
    assert found[0] == found[1]


@pytest.mark.ci
def test_beams_fork_both_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, _ = golden("gemma3")
    params = BeamSearchParams(beam_width=3, max_tokens=24, ignore_eos=True)
    found = []
    for _ in range(2):
        with make("gemma3", num_kv_blocks=90) as llm:
            outputs = llm.beam_search([{"prompt_token_ids": prompt[:length]} for length in (5, 17, 40)], params)
            found.append([sequence.tokens for output in outputs for sequence in output.sequences])
        monkeypatch.setattr(kv_cache, "window_of", lambda *_: 0)
    assert found[0] == found[1]


def test_what_failed_rows_left_behind_the_window_is_not_found() -> None:
    """A block that was freed before its request failed is not reused by the next request with that prompt."""
    prompt, expected = golden("gemma3")
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with make("gemma3") as llm:
        runner = llm.engine.runner
        tree = named_params_of(runner)
        top = tree.top | {"embed": tree.top["embed"].at[prompt[0]].set(np.nan)}
        set_params(runner, tree.replace(top=top))
        (failed,) = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
        assert failed.outputs[0].finish_reason == "error"
        set_params(runner, tree)
        assert generate(llm, [prompt], greedy) == [expected[:4]]
        assert generate(llm, [prompt], greedy) == [expected[:4]]
