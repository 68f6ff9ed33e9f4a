"""Pipeline stages that each compute another batch return the tokens of one device.

Cases run in a process with eight virtual devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm import LLM, BeamSearchParams, RequestOutputKind, SamplingParams
from jaxllm.config import EngineConfig
from jaxllm.setup.model_setup import prepare
from tests.engine import test_combinations
from tests.engine.test_parallel import FEW, PP2, PP4, PP5, SIZES, TP2_PP2
from tests.support.paths import STORIES

PLAIN: dict[str, Any] = {
    "enable_prefix_caching": True,
    "num_kv_blocks": 256,
    "max_num_batched_tokens": 64,
    "kv_cache_dtype": "auto",
}
SCARCE: dict[str, Any] = {"num_kv_blocks": FEW, "max_num_batched_tokens": 24}  # requests preempt, prompts are cut
FAILING_RUN = 21  # number of the program's run that fails


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(1, get_context("spawn")) as pool:
        patch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
        assert pool.submit(jax.device_count).result() == 8
        yield pool


def answers(folder: Path, settings: dict[str, Any], fails: bool = False) -> tuple[dict[str, Any], dict[str, int]]:
    """Run requests of all kinds together, twice; return the tokens and log-probabilities of each output, and counts.

    One request is aborted in each turn; with `fails` a step fails, too.
    """
    story = test_combinations.prompt(3)
    plain = SamplingParams(temperature=0.0, max_tokens=30, logprobs=2, ignore_eos=True)
    requests: dict[str, tuple[list[int], Any]] = {
        f"fields {number}": (test_combinations.prompt(number), test_combinations.combination(number))
        for number in range(6)
    }
    requests |= {
        "greedy": (story, dataclasses.replace(plain, prompt_logprobs=1)),
        "aborted": (story, plain),
        "samples": (story, dataclasses.replace(plain, temperature=0.9, seed=3, n=3)),
        "long": (test_combinations.prompt(5) * 4, dataclasses.replace(plain, max_tokens=5, frequency_penalty=0.5)),
        "grammar": (story, dataclasses.replace(plain, structured_outputs={"regex": "( [a-z]{2,4}){3}\\."})),
        "beams": (story, BeamSearchParams(3, 12)),
    }
    processors = [test_combinations.scale, test_combinations.ban_above]
    found: dict[str, Any] = {}
    with LLM(str(folder), max_logprobs=-1, logits_processors=processors, **SIZES | PLAIN | settings) as llm:
        engine, run = llm.engine, llm.engine.runner.run
        runs = 0

        def failing(packed: Any) -> Any:
            nonlocal runs
            runs += 1
            if runs == FAILING_RUN:
                raise RuntimeError("a step fails")
            return run(packed)

        if fails:
            engine.runner.run = failing
        for turn in range(2):
            for name, (prompt, params) in requests.items():
                if isinstance(params, SamplingParams):
                    params = dataclasses.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
                engine.add_request(f"{name}, {turn}", {"prompt_token_ids": prompt[:110]}, params)
            for steps in range(2000):
                if steps == 6:
                    engine.abort_request(f"aborted, {turn}")
                for output in engine.step():
                    entries = [entry for entry in output.prompt_logprobs or [] if entry]
                    for number, each in enumerate(output.outputs):
                        entries += each.logprobs or []
                        values = [value for entry in entries for value in test_combinations.value_of(entry)]
                        found[f"{output.request_id}, {number}"] = list(each.token_ids), values
                if not engine.has_unfinished_requests():
                    break
            else:
                raise AssertionError("requests do not end")
        metrics = engine.metrics
        assert engine.runner.limits.num_ticks == settings.get("pipeline_parallel_size", 1)
        counts = {"preempted": metrics.preemptions, "hits": metrics.cached_tokens, "failed": metrics.recoveries}
    return {name: each for name, each in found.items() if not name.startswith("aborted")}, counts


@pytest.mark.parametrize(
    ("devices", "settings", "fails"),
    [
        pytest.param(TP2_PP2, SCARCE, True, marks=pytest.mark.ci),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (PP4, SCARCE, True),
                (PP4, {}, False),
                (PP5, {"enable_prefix_caching": False}, True),
                (PP2, {"kv_cache_dtype": "int8"}, False),
                (PP4, {"kv_cache_dtype": "fp8"} | SCARCE, False),
                (PP2, {"deterministic": True}, False),
                (PP2, {"async_scheduling": False} | SCARCE, True),
            )
        ),
    ],
    ids=str,
)
def test_requests_get_what_one_device_gives(
    devices: dict[str, Any], settings: dict[str, Any], fails: bool, pool: ProcessPoolExecutor
) -> None:
    due, _ = pool.submit(answers, STORIES, settings).result()
    found, counts = pool.submit(answers, STORIES, settings | devices, fails).result()
    assert found.keys() == due.keys()
    for name, (tokens, values) in found.items():
        assert tokens == due[name][0], name
        most, share = {"int8": (2e-3, 1e-4), "fp8": (0.05, 0.0)}.get(settings.get("kv_cache_dtype", ""), (1e-4, 0.0))
        np.testing.assert_allclose(values, due[name][1], rtol=share, atol=most, err_msg=name)
    assert (counts["preempted"] > 0) == ("num_kv_blocks" in settings)
    assert (counts["hits"] > 0) == settings.get("enable_prefix_caching", True)
    assert counts["failed"] == fails


def num_ticks(settings: dict[str, Any]) -> int:
    return prepare(EngineConfig(model=str(STORIES), **settings), needs_weights=False).num_ticks


def test_features_of_one_batch_have_one_step_through_all_stages(pool: ProcessPoolExecutor) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    features = ({"enable_lora": True}, {"speculative_config": drafts}, {"kv_offloading_size": 0.05})
    assert [*pool.map(num_ticks, [PP2, PP5, TP2_PP2, {}])] == [2, 5, 2, 1]
    assert [*pool.map(num_ticks, [PP2 | feature for feature in features])] == [1, 1, 1]
