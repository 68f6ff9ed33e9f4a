"""Engines on several devices return the tokens of one device: experts, pipeline stages, tensor parallelism over 8.

Cases run in a process with eight virtual devices.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import combinations, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm import LLM, BeamSearchParams, LoRARequest, RequestOutputKind, SamplingParams
from jaxllm.embedded import MODEL_DIR
from jaxllm.families.families import read_spec
from jaxllm.setup import kv_cache
from tests.engine import test_combinations
from tests.support.adapters import write_adapter
from tests.support.checkpoints import random_tensors
from tests.support.layouts import layout_of
from tests.support.paths import GOLDEN, STORIES
from tests.support.quantized_checkpoints import mxfp4_model, quantized_model, write

EXPERTS = 8
WIDE = 176  # stories260K's 172 feed-forward columns and four of zeros, so that 8 devices divide them
SIZES: dict[str, Any] = {"precompile": "covering", "max_num_seqs": 8, "block_size": 4}
EP2, EP4, EP8 = ({"tensor_parallel_size": size, "enable_expert_parallel": True} for size in (2, 4, 8))
TP8 = {"tensor_parallel_size": 8}
PP2, PP4, PP5 = ({"pipeline_parallel_size": size} for size in (2, 4, 5))
TP2_PP2 = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
# Adapters need one step through all stages; without them each stage has a batch, see test_batches_in_flight.py.
ONE_STEP = {"enable_lora": True, "max_num_batched_tokens": 512}
SWAP = {"kv_offloading_size": 0.05, "preemption_mode": "swap"}
EAGLE = {"method": "eagle3", "model": "jaxllm-eagle", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(1, get_context("spawn")) as pool:
        patch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
        assert pool.submit(jax.device_count).result() == 8
        yield pool


def _config(case: str, **sizes: Any) -> dict[str, Any]:
    heads = {"num_attention_heads": 8, "hidden_size": 64, "head_dim": 8, "vocab_size": 96}
    return json.loads((GOLDEN / case / "config.json").read_text()) | heads | sizes


def write_random(folder: Path, case: str, **further: Any) -> Path:
    """Write a random model, with eight experts if with any; "family, format" is quantized."""
    family, _, form = case.partition(", ")
    if family == "deepseek-v3":
        sizes = {"num_key_value_heads": 8, "moe_intermediate_size": 32, "intermediate_size": 64}
        config, stored, _ = quantized_model("fp8-blocks", _config(family, **sizes, **further))
    elif family == "gpt-oss":
        config = _config(family, intermediate_size=32)
        tensors, rng = random_tensors(config), np.random.default_rng(0)
        shapes = {"gate_up_proj": (64, 64), "gate_up_proj_bias": (64,), "down_proj": (32, 64), "down_proj_bias": (64,)}
        for layer, (name, shape) in product(range(2), shapes.items()):
            tensors[f"model.layers.{layer}.mlp.experts.{name}"] = rng.standard_normal((EXPERTS, *shape), np.float32)
        config, stored, _ = mxfp4_model(config, tensors)
    elif form:
        sizes = {"moe_intermediate_size": 32, "intermediate_size": 64}
        config, stored, _ = quantized_model(form, _config(family, **sizes))
    else:
        config = _config(family, intermediate_size=32, **further)
        stored = random_tensors(config)
    return write(folder, config, stored)


def write_stories(folder: Path, has_experts: bool) -> Path:
    """Write stories260K with feed-forwards of 176 columns, or with experts that differ from them by 5 %."""
    config = json.loads((STORIES / "config.json").read_text()) | {"intermediate_size": WIDE}
    tensors, rng, names = {}, np.random.default_rng(0), {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    if has_experts:
        own = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": None}
        config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"} | own
        config = {key: value for key, value in config.items() if not key.endswith("_bias")}
    for name, values in load_file(STORIES / "model.safetensors").items():
        layer, _, last = name.removesuffix(".weight").rpartition(".mlp.")
        if layer:
            padding = (0, WIDE - max(values.shape))
            values = np.pad(values, ((0, 0), padding) if last == "down_proj" else (padding, (0, 0)))
        if not layer or not has_experts:
            tensors[name] = values
            continue
        tensors[f"{layer}.block_sparse_moe.gate.weight"] = rng.standard_normal((EXPERTS, min(values.shape)), np.float32)
        for expert in range(EXPERTS):
            noise = 1 + 0.05 * rng.standard_normal(values.shape, np.float32)
            tensors[f"{layer}.block_sparse_moe.experts.{expert}.{names[last]}.weight"] = values * noise
    folder.mkdir(parents=True, exist_ok=True)
    for file in STORIES.glob("*token*.json"):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def greedy(
    folder: Path, settings: dict[str, Any], sizes: Sequence[int] = (3, 50, 17)
) -> list[tuple[list[int], list[float]]]:
    """Return the tokens of prompts of these sizes, and the log-probabilities of prompt and tokens."""
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(1, 96, size).tolist()} for size in sizes]
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    found = []
    settings = {"max_num_batched_tokens": 32, "skip_tokenizer_init": True} | SIZES | settings
    with LLM(str(folder), **settings) as llm:
        for output in llm.generate(prompts, params, use_tqdm=False):
            own = output.outputs[0]
            values = [entry for entry in [*(output.prompt_logprobs or ()), *(own.logprobs or ())] if entry]
            found.append((list(own.token_ids), [next(iter(entry.values())).logprob for entry in values]))
    return found


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("gpt-oss", marks=pytest.mark.ci),
        pytest.param("deepseek-v3", marks=pytest.mark.slow),
        *(pytest.param(f"qwen3-moe{form}", marks=pytest.mark.slow) for form in ("", ", w8a16", ", w4a16")),
        pytest.param("mixtral", marks=pytest.mark.slow),
    ],
)
def test_whole_experts_on_each_device_change_no_token(case: str, pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    """DeepSeek is in FP8, GPT-OSS in MXFP4."""
    folder = write_random(tmp_path, case)
    alone, *divided = (pool.submit(greedy, folder, settings).result() for settings in ({}, EP2, EP4))
    for found in divided:
        check_equal(found, alone)


def check_equal(found: Any, alone: Any) -> None:
    for (tokens, values), (due, expected) in zip(found, alone, strict=True):
        assert tokens == due
        np.testing.assert_allclose(values, expected, rtol=0, atol=1e-4)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("folder", "cases", "sizes"),
    [
        (STORIES, [PP5, TP2_PP2], (3, 50, 17)),
        pytest.param(STORIES, [PP2, PP4], (3, 50, 17), marks=pytest.mark.slow),
        pytest.param(
            MODEL_DIR,
            [PP2, PP4, TP2_PP2 | {"speculative_config": EAGLE, "max_num_batched_tokens": 512}],
            (3, 50, 17),
            marks=pytest.mark.slow,
        ),
        # A step of 512 tokens is two micro-batches: chunks and tiles are cut between them.
        (STORIES, [PP2 | ONE_STEP, TP2_PP2 | ONE_STEP], (3, 240, 450)),
    ],
    ids=["uneven stages", "even stages", "draft head", "micro-batches"],
)
def test_stages_change_no_token(
    folder: Path, cases: Sequence[dict[str, Any]], sizes: Sequence[int], pool: ProcessPoolExecutor
) -> None:
    """The models have five and four layers."""
    alone, *divided = (pool.submit(greedy, folder, settings, sizes).result() for settings in ({}, *cases))
    for found in divided:
        check_equal(found, alone)


@pytest.mark.ci
@pytest.mark.parametrize("case", ["deepseek-v3", "gemma2", pytest.param("qwen3-moe", marks=pytest.mark.slow)])
def test_stages_of_unlike_layers_change_no_token(case: str, pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    """DeepSeek's first layer has no experts; every second layer of Gemma 2 has a window, and blocks of another pool."""
    kinds = (
        {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]} if case == "gemma2" else {}
    )
    folder = write_random(tmp_path, case, num_hidden_layers=5, **kinds)
    alone, divided = (pool.submit(greedy, folder, settings).result() for settings in ({}, TP2_PP2))
    check_equal(divided, alone)


