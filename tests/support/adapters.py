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


def modules(base: Path) -> dict[str, tuple[int, int]]:
    """Return the linear modules of a checkpoint's layers: full name to (outputs, inputs)."""
    found = {}
    for name, tensor in load_file(base / "model.safetensors").items():
        if tensor.ndim == 2 and re.search(r"\.\d+\.", name) and name.endswith(".weight"):
            found[name.removesuffix(".weight")] = tensor.shape[::-1] if _is_transposed(name) else tensor.shape
    return found


def write_adapter(
    folder: Path,
    base: Path | Mapping[str, tuple[int, int]],
    rank: int = 8,
    *,
    targets: Sequence[str] | None = None,
    seed: int = 0,
    strength: float = 0.3,
    **config: Any,
) -> Path:
    """Write a random adapter of a checkpoint, or of `modules`, in PEFT's format.

    `targets` are the last parts of module names; None: all. `strength` is the size of the change of an output, for a
    random input of size 1.
    """
    random = np.random.default_rng(seed)
    there = modules(base) if isinstance(base, Path) else base
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
    tensors, own = load_file(base / "model.safetensors"), load_file(_weights(adapter))
    for name in modules(base):
        a, b = (own.get(f"base_model.model.{name}.lora_{part}.weight") for part in "AB")
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


def _is_transposed(name: str) -> bool:
    return ".c_" in name  # GPT-2's Conv1D
