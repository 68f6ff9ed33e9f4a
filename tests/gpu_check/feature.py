"""The engine's features, each with its results as plain numbers: `python -m tests.gpu_check.feature GROUP`.

A group is an engine with a list of cases. Each group runs in a separate process, so that groups run in parallel and a
crash ends one group. The process prints one line per case. Groups use float32 with full precision unless named.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LINE = "CASE "
PROMPTS = ["Once upon a time", "There was once a small fox who", "What is 47 + 38?"]
SIZES: dict[str, Any] = {
    **{"dtype": "float32", "precompile": "covering", "max_num_seqs": 16, "num_kv_blocks": 512},
    **{"max_num_batched_tokens": 256},
}
STEPS = (4, 8, 16, 64)  # rows, and tokens of prompts, in the cases
LARGER = 8.0  # factor on the random weights of tiny models, so that every layer changes the logits
_TINY = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 512},
    **{"num_key_value_heads": 2, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0},
    **{"tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": None, "eos_token_id": None},
    "max_position_embeddings": 512,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **{"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 48, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    },
    "deepseek_v3": {
        **{"architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24},
        **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 8, "topk_group": 1},
        **{"n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
        **{"n_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.5, "scoring_func": "sigmoid"},
        "topk_method": "noaux_tc",
    },
    "gemma2": {
        **{"architectures": ["Gemma2ForCausalLM"], "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16},
        **{"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    },
    "gpt_oss": {
        **{"architectures": ["GptOssForCausalLM"], "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
        **{"sliding_window": 16, "swiglu_limit": 7.0, "attention_bias": True},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


@dataclass(frozen=True)
class Group:
    """An engine and its cases, each a function of the engine."""

    cases: dict[str, Callable[[Any], Any]]
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 2e-3  # of log-probabilities and other numbers
    model: str | None = None  # a tiny one, by its type
    steps: bool = False  # whether steps of one program are compiled, in all variants


def greedy(llm: Any, prompts: Sequence[Any] = PROMPTS, tokens: int = 40, **further: Any) -> Any:
    """Generate greedily, with the log-probabilities of the two likeliest tokens."""
    return _generate(llm, prompts, {"temperature": 0, "max_tokens": tokens, "logprobs": 2, **further})


def _generate(llm: Any, prompts: Sequence[Any], params: dict[str, Any], **further: Any) -> Any:
    from jaxllm import SamplingParams

    outputs = llm.generate(list(prompts), SamplingParams(**params), use_tqdm=False, **further)
    found = []
    for output in outputs:
        for one in output.outputs:
            row: dict[str, Any] = {"ids": list(one.token_ids)}
            if one.logprobs:
                chosen = zip(one.token_ids, one.logprobs, strict=True)
                best = [sorted((each.logprob for each in own.values()), reverse=True) for own in one.logprobs]
                row["lp"] = [round(own[token].logprob, 4) for token, own in chosen]
                row["gap"] = [round(own[0] - own[1], 4) for own in best]
            found.append(row)
    return found


def _sampled(**params: Any) -> Callable[[Any], Any]:
    return lambda llm: _generate(llm, PROMPTS, {"temperature": 0, "max_tokens": 40, **params})


def _prompt_logprobs(llm: Any) -> Any:
    from jaxllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    tokens = [zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True) for output in outputs]
    return [[round(own[token].logprob, 4) for token, own in one] for one in tokens]


def _beams(llm: Any) -> Any:
    from jaxllm import BeamSearchParams

    outputs = llm.beam_search(PROMPTS[:2], BeamSearchParams(beam_width=4, max_tokens=20))
    return [{"ids": list(one.tokens)} for output in outputs for one in output.sequences]


def _adapters(llm: Any) -> Any:
    import jaxllm.embedded
    from jaxllm.lora_request import LoRARequest

    adapter = LoRARequest("pirate", 1, str(Path(jaxllm.embedded.__file__).parent / "pirate"))
    params = {"temperature": 0, "max_tokens": 40, "logprobs": 2}
    found = _generate(llm, [*PROMPTS, PROMPTS[0]], params, lora_request=[adapter, None, adapter, None])
    if found[0]["ids"] == found[3]["ids"]:
        raise RuntimeError("the adapter changes nothing")
    return found


def _drafted(llm: Any) -> Any:
    found = greedy(llm, logprobs=None)
    for bias in ({14: 99.0}, {14: 99.0, 304: 99.0}):  # alone, and with repetitive text, for which drafts pay
        found += greedy(llm, PROMPTS[:1], logprobs=None, logit_bias=bias)
    if not sum(llm.engine.metrics.accepted_tokens):
        raise RuntimeError("no draft was kept")
    return found


def _preempted(llm: Any) -> Any:
    found = greedy(llm, PROMPTS * 3)
    if not llm.engine.metrics.preemptions:
        raise RuntimeError("no request was preempted")
    return found


def _swapped(llm: Any) -> Any:
    """Preempt requests whose blocks are stored in the host's memory and loaded again."""
    found = greedy(llm, PROMPTS * 3, 200, ignore_eos=True)
    metrics = llm.engine.metrics
    if not (metrics.preemptions and metrics.loaded_tokens):
        raise RuntimeError("no request was preempted, or none was loaded from the host's memory")
    return found


def _deterministic(llm: Any) -> Any:
    found = greedy(llm)
    if any(greedy(llm, [prompt]) != [one] for prompt, one in zip(PROMPTS, found, strict=True)):
        raise RuntimeError("a request that runs alone has other results than among others")
    return found


