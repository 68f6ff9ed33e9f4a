"""Makes tests/golden/: for each case a random two-layer model of `transformers`, and what that model computes.

Needs torch (`pip install -e ".[parity]"`), then `python tests/parity/make_golden.py [case ...]`. Weights come from
numpy's generator, so that a case can be made again anywhere; the scale is such that logits are spread out and the
largest never ties.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.paths import GOLDEN

PROMPT_TOKENS = 40
STEPS = 32
SEED = 2
STORY_PROMPT = [1, 403, 407]  # "<s> Once upon" in its own vocabulary
STORY_STEPS = 64

_SIZES: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6},
    **{"num_key_value_heads": 2, "max_position_embeddings": 128},
}
_PADDED = _SIZES | {"pad_token_id": 0}  # where the default is beyond the vocabulary
_LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 32,
}

_YARN = {
    **{"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32},
    **{"beta_fast": 8.0, "beta_slow": 1.0},
}
_ROUTED = {"num_experts_per_tok": 3}
_LATENT = {
    **{"moe_intermediate_size": 16, "kv_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12},
    **{"n_routed_experts": 8, "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
    "num_key_value_heads": 6,
}
_LONGROPE = {
    "partial_rotary_factor": 0.75,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "short_factor": [1.0, 1.5, 2.0],
        "long_factor": [2.0, 3.0, 7.0],
    },
}

# transformers' model type and what differs from _SIZES. Windows are shorter than the prompt, so that they matter.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _SIZES | {"num_key_value_heads": 6}),
    "llama-3.1": ("llama", _SIZES | {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama-biased": (
        "llama",
        _SIZES
        | {
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 12,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
    "mistral": ("mistral", _SIZES | {"sliding_window": 11}),
    "qwen2": ("qwen2", _SIZES | {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", _SIZES | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", _SIZES | {"head_dim": 16}),
    "gemma2": (
        "gemma2",
        _SIZES
        | {
            "head_dim": 12,
            "sliding_window": 10,
            "query_pre_attn_scalar": 3,
            "attn_logit_softcapping": 8.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    "qwen2-yarn": ("qwen2", _SIZES | {"rope_parameters": _YARN}),
    "gemma": ("gemma", _SIZES | {"head_dim": 16}),
    "gemma3": (
        "gemma3_text",
        _SIZES
        | {
            "head_dim": 12,
            "sliding_window": 10,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "phi3": ("phi3", _PADDED | _LONGROPE | {"original_max_position_embeddings": 128, "sliding_window": 11}),
    "phi3-long": ("phi3", _PADDED | _LONGROPE | {"original_max_position_embeddings": 32}),
    "olmo2": ("olmo2", _SIZES),
    "granite": (
        "granite",
        _SIZES
        | {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.6, "logits_scaling": 1.5},
    ),
    "smollm3": ("smollm3", _PADDED | {"no_rope_layer_interval": 2}),
    "stablelm": ("stablelm", _SIZES | {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "stablelm-parallel": ("stablelm", _SIZES | {"use_parallel_residual": True, "qk_layernorm": True}),
    "starcoder2": ("starcoder2", _SIZES | {"sliding_window": 11}),
    "gpt_neox": (
        "gpt_neox",
        {key: _SIZES[key] for key in _SIZES if key != "num_key_value_heads"} | {"rotary_pct": 0.5},
    ),
    "cohere": ("cohere", _SIZES | {"use_qk_norm": True, "logit_scale": 1.2}),
    "cohere2": ("cohere2", _SIZES | {"sliding_window": 10, "sliding_window_pattern": 2, "logit_scale": 1.2}),
    "glm": ("glm", _PADDED | {"head_dim": 12, "partial_rotary_factor": 0.67}),
    "glm4": ("glm4", _PADDED | {"head_dim": 16}),
    "internlm3": (
        "internlm3",
        _SIZES
        | {
            "head_dim": 12,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 6.0},
        },
    ),
    "exaone4": ("exaone4", _SIZES | {"sliding_window": 10, "sliding_window_pattern": 2, "rope_parameters": _LLAMA3}),
    "gpt2": ("gpt2", {"vocab_size": 128, "n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 80, "n_inner": 96}),
    "opt": (
        "opt",
        {
            **{"vocab_size": 128, "hidden_size": 48, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 6},
            **{"max_position_embeddings": 80, "word_embed_proj_dim": 48},
        },
    ),
    "mixtral": ("mixtral", _SIZES | _ROUTED | {"num_local_experts": 8, "intermediate_size": 16, "sliding_window": 11}),
    "qwen2-moe": (
        "qwen2_moe",
        _SIZES
        | _ROUTED
        | {
            **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
            **{"shared_expert_intermediate_size": 32, "mlp_only_layers": [0], "num_hidden_layers": 3},
            **{"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
        },
    ),
    "qwen3-moe": (
        "qwen3_moe",
        _SIZES
        | _ROUTED
        | {
            "num_experts": 8,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "head_dim": 16,
            "decoder_sparse_step": 2,
        },
    ),
    "olmoe": (
        "olmoe",
        _SIZES | _ROUTED | {"num_experts": 6, "intermediate_size": 16, "norm_topk_prob": False, "clip_qkv": None},
    ),
    "granite-moe": (
        "granitemoe",
        _SIZES
        | _ROUTED
        | {
            **{"num_local_experts": 8, "intermediate_size": 16, "attention_multiplier": 0.25},
            **{"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 1.5},
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        _SIZES
        | _ROUTED
        | {
            **{"num_local_experts": 8, "intermediate_size": 16, "head_dim": 16, "sliding_window": 10},
            **{"swiglu_limit": 1.5, "rope_parameters": _YARN | {"truncate": False}},
        },
    ),
    "deepseek-v2": (
        "deepseek_v2",
        _SIZES
        | _ROUTED
        | _LATENT
        | {
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.5,
            "rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.4},
        },
    ),
    "deepseek-v3": (
        "deepseek_v3",
        _SIZES | _ROUTED | _LATENT | {"q_lora_rank": 20, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0},
    ),
}


def make_model(case: str, seed: int) -> Any:
    """Build a case's model with weights drawn from `seed`."""
    import torch
    import transformers

    kind, sizes = CASES[case]
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    rng = np.random.default_rng([zlib.crc32(case.encode()), seed])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = rng.standard_normal(tuple(parameter.shape), np.float32) * 0.25
            if parameter is model.get_output_embeddings().weight and model.config.tie_word_embeddings:
                value *= 0.4  # or each token would predict itself
            is_norm = name.endswith("weight") and (parameter.ndim == 1 or "_norm" in name)
            if is_norm and not kind.startswith("gemma"):  # whose norms store the distance from one
                value += 1.0
            parameter.copy_(torch.from_numpy(value))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.from_numpy(rng.standard_normal(tuple(buffer.shape), np.float32) * 0.1))
    return model.eval()


