"""The same requests through jaxllm and through transformers: its compiled `generate` with a static cache, and its
continuous batching. Random weights of the same shape on both sides; greedy, of a fixed length.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu_check import models
from tests.gpu_check.check import Check
from tests.gpu_check.parts import TORCH, missing

REQUESTS, LONGEST, NEW = 256, 512, 128
DRY = 4, 24, 6
AIM = 3.0  # times the tokens a second of transformers' continuous batching
BATCH = 64  # of `generate`


def run(check: Check) -> None:
    for name in ("Qwen2.5-0.5B",) if check.is_dry else ("Qwen2.5-0.5B", "Llama-3.1-8B"):
        if check.is_over(30, name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            config = models.tiny(models.CONFIGS[name]) if check.is_dry else models.CONFIGS[name]
            dtype = "float32" if check.is_dry else "bfloat16"
            models.write_config(config, Path(folder), dtype)
            _compare(check, name, folder, dtype, config["vocab_size"])


def _compare(check: Check, name: str, folder: str, dtype: str, vocabulary: int) -> None:
    count, longest, new = DRY if check.is_dry else (REQUESTS, LONGEST, NEW)
    random = np.random.default_rng(0)
    lengths = random.integers(longest // 4, longest + 1, count)
    prompts = [random.integers(3, min(vocabulary, 1000), length).tolist() for length in lengths]
    reached: dict[str, float] = {}

    def note(by: str, generate: Callable[[], float]) -> None:
        with check.guarded(f"{name}, {by}"):
            seconds = generate()
            reached[by] = count * new / seconds
            check.measure(model=name, by=by, requests=count, seconds=seconds, tokens_per_second=reached[by])

    note("jaxllm", lambda: _jaxllm(folder, dtype, prompts, new, longest))
    if absent := missing(TORCH):
        check.skip(f"{name}, transformers: {' and '.join(absent)} not installed")
        return
    model = None
    with check.guarded(f"{name}, transformers"):
        model = _network(folder, dtype)
    if model is None:
        return
    note("transformers, continuous batching", lambda: _continuous(model, prompts, new))
    if not check.is_over(1 if check.is_dry else 40, f"{name}, transformers' static cache"):
        note("transformers, static cache", lambda: _static(model, prompts, new))
    theirs = reached.get("transformers, continuous batching")
    if theirs and "jaxllm" in reached:
        times = reached["jaxllm"] / theirs
        check.target(f"{name}, times transformers' continuous batching", times, AIM, is_least=True)


def _jaxllm(folder: str, dtype: str, prompts: list[list[int]], new: int, longest: int) -> float:
    from jaxllm import LLM, SamplingParams
    from tests.benchmarks.bare import compile_greedy

    slots = min(len(prompts), 256)
    sizes = {"max_model_len": longest + new, "max_num_seqs": slots, "num_kv_blocks": slots * -(-(longest + new) // 16)}
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    options: dict[str, Any] = {"max_num_batched_tokens": 8192, **sizes, "enable_prefix_caching": False}
    with LLM(folder, dtype=dtype, load_format="dummy", precompile="covering", **options) as llm:
        compile_greedy(llm.engine, [slots], [8192])
        llm.generate(given, replace(params, max_tokens=4), use_tqdm=False)
        began = time.perf_counter()
        outputs = llm.generate(given, params, use_tqdm=False)
        seconds = time.perf_counter() - began
    assert all(len(output.outputs[0].token_ids) == new for output in outputs), "an output has another length"
    return seconds


def _network(folder: str, dtype: str) -> Any:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, device = getattr(torch, dtype), "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):  # the weights are made where they stay
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=kind)
    model.generation_config.eos_token_id = None  # so that nothing ends before its length
    model.generation_config.pad_token_id = 0
    return model.eval()


def _continuous(model: Any, prompts: list[list[int]], new: int) -> float:
    from transformers import GenerationConfig

    settings = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    seconds = 0.0
    for _ in range(2):  # the first captures graphs
        began = time.perf_counter()
        outputs = model.generate_batch(prompts, generation_config=settings, persistent_manager=True)
        seconds = time.perf_counter() - began
    made = sum(len(output.generated_tokens) for output in outputs.values())
    model.destroy_cached_continuous_batching_manager()
    assert made == len(prompts) * new, f"transformers made {made} tokens, not {len(prompts) * new}"
    return seconds


def _static(model: Any, prompts: list[list[int]], new: int) -> float:
    """Batches in the order of the prompts, padded on the left to the longest of all, so that one graph serves all."""
    import torch  # pyright: ignore[reportMissingImports]

    longest = max(map(len, prompts))
    batches = []
    for first in range(0, len(prompts), BATCH):
        own = prompts[first : first + BATCH]
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in own])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in own])
        batches.append({"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)})
    options = {"max_new_tokens": new, "do_sample": False, "cache_implementation": "static"}
    with torch.inference_mode():
        model.generate(**batches[0], **options)
        began = time.perf_counter()
        for batch in batches:
            made = model.generate(**batch, **options).cpu()
            assert made.shape[1] == longest + new, "an output has another length"
        return time.perf_counter() - began
