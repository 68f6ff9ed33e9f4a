"""Drafts change the number of steps of an output, and nothing else.

The same requests, with random combinations of all sampling parameters, run in an engine that verifies drafts and in one
that does not: under preemption, with aborts, grammars and adapters, over shards, with steps overlapping or not.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, LoRARequest, SamplingParams
from jaxllm.embedded import HEADS, MODEL_DIR
from jaxllm.metrics import Metrics
from jaxllm.setup import draft_setup
from tests.engine import structured_requests, test_combinations, test_deterministic
from tests.engine.test_combinations import Answer, ban_above, check_equal, combination, scale
from tests.support.adapters import write_adapter
from tests.support.paths import GOLDEN, STORIES

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 4, "num_kv_blocks": 34}
VOCABULARIES = {MODEL_DIR: 1536, STORIES: 512}  # the other models have 128
ABORTED = 7  # every seventh request is aborted
LENGTH = 40  # tokens of an output


def make(model: Path, drafting: Mapping[str, Any] | None, **settings: Any) -> LLM:
    tokenizer = None if model in VOCABULARIES else str(STORIES)  # another model's, used to make text only
    fixed = {"max_logprobs": -1, "logits_processors": [scale, ban_above], "precompile": "covering"}
    return LLM(str(model), tokenizer=tokenizer, speculative_config=drafting, **SIZES | fixed | settings)


def prompt(number: int, vocabulary: int) -> list[int]:
    """Repeat a few random tokens, or part of a story, so that the lookup finds drafts."""
    random = np.random.default_rng([number, 2])
    if vocabulary == VOCABULARIES[STORIES]:
        return test_combinations.prompt(number) * 2
    return (random.integers(3, vocabulary, int(random.integers(1, 9))).tolist() * 4)[: int(random.integers(1, 25))]


def run(llm: LLM, numbers: Collection[int], vocabulary: int, adapters: Sequence[LoRARequest]) -> dict[int, Answer]:
    """Run requests together and collect the outputs of those that are not aborted."""
    engine, random = llm.engine, np.random.default_rng(len(numbers))
    params = {number: replace(combination(number, vocabulary), max_tokens=LENGTH) for number in numbers}
    answers = {number: Answer() for number in numbers}
    for number, own in params.items():
        adapter = adapters[number % len(adapters)] if adapters and number % 3 else None
        engine.add_request(str(number), {"prompt_token_ids": prompt(number, vocabulary)}, own, lora_request=adapter)
    aborted = [number for number in numbers if number % ABORTED == 0]
    left = list(aborted)
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers[int(output.request_id)].add(output, params[int(output.request_id)].output_kind)
        if left and random.random() < 0.1:
            engine.abort_request(str(left.pop(0)))
    return {number: answer for number, answer in answers.items() if number not in aborted}


def compare(
    model: Path,
    numbers: Collection[int],
    settings: Mapping[str, Any],
    *adapters: LoRARequest,
    drafting: Mapping[str, Any] = NGRAM,
) -> Metrics:
    """Run requests with and without drafts."""
    vocabulary, found = VOCABULARIES.get(model, 128), []
    for own in (None, drafting):
        with make(model, own, **settings) as llm:
            found.append(run(llm, numbers, vocabulary, adapters))
            metrics = llm.engine.metrics
            assert metrics.compilations_after_ready == 0
    plain, drafted = found
    assert plain.keys() == drafted.keys()
    for number, answer in drafted.items():
        check_equal(number, answer, plain[number])
    assert metrics.draft_tokens > len(numbers) and metrics.accepted_tokens[0] > len(numbers) // 4
    assert metrics.preemptions > 0, "they were not busy"
    return metrics


CASES = [
    pytest.param(STORIES, 30, {}, id="stories"),
    *(
        pytest.param(model, 24, settings, id=f"{model.name} {settings}", marks=mark)
        for model, settings, mark in (
            (MODEL_DIR, {"async_scheduling": False}, pytest.mark.slow),
            (GOLDEN / "qwen3", {"tensor_parallel_size": 2}, pytest.mark.slow),
            (GOLDEN / "gemma2", {"block_size": 1, "num_kv_blocks": 130}, pytest.mark.slow),
            (GOLDEN / "deepseek-v3", {"tensor_parallel_size": 2, "async_scheduling": False}, pytest.mark.slow),
        )
    ),
    pytest.param(STORIES, 2000, {}, id="many", marks=pytest.mark.slow),
]


@pytest.mark.ci
@pytest.mark.parametrize(("model", "count", "settings"), CASES)
def test_a_request_gets_with_drafts_what_it_gets_without(model: Path, count: int, settings: dict[str, Any]) -> None:
    compare(model, range(count), settings)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        (STORIES, {"max_num_batched_tokens": 16}),
        pytest.param(GOLDEN / "qwen3", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
        pytest.param(GOLDEN / "deepseek-v3", {"async_scheduling": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_request_gets_with_a_draft_model_what_it_gets_without(
    monkeypatch: pytest.MonkeyPatch, model: Path, settings: dict[str, Any]
) -> None:
    """The draft model is the target model, so outputs can differ only by filters and penalties, which drafts ignore."""
    monkeypatch.setattr(draft_setup, "with_cost", lambda drafting, described: drafting)  # otherwise drafts never pay
    drafting = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    compare(model, range(16), settings, drafting=drafting)


@pytest.mark.ci
def test_the_embedded_models_head_drafts_as_well_in_the_engine_as_it_was_scored() -> None:
    score = json.loads((HEADS["jaxllm-eagle"] / "score.json").read_text())
    drafting = {"method": "eagle3", "model": "jaxllm-eagle", "num_speculative_tokens": 4}
    settings = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "precompile": "covering"}
    params = SamplingParams(temperature=0.0, max_tokens=48)
    questions = [[{"role": "user", "content": f"What is {number} + {number + 7}?"}] for number in range(11, 31)]
    texts = []
    for own in (None, drafting):
        with LLM(str(MODEL_DIR), speculative_config=own, **settings) as llm:
            texts.append([output.outputs[0].token_ids for output in llm.chat(questions, params, use_tqdm=False)])
            metrics = llm.engine.metrics
    assert texts[0] == texts[1]
    due = score["sums"]["accepted by place"]
    num_rows = metrics.drafting_rows - len(questions)  # at each end one more row is in flight
    assert metrics.accepted_tokens[0] / num_rows > 0.95 * due[0], "it drafts by what it is told"


@pytest.mark.ci
def test_drafts_are_verified_with_the_adapters_of_their_rows(tmp_path: Path) -> None:
    base = GOLDEN / "llama"
    folders = [write_adapter(tmp_path / str(number), base, 8, seed=number) for number in (1, 2)]
    adapters = [LoRARequest(folder.name, int(folder.name), str(folder)) for folder in folders]
    compare(base, range(60), {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}, *adapters)


@pytest.mark.ci
def test_beside_grammars_a_request_gets_what_it_gets_without_drafts() -> None:
    numbers, found = range(60), []
    for drafting in (None, NGRAM):
        with make(STORIES, drafting) as llm:
            found.append(structured_requests.run(llm.engine, numbers, aborts=True))
            metrics = llm.engine.metrics
    for number in numbers:
        structured_requests.check_equal(number, found[1][number], found[0][number])
    assert metrics.draft_tokens > 0 and metrics.accepted_tokens[0] > 0 and metrics.forced_tokens > 0


@pytest.mark.ci
def test_in_deterministic_mode_drafts_change_no_bit() -> None:
    copies, found = dict.fromkeys(test_deterministic.PROBES, 4), []
    for drafting in (None, NGRAM):
        with test_deterministic.make(MODEL_DIR, num_kv_blocks=24, speculative_config=drafting) as llm:
            found.append(test_deterministic.Load(llm).run(copies))
            assert len(llm.engine.runner.programs) == 2 and llm.engine.metrics.preemptions > 0
            assert (llm.engine.metrics.draft_tokens > 0) == (drafting is not None)
    assert {name: len(bits) for name, bits in found[0].items()} == dict.fromkeys(copies, 1)
    assert found[0] == found[1]