def save(model: Any, folder: Path) -> None:
    """Write a model as it would be published."""
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    if model.config.model_type == "internlm3":  # published with code of its own, and with that code's names
        path = folder / "config.json"
        config = json.loads(path.read_text()) | {"architectures": ["InternLM3ForCausalLM"]}
        config["qkv_bias"], config["bias"] = config.pop("attention_bias"), config.pop("mlp_bias")
        config["rope_scaling"] = config.pop("rope_parameters")
        config["rope_theta"] = config["rope_scaling"].pop("rope_theta")
        path.write_text(json.dumps(config, indent=2) + "\n")


def record(model: Any, prompt: list[int], steps: int) -> dict[str, np.ndarray]:
    """Decode greedily, each time over the whole sequence: no cache that could hide a mistake of its own."""
    import torch

    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(steps):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy()
            tokens.append(int(logits[-1].argmax()))
    assert np.isfinite(logits).all()
    return {
        "prompt": np.asarray(prompt, np.int32),
        "tokens": np.asarray(tokens[len(prompt) :], np.int32),
        "logits": logits,  # [prompt + steps - 1, V]
    }


def make_prompt(case: str, vocab_size: int, seed: int) -> list[int]:
    """Draw the prompt of a case."""
    rng = np.random.default_rng([zlib.crc32(case.encode()), seed, 1])
    return rng.integers(0, vocab_size, PROMPT_TOKENS).tolist()


def load(folder: Path) -> Any:
    """Load a stored model as transformers does."""
    import torch
    import transformers

    options = {"attn_implementation": "eager", "dtype": torch.float32}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def main(cases: list[str]) -> None:
    """Write the golden files of the cases, or of all."""
    if not cases:
        folder = GOLDEN / "stories260K"
        np.savez(folder / "golden.npz", **record(load(folder), STORY_PROMPT, STORY_STEPS))
    for case in cases or CASES:
        folder = GOLDEN / case
        model = make_model(case, seed=SEED)
        golden = record(model, make_prompt(case, model.config.vocab_size, seed=SEED), STEPS)
        save(model, folder)
        (folder / "model.safetensors").chmod(0o644)
        np.savez(folder / "golden.npz", **golden)
        best = np.sort(golden["logits"][PROMPT_TOKENS - 1 :], axis=-1)
        size = sum(file.stat().st_size for file in folder.iterdir()) // 1024
        variety = len(set(golden["tokens"].tolist()))
        print(
            f"{case:14} {size:4} KiB  logits' deviation {golden['logits'].std():.2f}  "
            f"least lead {np.min(best[:, -1] - best[:, -2]):.4f}  different tokens {variety}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
