"""Models with experts, sinks and latents return the same tokens in batches, preempted and on two devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from tests.support.paths import GOLDEN

STORIES = str(GOLDEN / "stories260K")
STEPS = 20


def _golden(case: str) -> tuple[list[int], list[int]]:
    with np.load(GOLDEN / case / "golden.npz") as stored:
        return stored["prompt"].tolist(), stored["tokens"].tolist()


def _generate(case: str, prompts: list[list[int]], **settings: Any) -> list[list[int]]:
    """Decode greedily; the tokenizer is another model's and only makes text."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "precompile": "covering", "block_size": 4}
    with LLM(str(GOLDEN / case), tokenizer=STORIES, **(sizes | settings)) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(requests, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.ci
@pytest.mark.parametrize(("case", "shards"), [pytest.param("gpt-oss", 1, marks=pytest.mark.slow), ("deepseek-v3", 2)])
def test_neighbours_padding_preemption_and_devices_do_not_change_tokens(case, shards):
    prompt, expected = _golden(case)
    # 35 blocks are 140 tokens: three requests of 60 do not fit, so that one is preempted.
    prompts = [prompt, prompt[:7], prompt, prompt[::-1], prompt]
    together = _generate(case, prompts, num_kv_blocks=35, max_model_len=100, tensor_parallel_size=shards)
    assert together[0] == together[2] == together[4] == expected[:STEPS]
