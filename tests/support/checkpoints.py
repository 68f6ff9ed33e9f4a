"""Random checkpoints in the format of Hugging Face, written with the safetensors package and numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from jaxllm.checkpoints import weights
from jaxllm.checkpoints.pooler_files import GENERATING
from jaxllm.families.families import read_spec
from jaxllm.model import sharding
from jaxllm.model.decoder import declare
from jaxllm.model.pooler import Pooler

CONFIG: dict[str, Any] = {
    **{"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 64},
    **{"max_position_embeddings": 64, "num_attention_heads": 8, "num_hidden_layers": 2, "num_key_value_heads": 2},
    **{"head_dim": 8, "vocab_size": 97, "tie_word_embeddings": False},
}


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Draw every tensor of a checkpoint, under its published name and in its published shape.

    Encoder models have no head. Only for families that store each matrix as [out, in], and each expert separately.
    """
    spec, family = read_spec(config)
    pooler = None if config["architectures"][0].endswith(GENERATING) else Pooler("cls")
    declared, rng = declare(spec, head=pooler), np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for layer, own in [(None, declared.top), *enumerate(declared.layers)]:
        for weight in own.values():
            for expert in range(weight.stack or 1):
                pieces: dict[str, list[np.ndarray]] = {}
                for part in weight.parts:
                    width = weight.shape[1:] if weight.stack is None else weight.shape[2:]
                    values = 0.2 * rng.standard_normal((part.rows, *width), np.float32)
                    name = family.tensors[part.name].format(layer, expert)
                    pieces.setdefault(name if name.startswith("lm_head") else family.prefix + name, []).append(values)
                for name, values in pieces.items():
                    tensors[name] = np.concatenate(values)
    return tensors


def write_checkpoint(
    folder: Path, config: dict[str, Any] = CONFIG, tensors: dict[str, np.ndarray] | None = None, files: int = 1
) -> Path:
    """Write config.json and the tensors, in one file or in several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = random_tensors(config) if tensors is None else tensors
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = [f"model-{file + 1:05}-of-{files:05}.safetensors" for file in range(files)]
    places = {name: names[number % files] for number, name in enumerate(tensors)}
    for file in names:
        save_file({name: value for name, value in tensors.items() if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def load(folder: Path, shards: int = 1, dtype: str = "float32", **options: Any) -> Any:
    """Read a checkpoint onto `shards` devices."""
    spec, family = read_spec(weights.read_config(folder))
    return weights.load(folder, spec, family, sharding.make_layout(jax.devices(), shards), dtype, **options)
