"""Nothing is compiled after the start, for any lengths and numbers of requests."""

from __future__ import annotations

import random
from typing import Any

import jax
import pytest

from jaxllm import LLM, SamplingParams
from tests.faults.served import ENGINE

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_p": 0.9, "logprobs": 3},
    {"presence_penalty": 0.5, "bad_words": ["dog"]},
    {"logit_bias": {40: 1.0}, "n": 2},
    {"prompt_logprobs": 1, "logprobs": 22},
]


@pytest.mark.parametrize("count", [250, pytest.param(2000, marks=pytest.mark.slow)])
def test_requests_of_all_lengths_compile_nothing(count: int) -> None:
    rng = random.Random(0)
    compiled: list[str] = []

    def listen(event: str, *_: Any, **__: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    with LLM(**ENGINE) as llm:
        longest = llm.engine.model.max_model_len - 1
        tokens = [rng.randrange(20, 900) for _ in range(longest)]
        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            number = 0
            while number < count:
                size = rng.randrange(1, 33)
                # Each length once, all suffixes of one text, so that the prefix cache does most of the work.
                lengths = [1 + (number + each) * 7 % longest for each in range(size)]
                params = [
                    SamplingParams(
                        max_tokens=min(rng.randrange(1, 4), longest + 1 - length), seed=1, **rng.choice(KINDS)
                    )
                    for length in lengths
                ]
                outputs = llm.generate([tokens[:length] for length in lengths], params, use_tqdm=False)
                assert all(part.finish_reason in ("stop", "length") for output in outputs for part in output.outputs)
                number += size
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
        assert llm.engine.metrics.compilations_after_ready == 0 and not compiled
