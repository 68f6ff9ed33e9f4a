"""Requests with adapters, many at once under every setting: each gets what the merged model gives it alone."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM, LoRARequest, RequestOutputKind, SamplingParams, UserError
from jaxllm.outputs import RequestOutput
from tests.support.adapters import merge, write_adapter
from tests.support.paths import GOLDEN

LONGEST = 60
SHARED = {"skip_tokenizer_init": True, "precompile": "covering", "max_model_len": LONGEST, "block_size": 4}
CHUNKED = {"max_num_batched_tokens": 32, "max_num_seqs": 6, "num_kv_blocks": 48}
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 64, "max_cpu_loras": 4}
FAMILIES = ("llama", "qwen2", "gemma2", "gpt2", "phi3")
RANKS = (1, 8, 64, 3, 8, 16, 1, 8)
# Last parts of modules' names, of which each family has its own.
TARGETS = (
    None,
    ("q_proj", "v_proj", "c_attn", "qkv_proj"),
    ("o_proj", "c_proj"),
    ("gate_proj", "gate_up_proj", "c_fc"),
    ("k_proj", "down_proj", "c_attn"),
    ("up_proj", "c_fc", "gate_up_proj"),
    ("q_proj", "o_proj", "up_proj", "c_attn"),
    None,
)
Case = tuple[int, tuple[int, ...], SamplingParams]  # adapter (0: none), prompt, parameters


@functools.cache
def adapters(family: str) -> tuple[Path, list[LoRARequest]]:
    """Write a family's adapters; return the folder of what is merged from them too."""
    folder = Path(tempfile.mkdtemp(prefix=f"adapters-{family}-"))
    requests = []
    for number, (rank, targets) in enumerate(zip(RANKS, TARGETS, strict=True), 1):
        written = write_adapter(folder / f"a{number}", GOLDEN / family, rank, targets=targets, seed=number)
        merge(folder / f"merged{number}", GOLDEN / family, written)
        requests.append(LoRARequest(f"a{number}", number, str(written)))
    return folder, requests


@functools.cache
def cases(family: str) -> list[Case]:
    """Draw requests: some begin alike, whoever's adapter they have."""
    random = np.random.default_rng(sum(map(ord, family)))
    vocabulary = 90
    shared = [random.integers(3, vocabulary, 40) for _ in range(2)]
    drawn: list[Case] = []
    for number in range(36):
        begin = shared[number % 2][: int(random.choice([0, 8, 17, 40]))]
        ids = (*begin.tolist(), *random.integers(3, vocabulary, int(random.integers(1, 8))).tolist())
        temperature = float(random.choice([0.0, 0.0, 1.0]))
        params = SamplingParams(
            temperature=temperature,
            seed=number,
            n=2 if temperature and random.random() < 0.5 else 1,
            max_tokens=int(random.integers(1, 12)),
            logprobs=[None, 3][int(random.integers(2))],
            prompt_logprobs=[None, None, 2][int(random.integers(3))],
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        drawn.append((number % (len(RANKS) + 1), ids, params))
    return drawn


@functools.cache
def expected(family: str) -> list[RequestOutput]:
    """Run each request alone in a merged model, or in the base."""
    folder, _ = adapters(family)
    outputs: dict[int, RequestOutput] = {}
    for adapter in range(len(RANKS) + 1):
        model = folder / f"merged{adapter}" if adapter else GOLDEN / family
        with LLM(str(model), **SHARED, max_num_seqs=2, max_num_batched_tokens=64) as llm:
            for index, (own, ids, params) in enumerate(cases(family)):
                if own == adapter:
                    llm.reset_prefix_cache()
                    (outputs[index],) = llm.generate([{"prompt_token_ids": list(ids)}], params, use_tqdm=False)
    return [outputs[index] for index in range(len(outputs))]


def told(output: RequestOutput) -> tuple[Any, np.ndarray]:
    """Give the tokens of a request's outputs, and all log-probabilities in order."""
    tables = [*(output.prompt_logprobs or ()), *(each for own in output.outputs for each in own.logprobs or ())]
    numbers = [table[token].logprob for table in tables if table for token in sorted(table)]
    return [(own.token_ids, own.finish_reason) for own in output.outputs], np.array(numbers)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param(family, own, marks=() if family == "llama" and not own else pytest.mark.ci, id=f"{family} {own}")
        for family in FAMILIES
        for own in (
            {},
            {"tensor_parallel_size": 2, "max_loras": 8},
            {"async_scheduling": False, "enable_prefix_caching": False, "max_loras": 1},
            {"deterministic": True, "max_loras": 2},
        )
    ],
)
def test_each_request_gets_what_its_merged_model_gives_it_alone(family: str, settings: dict[str, Any]) -> None:
    _, requests = adapters(family)
    random = np.random.default_rng(7)
    with LLM(str(GOLDEN / family), **SHARED | CHUNKED | LORA | settings) as llm:
        engine = llm.engine
        outputs: dict[str, RequestOutput] = {}
        left = list(enumerate(cases(family)))
        while left or engine.has_unfinished_requests():
            for _ in range(int(random.integers(6))):
                if left:
                    number, (adapter, ids, params) = left.pop(0)
                    own = requests[adapter - 1] if adapter else None
                    engine.add_request(str(number), {"prompt_token_ids": list(ids)}, params, lora_request=own)
            outputs |= {output.request_id: output for output in engine.step()}
        most = engine.config.max_loras
        assert len(engine.scheduler.state.adapters) <= most and engine.metrics.adapter_loads >= len(RANKS)
        assert engine.metrics.compilations_after_ready == 0
        assert engine.metrics.preemptions > 0 or settings
        if engine.config.tensor_parallel_size > 1:
            programs, layers = engine.runner.programs, engine.runner.setup.spec.num_layers
            for key in programs.covering:
                if key.part == "forward":  # no more than without adapters
                    assert programs[key].as_text().count(" all-reduce(") == 2 * layers + 1
    for number, due in enumerate(expected(family)):
        tokens, logprobs = told(outputs[str(number)])
        due_tokens, due_logprobs = told(due)
        assert tokens == due_tokens, number
        np.testing.assert_allclose(logprobs, due_logprobs, rtol=0, atol=1e-4)


def test_adapters_change_what_is_said() -> None:
    by_adapter = {case[0]: told(output)[0] for case, output in zip(cases("llama"), expected("llama"), strict=True)}
    assert len({str(tokens) for tokens in by_adapter.values()}) == len(by_adapter)


def test_without_the_switch_an_adapter_is_refused(tmp_path: Path) -> None:
    request = LoRARequest("a", 1, str(write_adapter(tmp_path / "a", GOLDEN / "llama")))
    with LLM(str(GOLDEN / "llama"), **SHARED) as llm:
        with pytest.raises(UserError, match="LoRA is not enabled"):
            llm.generate([[5, 6]], lora_request=request, use_tqdm=False)
