"""A trained model writes the same story under every setting: caching, sizes, preemption × shards × overlap (slow)."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm import LLM, SamplingParams
from tests.support import paths
from tests.support.inspection import set_depth
from tests.support.sizes import FEW_BLOCKS, SLOTS

STORIES = str(paths.STORIES)
STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day,"
PROMPTS = ["Once upon a time", "Tom had a dog", "Lily and Ben went to the", "One day, a big bear"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=136)
SETTINGS: list[tuple[dict[str, Any], int]] = [
    ({"enable_prefix_caching": False}, 2),
    ({"block_size": 1}, 2),
    ({"block_size": 2}, 2),
    ({"block_size": 64}, 2),
    ({"max_num_batched_tokens": 8}, 2),
    ({"max_num_batched_tokens": 32}, 2),
    ({"max_num_batched_tokens": 256, "max_num_seqs": 32}, 8),
    (FEW_BLOCKS, 2),
]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(STORIES, **SLOTS) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert (PROMPTS[0] + outputs[0].outputs[0].text).startswith(STORY)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize(("settings", "copies"), SETTINGS, ids=str)
def test_the_same_tokens(settings: dict[str, Any], copies: int, shards: int, expected: list[list[int]]) -> None:
    with LLM(STORIES, tensor_parallel_size=shards, **SLOTS | settings) as llm:
        engine = llm.engine
        for depth in (2, 1):  # with overlap and without, in the same programs
            set_depth(engine, depth)
            engine.reset_prefix_cache()
            preemptions = engine.metrics.preemptions
            for _ in range(2):  # the second run uses the prefix cache
                outputs = llm.generate(PROMPTS * copies, GREEDY, use_tqdm=False)
                assert [list(output.outputs[0].token_ids) for output in outputs] == expected * copies
            assert (engine.metrics.preemptions > preemptions) == ("num_kv_blocks" in settings)
