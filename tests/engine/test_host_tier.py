"""Tests that engines with a host tier and few blocks generate the same tokens as with an ample pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxllm import LLMEngine, LoRARequest, SamplingParams, UserError
from jaxllm.config import EngineConfig
from jaxllm.replay.recording import FileRecorder
from jaxllm.replay.replay import Replay
from jaxllm.runner import host_tier
from jaxllm.setup.kv_cache import host_memory_kind
from jaxllm.structured_outputs_params import StructuredOutputsParams
from tests.support.adapters import write_adapter
from tests.support.paths import GOLDEN, STORIES
from tests.support.sizes import SHORT_BLOCKS

TIGHT = {"num_kv_blocks": 30, "kv_offloading_size": 0.05}  # blocks of 4 tokens; a request needs up to 20 blocks
NUM_REQUESTS = 24
MANY_REQUESTS = 500
CASES: dict[str, tuple[Path, dict[str, Any]]] = {
    "windows": (GOLDEN / "gemma3", {"preemption_mode": "swap"}),
    "shards": (GOLDEN / "gemma3", {"tensor_parallel_size": 2, "kv_cache_dtype": "int8"}),
    "drafts": (
        GOLDEN / "qwen3",
        {"speculative_config": {"method": "draft_model", "model": str(GOLDEN / "qwen3"), "num_speculative_tokens": 3}},
    ),
    "adapters": (GOLDEN / "llama", {"enable_lora": True, "max_lora_rank": 8, "preemption_mode": "swap"}),
    "grammars": (STORIES, {}),
    "latent": (GOLDEN / "deepseek-v3", {"enable_prefix_caching": False, "preemption_mode": "swap"}),
}


@contextmanager
def started(model: Path, recorder: FileRecorder | None = None, **settings: Any) -> Iterator[LLMEngine]:
    config = EngineConfig(model=str(model), tokenizer=str(STORIES), dtype="float32", **SHORT_BLOCKS | settings)
    with closing(LLMEngine(config, recorder=recorder)) as engine:
        yield engine


def generate(engine: LLMEngine, adapter: LoRARequest | None, count: int = NUM_REQUESTS) -> list[list[int]]:
    """Run requests with common prefixes twice; return their tokens, sorted by name.

    Some requests have the adapter, and some a grammar if the model's vocabulary is large enough.
    """
    constrained = {3} if engine.model.vocab_size >= 512 else set()
    random = np.random.default_rng(3)
    bases = random.integers(3, 120, (4, 32)).tolist()
    prompts = [[*bases[number % 4][: int(random.integers(4, 32))], 3 + number % 100] for number in range(count)]
    params = [
        SamplingParams(
            temperature=0.8 * (number % 2),
            seed=number,
            max_tokens=int(random.integers(10, 44)),
            ignore_eos=number % 5 not in constrained,
            n=1 + (number % 6 == 1),
            structured_outputs=StructuredOutputsParams(regex="[a-z ]{1,40}") if number % 5 in constrained else None,
        )
        for number in range(count)
    ]
    found: dict[str, list[list[int]]] = {}
    for turn in range(2):
        for number, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            chosen = adapter if number % 3 else None
            engine.add_request(f"{turn}-{number}", {"prompt_token_ids": prompt}, own, lora_request=chosen)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    found[output.request_id] = [list(each.token_ids) for each in output.outputs]
    return [tokens for _, outputs in sorted(found.items()) for tokens in outputs]


MARKS = {"windows": (), "drafts": pytest.mark.slow}  # of CASES with few requests; others are for CI


@pytest.mark.parametrize(
    ("case", "count"),
    [
        *[pytest.param(each, NUM_REQUESTS, marks=MARKS.get(each, pytest.mark.ci)) for each in CASES],
        *[pytest.param(each, MANY_REQUESTS, marks=pytest.mark.slow) for each in CASES],
    ],
)
def test_tokens_are_those_of_an_ample_pool(case: str, count: int, tmp_path: Path) -> None:
    model, settings = CASES[case]
    adapter = None
    if "enable_lora" in settings:
        adapter = LoRARequest("own", 1, str(write_adapter(tmp_path / "own", model, 8, seed=1)))
    found = []
    for sizes in ({"num_kv_blocks": 400}, TIGHT):
        own = settings if sizes is TIGHT else {name: each for name, each in settings.items() if "mode" not in name}
        with started(model, **sizes | own) as engine:
            found.append(generate(engine, adapter, count))
            metrics = engine.metrics
    assert found[1] == found[0]
    assert metrics.preemptions > 0, "they were not busy"
    assert metrics.offloaded_blocks > 0 and metrics.loaded_tokens > 0 and not metrics.offload_failures
    assert metrics.compilations_after_ready == 0


@pytest.mark.ci
def test_a_copy_that_fails_ends_nothing_and_all_can_be_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(name: str, is_due: Callable[[int], bool]) -> None:
        copy, numbers = getattr(host_tier, name), count()

        def failing(rows: Any) -> Any:
            if is_due(next(numbers)):
                raise RuntimeError("no memory for a copy")
            return copy(rows)

        monkeypatch.setattr(host_tier, name, failing)

    model, settings = CASES["windows"]
    with started(model, FileRecorder(tmp_path / "log"), **TIGHT | settings) as engine:
        expected = generate(engine, None)
        assert engine.reset_prefix_cache()
        fail("to_host", lambda number: number % 3 == 0)
        assert generate(engine, None) == expected
        assert engine.metrics.offload_failures > 0 and not engine.metrics.recoveries
        monkeypatch.undo()
        assert engine.reset_prefix_cache()
        fail("to_device", lambda number: number == 1)
        assert generate(engine, None) == expected and engine.metrics.recoveries == 1
        state = engine.scheduler.state
    *_, last = Replay(tmp_path / "log").moments()
    assert last.difference is None and last.state.num_planned == state.num_planned


def test_a_device_without_host_memory_is_refused() -> None:
    def device(*kinds: str) -> Any:
        return SimpleNamespace(addressable_memories=lambda: [SimpleNamespace(kind=kind) for kind in kinds])

    assert host_memory_kind(device("device", "unpinned_host", "pinned_host")) == "pinned_host"
    with pytest.raises(UserError, match="no host memory"):
        host_memory_kind(device("device"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preemption_mode": "swap"}, "needs kv_offloading_size"),
        ({"preemption_mode": "drop"}, "must be one of recompute, swap"),
        ({"kv_offloading_size": -1}, "must be from 0"),
        ({"kv_offloading_size": 1, "enable_prefix_caching": False}, "needs enable_prefix_caching"),
    ],
    ids=str,
)
def test_settings_that_would_do_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EngineConfig(model="m", **settings)
