"""The embedded model and its EAGLE-3 head, grown to the 0.5B shape: the same tokens, at that shape's cost.

The small weights are embedded in matrices of zeros, and layers of zeros, which preserve the residual stream, are added.
So the gain of a head with a larger model can be measured with learned outputs and acceptance, without a larger model.

Rotary embedding rotates dimensions (i, i + 32) of 64 by the angle of (i / 2, i / 2 + 16) of 32: a small head's values
occupy every second place. The mean square over 896 values, of which 192 are nonzero, is smaller, which norms' weights
and epsilon compensate, as the queries' weights do for attention's scale.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks import shapes
from jaxllm.embedded import HEADS, MODEL_DIR

HEAD_DIM = 64
SIZES = {
    "head_dim": HEAD_DIM,
    **{
        key: shapes.SHAPES["qwen2.5-0.5b"][key]
        for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    },
}
DRAFT_VOCABULARY = 32000  # of published heads
WIDTH, INNER = "hidden_size", "intermediate_size"
AXES = {  # of a matrix's rows and columns, by the last part of its name: heads, or a field of config.json
    **{"q_proj": ("queries", WIDTH), "k_proj": ("shared", WIDTH), "v_proj": ("shared", WIDTH)},
    **{"o_proj": (WIDTH, "queries"), "gate_proj": (INNER, WIDTH), "up_proj": (INNER, WIDTH)},
    **{"down_proj": (WIDTH, INNER), "embed_tokens": ("vocab_size", WIDTH)},
    **{"lm_head": ("draft_vocab_size", WIDTH), "fc": (WIDTH, WIDTH)},
}


def folders() -> tuple[Path, Path]:
    """Write the model and its head in float32, unless they exist; return their folders."""
    model, head = shapes.FOLDER / "grown", shapes.FOLDER / "grown-head"
    if not (head / "model.safetensors").exists():
        _write(MODEL_DIR, model, {"num_hidden_layers": shapes.SHAPES["qwen2.5-0.5b"]["num_hidden_layers"]})
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            (model / name).write_bytes((MODEL_DIR / name).read_bytes())
        wide = {"target_hidden_size": SIZES["hidden_size"], "draft_vocab_size": DRAFT_VOCABULARY}
        _write(HEADS["jaxllm-eagle"], head, wide)
    return model, head


def _write(source: Path, folder: Path, sizes: dict[str, int]) -> None:
    small = json.loads((source / "config.json").read_text())
    large = small | SIZES | sizes | {"torch_dtype": "float32"}
    large["rms_norm_eps"] = small["rms_norm_eps"] * small["hidden_size"] / large["hidden_size"]
    tensors = {
        name: _grown(name.removesuffix(".weight").rsplit(".", 1)[-1], value, small, large)
        for name, value in load_file(source / "model.safetensors").items()
    }
    last = f"model.layers.{small['num_hidden_layers'] - 1}."
    for name in [name for name in tensors if name.startswith(last)]:
        for layer in range(small["num_hidden_layers"], large["num_hidden_layers"]):
            tensors[name.replace(last, f"model.layers.{layer}.")] = np.zeros_like(tensors[name])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(large, indent=1))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})


def _grown(part: str, value: np.ndarray, small: dict[str, Any], large: dict[str, Any]) -> np.ndarray:
    """Embed one tensor of the small model in the large one's."""
    if part == "d2t":  # additional entries name the vocabulary's end, where no token is likely
        offset = large["vocab_size"] - large["draft_vocab_size"]
        return np.concatenate([value, np.full(large["draft_vocab_size"] - len(value), offset, value.dtype)])
    if part == "t2d":
        return np.concatenate([value, np.zeros(large["vocab_size"] - len(value), value.dtype)])
    value = value.astype(np.float32) if value.dtype == ml_dtypes.bfloat16 else value
    if part.endswith("norm"):
        value = value * np.float32((small["hidden_size"] / large["hidden_size"]) ** 0.5)
    elif part == "q_proj":
        value = value * np.float32((HEAD_DIM / small["head_dim"]) ** 0.5)
    axes = [_axis(kind, small, large) for kind in AXES.get(part, (WIDTH,))]
    at, size = axes[-1]
    count = value.shape[-1] // len(at)  # vectors that a head reads concatenated
    axes[-1] = np.concatenate([at + number * size for number in range(count)]), count * size
    placed = np.zeros([size for _, size in axes], np.float32)
    placed[np.ix_(*(at for at, _ in axes))] = value
    return placed


def _axis(kind: str, small: dict[str, Any], large: dict[str, Any]) -> tuple[np.ndarray, int]:
    """Return the indices of the small axis in the large one, and the large size."""
    if kind in ("queries", "shared"):
        heads, shared = small["num_attention_heads"], small["num_key_value_heads"]
        group, wide_group = heads // shared, large["num_attention_heads"] // large["num_key_value_heads"]
        if kind == "shared":
            starts, count = np.arange(shared), large["num_key_value_heads"]
        else:
            number = np.arange(heads)
            starts, count = number // group * wide_group + number % group, large["num_attention_heads"]
        within = np.arange(small["head_dim"]) * HEAD_DIM // small["head_dim"]
        return (starts[:, None] * HEAD_DIM + within).ravel(), count * HEAD_DIM
    return np.arange(small[kind]), large[kind]