FEW = 28  # blocks: requests preempt each other
FACTORS: dict[str, Sequence[Any]] = {
    "devices": (EP2, TP8, EP4, TP2_PP2, PP5 | SWAP),
    "kv_cache_dtype": ("auto", "int8", "fp8"),
    "speculative_config": (None, {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}),
    "enable_prefix_caching": (True, False),
    "num_kv_blocks": (256, FEW),
    "max_num_batched_tokens": (64, 24),  # 24: prompts are computed in chunks
}


def pairwise() -> list[dict[str, Any]]:
    """Return cases that contain each pair of values of two factors."""
    every = [*product(*map(_each, FACTORS))]
    pairs = {pair for one, other in combinations(FACTORS, 2) for pair in product(_each(one), _each(other))}
    cases = []
    while pairs:
        best = max(every, key=lambda case: len(pairs.intersection(combinations(case, 2))))
        cases.append({name: FACTORS[name][at] for name, at in best})
        pairs.difference_update(combinations(best, 2))
    return cases


OFTEN = {2, 6}  # cases that CI runs: eight devices, and five stages with drafts and swapped requests


def _each(name: str) -> list[tuple[str, int]]:
    return [(name, at) for at in range(len(FACTORS[name]))]


def answers(folder: Path, settings: dict[str, Any], has_adapters: bool = True) -> tuple[dict[str, Any], dict[str, int]]:
    """Run all kinds of requests together, twice: each sequence's tokens and log-probabilities; and metrics."""
    adapter = LoRARequest("random", 1, str(folder / "adapter"))
    processors = [test_combinations.scale, test_combinations.ban_above]
    story = test_combinations.prompt(3)
    requests: dict[str, tuple[list[int], Any]] = {
        f"fields {number}": (test_combinations.prompt(number), test_combinations.combination(number))
        for number in range(12)
    }
    plain = SamplingParams(temperature=0.0, max_tokens=40, logprobs=2)
    requests |= {
        "greedy": (story, dataclasses.replace(plain, prompt_logprobs=1)),
        "adapter": (story, plain),
        "adapter, random": (story, dataclasses.replace(plain, temperature=0.9, seed=3)),
        "grammar": (story, dataclasses.replace(plain, structured_outputs={"regex": "( [a-z]{2,4}){3}\\."})),
    }
    if not has_adapters:
        requests = {name: request for name, request in requests.items() if "adapter" not in name}
    if settings["speculative_config"] is None:
        requests["beams"] = story, BeamSearchParams(3, 12)
    found: dict[str, Any] = {}
    further = {"enable_lora": has_adapters, "max_logprobs": -1, "logits_processors": processors}
    with LLM(str(folder), **SIZES | further | settings) as llm:
        for turn in range(2):
            for name, (prompt, params) in requests.items():
                if isinstance(params, SamplingParams):
                    params = dataclasses.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
                own = adapter if "adapter" in name else None
                llm.engine.add_request(f"{name}, {turn}", {"prompt_token_ids": prompt}, params, lora_request=own)
            while llm.engine.has_unfinished_requests():
                for output in llm.engine.step():
                    entries = [entry for entry in output.prompt_logprobs or [] if entry]
                    for number, each in enumerate(output.outputs):
                        entries += each.logprobs or []
                        values = [value for entry in entries for value in test_combinations.value_of(entry)]
                        found[f"{output.request_id}, {number}"] = list(each.token_ids), values
        metrics = llm.engine.metrics
        counts = {"preempted": metrics.preemptions, "hits": metrics.cached_tokens}
    return found, counts | {"drafts": metrics.accepted_tokens[0] if metrics.accepted_tokens else 0}


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Stories260K with experts and without, each with an adapter in its folder."""
    folders = {has_experts: tmp_path_factory.mktemp("stories") / "model" for has_experts in (True, False)}
    for has_experts, folder in folders.items():
        write_stories(folder, has_experts)
        write_adapter(folder / "adapter", folder, targets=["q_proj", "k_proj", "v_proj", "o_proj"])
    return folders


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.ci if at in OFTEN else pytest.mark.slow)
        for at, case in enumerate(pairwise())
    ],
    ids=lambda case: "-".join(map(str, case.values())),
)
def test_requests_get_what_one_device_gives(
    case: dict[str, Any], pool: ProcessPoolExecutor, stories: dict[bool, Path]
) -> None:
    """Heads of TP 8 are replicated: the model has four key-value heads."""
    settings = {name: value for name, value in case.items() if name != "devices"}
    folder = stories["enable_expert_parallel" in case["devices"]]
    due, _ = pool.submit(answers, folder, settings).result()
    found, counts = pool.submit(answers, folder, settings | case["devices"]).result()
    assert found.keys() == due.keys()
    differences: list[float] = []
    for name, (tokens, values) in found.items():
        assert tokens == due[name][0], name
        # Sums in another order change some keys to the next number of 8 bits. With FP8 that moves a log-probability by
        # up to 0.03; storing the cache in FP8 moves it by up to 0.8, and by 0.17 on average.
        most, share = {"auto": (1e-4, 0.0), "int8": (2e-3, 1e-4), "fp8": (0.05, 0.0)}[case["kv_cache_dtype"]]
        np.testing.assert_allclose(values, due[name][1], rtol=share, atol=most, err_msg=name)
        differences.extend(np.abs(np.subtract(values, due[name][1])))
    assert np.mean(differences) <= (1e-5 if case["kv_cache_dtype"] == "auto" else 2e-3)
    assert (counts["preempted"] > 0) == (case["num_kv_blocks"] == FEW)
    assert (counts["hits"] > 0) == case["enable_prefix_caching"]
    assert (counts["drafts"] > 0) == (case["speculative_config"] is not None)


@pytest.mark.parametrize(("shards", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_the_plan_counts_copied_key_value_heads(shards: int, heads: int) -> None:
    """With eight devices, two hold each of four heads, so a block takes as much of a device as with four."""
    spec, _ = read_spec(json.loads((STORIES / "config.json").read_text()))
    geometry = kv_cache.Geometry(num_slots=2, num_blocks=5, block_size=16, max_model_len=64)
    dtype = np.dtype("float32")
    leaves = jax.tree.leaves(kv_cache.abstract_kv(spec, geometry, layout_of(shards), dtype))
    held = [leaf.sharding.shard_shape(leaf.shape) for leaf in leaves]
    assert held == [(5, heads, 16, 8)] * 2 * 5
    assert kv_cache.block_bytes(spec, spec.num_layers, 16, dtype, shards) == sum(4 * np.prod(each[1:]) for each in held)
