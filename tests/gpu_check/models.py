"""Folders of models without weights, and the bytes that their steps read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import shapes

CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": shapes.SHAPES["qwen2.5-0.5b"],
    "Llama-3.1-8B": shapes.SHAPES["llama-3.1-8b"],
}
_TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
_TINY_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def tiny(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config of the same family that is fast on a CPU."""
    return config | _TINY | _TINY_HEADS


def write_config(config: dict[str, Any], folder: Path, dtype: str) -> Path:
    """Write a model's folder without weights, unless it exists."""
    if (folder / "tokenizer.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    stored = config | {"torch_dtype": dtype, "bos_token_id": None, "eos_token_id": None}
    (folder / "config.json").write_text(json.dumps(stored))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    shapes.tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    return folder


def weights_of(config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Return every tensor of a checkpoint, including an untied head."""
    found = shapes.weights_of(config)
    if not config["tie_word_embeddings"]:
        found.append(("lm_head.weight", (config["vocab_size"], config["hidden_size"])))
    return found


def read_bytes(config: dict[str, Any], itemsize: int) -> int:
    """Return the bytes of weights that a step reads: all, except unread rows of untied embeddings."""
    is_tied = config["tie_word_embeddings"]
    named = (dims for name, dims in weights_of(config) if is_tied or "embed" not in name)
    return itemsize * sum(int(np.prod(dims)) for dims in named)


def kv_bytes(config: dict[str, Any], itemsize: int) -> int:
    """Return the bytes of keys and values of one token, all layers together."""
    size = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return 2 * itemsize * config["num_hidden_layers"] * config["num_key_value_heads"] * size
