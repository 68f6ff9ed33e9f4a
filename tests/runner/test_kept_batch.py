"""On a GPU a step copies its batch into the state and returns results in the batch's array; tested here on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.runner.model_runner import Runner
from jaxllm.sampling.sampler import Variant
from jaxllm.structured_outputs_params import StructuredOutputsParams
from tests.support import paths
from tests.support.inspection import state_of
from tests.support.sizes import FEW_SLOTS

PROMPTS = ["Once upon a time", "Tom had a dog", "Lily and Ben went to the"]
SIZES = FEW_SLOTS | {"speculative_config": None}
DRAFTING = FEW_SLOTS | {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
REQUESTS = [
    SamplingParams(temperature=0.0, max_tokens=24),
    SamplingParams(temperature=0.8, top_k=20, logprobs=3, seed=5, max_tokens=12),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, logprobs=2, logprob_token_ids=[7, 9], max_tokens=12),
    SamplingParams(temperature=0.0, max_tokens=12, structured_outputs=StructuredOutputsParams(regex="[a-z ]+")),
]


def outputs_of(llm: LLM) -> list[Any]:
    return [
        (output.outputs[0].token_ids, output.outputs[0].logprobs)
        for params in REQUESTS
        for output in llm.generate(PROMPTS, params, use_tqdm=False)
    ]


@pytest.mark.parametrize(
    "sizes", [pytest.param(SIZES, marks=pytest.mark.ci), pytest.param(DRAFTING, marks=pytest.mark.slow)], ids=str
)
def test_results_returned_in_the_batch_are_the_same(sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    with LLM(str(paths.STORIES), **sizes) as llm:
        assert state_of(llm.engine.runner).batch is None
        expected = outputs_of(llm)
    monkeypatch.setattr(Runner, "_keeps_batch", True)
    with LLM(str(paths.STORIES), **sizes) as llm:
        programs = llm.engine.runner.programs
        assert outputs_of(llm) == expected, "in the forward halves of steps"
        tokens = 2, max(key.shape.tokens for key in programs.rest)
        wanted = [key for key in programs.rest if key.part == "step" and key.shape.tokens in tokens]
        programs.begin([key for key in wanted if key.variant in (Variant.GREEDY, Variant.FULL)], 2)
        programs.wait()
        assert outputs_of(llm) == expected
        llm.engine.runner.renew()
        llm.reset_prefix_cache()
        assert outputs_of(llm) == expected
