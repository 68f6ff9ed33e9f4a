"""Random LoRA adapters for small checkpoints, and checkpoints with an adapter merged."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

# Beginnings of a decoder's modules in models that read images or sound: in transformers 5, before 4.52, in Qwen2.5-VL
# before 4.52, and in a model without the head.
STEMS = ("model.language_model.", "language_model.model.", "model.", "language_model.")


def modules(base: Path, stem: str | None = None) -> dict[str, tuple[int, int]]:
    """Return the linear modules of a checkpoint's decoder: full name to (outputs, inputs).

    `stem` replaces the beginnings of names.
    """
    found = {}
    for name, tensor in load_file(base / "model.safetensors").items():
        if tensor.ndim == 2 and re.search(r"\.\d+\.", name) and name.endswith(".weight") and not _is_of_tower(name):
            own = name.removesuffix(".weight") if stem is None else stem + tail(name).removesuffix(".weight")
            found[own] = tensor.shape[::-1] if _is_transposed(name) else tensor.shape
    return found


def tail(name: str) -> str:
    """Return a name from the list of layers on, which all versions of transformers share.

    >>> tail("model.language_model.layers.0.mlp.up_proj")
    'layers.0.mlp.up_proj'
    """
    return re.sub(r"^.*?(\w+\.\d+\.)", r"\1", name)


def write_adapter(
    folder: Path,
    base: Path | Mapping[str, tuple[int, int]],
    rank: int = 8,
    *,
    targets: Sequence[str] | None = None,
    seed: int = 0,
    strength: float = 0.3,
    stem: str | None = None,
    **config: Any,
) -> Path:
    """Write a random adapter of a checkpoint, or of `modules`, in PEFT's format.

    `targets` are the last parts of module names; None: all. `stem`: see `modules`. `strength` is the size of the change
    of an output, for a random input of size 1.
    """
    random = np.random.default_rng(seed)
    there = modules(base, stem) if isinstance(base, Path) else base
    own = {name: shape for name, shape in there.items() if targets is None or name.split(".")[-1] in targets}
    alpha = config.setdefault("lora_alpha", 2 * rank)
    tensors = {}
    for name, (outputs, inputs) in own.items():
        size = strength * rank / alpha / np.sqrt(rank)
        tensors[f"base_model.model.{name}.lora_A.weight"] = random.standard_normal((rank, inputs), np.float32)
        tensors[f"base_model.model.{name}.lora_A.weight"] /= np.float32(np.sqrt(inputs))
        tensors[f"base_model.model.{name}.lora_B.weight"] = size * random.standard_normal((outputs, rank), np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    named = sorted({name.split(".")[-1] for name in own})
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "target_modules": named, **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file({name: np.ascontiguousarray(each, np.float32) for name, each in tensors.items()}, _weights(folder))
    return folder


def merge(folder: Path, base: Path, adapter: Path) -> Path:
    """Write the checkpoint with a plain adapter merged, as PEFT's `merge_and_unload` does."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(base / "model.safetensors")
    own = {tail(name): values for name, values in load_file(_weights(adapter)).items()}
    for name in modules(base):
        a, b = (own.get(f"{tail(name)}.lora_{part}.weight") for part in "AB")
        if a is not None and b is not None:
            delta = config["lora_alpha"] / config["r"] * (b.astype(np.float64) @ a.astype(np.float64))
            weight = f"{name}.weight"
            tensors[weight] = tensors[weight] + (delta.T if _is_transposed(weight) else delta).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    for file in base.glob("*.json"):
        shutil.copy(file, folder)
    save_file(tensors, folder / "model.safetensors")
    return folder


def _weights(folder: Path) -> Path:
    return folder / "adapter_model.safetensors"


def _is_of_tower(name: str) -> bool:
    return re.search(r"(^|\.)(visual|vision_tower|audio_tower|multi_modal_projector)\.", name) is not None


def _is_transposed(name: str) -> bool:
    return ".c_" in name  # GPT-2's Conv1D