def _tiny(llm: Any) -> Any:
    """Generate for short and long prompts, which pass the sliding window and the end of a block."""
    import jax

    from tests.support import inspection

    runner = llm.engine.runner
    params = [
        leaf * LARGER if leaf.ndim > 1 or bool((leaf != leaf[0]).any()) else leaf
        for leaf in inspection.params_of(runner)
    ]
    inspection.set_params(runner, jax.block_until_ready(params))
    draw = random.Random(1)
    prompts = [{"prompt_token_ids": [draw.randrange(3, 500) for _ in range(length)]} for length in (5, 40, 130)]
    return greedy(llm, prompts, 24, ignore_eos=True, detokenize=False)


def _embedded(llm: Any) -> Any:
    texts = ["Who keeps bees?", "Anna is a beekeeper.", "Ben bakes bread " * 20]
    outputs = llm.embed(texts, use_tqdm=False)
    return [[round(one, 4) for one in output.outputs.embedding] for output in outputs]


_OBJECT = {
    **{"type": "object", "required": ["name", "age"], "additionalProperties": False},
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
}
_DETERMINISTIC = {"deterministic": True, "max_num_batched_tokens": 32, "precompile": "auto"}
GROUPS: dict[str, Group] = {
    "usual": Group(
        {
            "greedy": _sampled(),
            "logprobs": greedy,
            "sampled": _sampled(temperature=1.0, seed=7, n=2),
            "filters": _sampled(temperature=0.9, top_p=0.9, top_k=40, min_p=0.02, seed=11),
            "penalties": _sampled(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.2,
                                  logit_bias={5: 2.0}, stop=["."]),
            "prompt_logprobs": _prompt_logprobs,
            "regex": _sampled(structured_outputs={"regex": "[a-z]{3,8} and [a-z]{3,8}"}),
            "json": _sampled(structured_outputs={"json": _OBJECT}, max_tokens=64),
            "beams": _beams,
        },
        steps=True,
    ),
    "qwen3_moe": Group({"qwen3_moe": _tiny}, model="qwen3_moe"),
    "deepseek_v3": Group({"deepseek_v3": _tiny}, model="deepseek_v3"),
    "gemma2": Group({"gemma2": _tiny}, model="gemma2"),
    "gpt_oss": Group({"gpt_oss": _tiny}, model="gpt_oss"),
    "eagle": Group({"eagle": _drafted}, {
        "speculative_config": {"method": "eagle3", "model": "jaxllm-eagle", "num_speculative_tokens": 3}}),
    "lora": Group({"lora": _adapters}, {"enable_lora": True, "max_loras": 2}),
    "preempted": Group({"preempted": _preempted}, {"num_kv_blocks": 14}),
    "swapped": Group({"swapped": _swapped}, {
        "num_kv_blocks": 20, "kv_offloading_size": 0.25, "preemption_mode": "swap"}),
    "deterministic": Group({"deterministic": _deterministic}, _DETERMINISTIC),
    "ngram": Group({"ngram": _drafted}, {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}}),
    "bfloat16": Group({"bfloat16": greedy}, {"dtype": "bfloat16"}, tolerance=0.15),
    "cache_int8": Group({"cache_int8": greedy}, {"kv_cache_dtype": "int8"}, tolerance=0.05),
    "cache_fp8": Group({"cache_fp8": greedy}, {"kv_cache_dtype": "fp8"}, tolerance=0.05),
    "weights_int8": Group({"weights_int8": greedy}, {"quantization": "int8"}, tolerance=0.02),
    "weights_fp8": Group({"weights_fp8": greedy}, {"quantization": "fp8"}, tolerance=0.02),
    "weights_int4": Group({"weights_int4": greedy}, {"quantization": "int4"}, tolerance=0.02),
    "embedder": Group({"embedder": _embedded}, {
        "model": "jaxllm-embedder", "dtype": "float32", "precompile": "covering", "max_num_seqs": 16}),
}  # fmt: skip
CASES = {case: group for group in GROUPS.values() for case in group.cases}


def engine(group: Group, folder: Path) -> Any:
    """Make a group's engine."""
    from jaxllm import LLM

    if group.options.get("model"):
        return LLM(**group.options)
    if group.model is None:
        return LLM(**SIZES | group.options)
    config = _TINY | {"model_type": group.model} | CONFIGS[group.model]
    (folder / "config.json").write_text(json.dumps(config))
    return LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, max_model_len=256, **SIZES | group.options)


def run(name: str, write: Callable[[dict[str, Any]], None], with_steps: bool = False) -> None:
    """Run a group's cases and pass each result to `write`; `with_steps` compiles steps of one program too."""
    group, began = GROUPS[name], time.monotonic()
    from tests.gpu_check import as_gpu

    with tempfile.TemporaryDirectory() as folder, as_gpu.rounding(), engine(group, Path(folder)) as llm:
        if group.steps and with_steps:
            programs = llm.engine.runner.programs
            wanted = [key for key in programs.rest if key.part == "step" and key.shape.tokens in STEPS]
            programs.begin(wanted, os.cpu_count() or 2)
            programs.wait()
        for case, ask in group.cases.items():
            result: dict[str, Any] = {"case": case}
            try:
                result["value"] = ask(llm)
            except Exception as error:  # the remaining cases still run
                result["error"] = f"{type(error).__name__}: {error!s:.400}"
            write(result | {"seconds": round(time.monotonic() - began, 1)})
            began = time.monotonic()


def main() -> None:
    """Do one group on a "gpu", on a "cpu", or "dry": on a CPU with a GPU's table of programs."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    name, how = sys.argv[1], sys.argv[2]

    def write(result: dict[str, Any]) -> None:
        print(LINE + json.dumps(result), flush=True)

    if how == "dry":
        from tests.gpu_check import as_gpu

        with as_gpu.limits():
            run(name, write)
    else:
        run(name, write, with_steps=how == "gpu")


if __name__ == "__main__":
    main()
