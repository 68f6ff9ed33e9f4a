"""The report of `jaxllm doctor`: versions, devices, memory, caches, and choices for a model."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path
from typing import Any

import jax
import psutil

from jaxllm.bench.environment import versions
from jaxllm.checkpoints import weights
from jaxllm.config import EngineConfig
from jaxllm.errors import UserError
from jaxllm.setup.memory_plan import MemoryPlan, size
from jaxllm.setup.model_setup import (
    CPU_CEILING,
    CPU_SHARE,
    Setup,
    describe_memory,
    free_bytes,
    kernel_reasons,
    plan_memory,
    prepare,
)
from jaxllm.text.tokenizer import load_tokenizer
from jaxllm.version import __version__

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "jax-triton",
    "triton",
    "flax",
    "orbax-checkpoint",
    "numpy",
    "tokenizers",
    "transformers",
    "huggingface_hub",
)
OPTIONAL = {"jax-cuda12-plugin", "jax-cuda13-plugin", "jax-triton", "triton", "transformers"}  # in extras


def examine(config: EngineConfig) -> dict[str, Any]:
    """Return JSON values: "problems" prevent a run, "advice" lists improvements."""
    problems, advice = [], []
    found = dict(versions(PACKAGES))
    problems += [f"{name} is not installed." for name in PACKAGES if name not in OPTIONAL and name not in found]
    model: dict[str, Any] = {"name": config.model}
    devices: list[dict[str, Any]] = []
    shared: dict[str, Any] = {}
    try:
        choices, shared = _choices(config)
        model |= choices
        devices = [_device(device) for device in jax.devices()]
    except (UserError, RuntimeError) as error:  # JAX cannot initialize a backend
        problems.append(" ".join(str(error).split()))
    cache = _cache(config.cache_dir())
    if not cache["is_writable"]:
        advice.append(
            f"{cache['folder']} cannot be written: every start compiles all programs. Set --compilation-cache-dir "
            "or JAXLLM_CACHE_DIR."
        )
    if has_nvidia_gpu() and all(device["platform"] == "cpu" for device in devices):
        advice.append("There is an NVIDIA GPU but JAX does not see it: install jaxllm[cuda12] or jaxllm[cuda13].")
    return {
        "usable": not problems,
        "problems": problems,
        "advice": advice,
        "versions": {
            **{"python": platform.python_version(), "jaxllm": __version__},
            **{name: found.get(name) for name in PACKAGES},
        },
        "devices": devices,
        "host": {
            "cpus": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "free_bytes": psutil.virtual_memory().available,
        },
        "cache": cache,
        "model": model,
        "memory": shared,
    }


def describe(report: dict[str, Any]) -> str:
    sections = {
        "versions": [f"{name} {version or '-'}" for name, version in report["versions"].items()],
        "devices": [_describe_device(device) for device in report["devices"]],
        "host": [
            f"{report['host']['cpus']} CPUs, {size(report['host']['free_bytes'])} of "
            f"{size(report['host']['memory_bytes'])} free"
        ],
        "compiled programs": [
            f"{report['cache']['folder']}: {report['cache']['programs']} programs, {size(report['cache']['bytes'])}"
        ],
        f"model {report['model']['name']}": [
            f"{name}: {entry['value']} ({entry['why']})"
            for name, entry in report["model"].items()
            if isinstance(entry, dict)
        ],
        "memory": report["memory"].get("table", []),
        "advice": report["advice"],
        "problems": report["problems"] or ["none: the model can run"],
    }
    return "\n".join(
        line for title, lines in sections.items() if lines for line in (title, *(f"  {one}" for one in lines))
    )


def _device(device: jax.Device) -> dict[str, Any]:  # pyright: ignore[reportInvalidTypeForm]
    memory = device.memory_stats() or {}  # None on a CPU
    return {
        "id": device.id,
        "platform": device.platform,
        "kind": device.device_kind,
        "memory_bytes": memory.get("bytes_limit"),
        "used_bytes": memory.get("bytes_in_use"),
    }


def _describe_device(device: dict[str, Any]) -> str:
    text = f"{device['platform']} {device['id']}: {device['kind']}"
    if device["memory_bytes"] is None:
        return text
    return f"{text}, {size(device['used_bytes'])} of {size(device['memory_bytes'])} in use"


def _cache(folder: Path) -> dict[str, Any]:
    """Report a folder's programs, bytes and if it is writable; JAX's files end in "-cache", jaxllm's in ".program"."""
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return {
        "folder": str(folder),
        "programs": sum(path.name.endswith(("-cache", ".program")) for path in files),
        "bytes": sum(path.stat().st_size for path in files),
        "is_writable": nearest.is_dir() and os.access(nearest, os.W_OK),
    }


def has_nvidia_gpu() -> bool:
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def _choices(config: EngineConfig) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    is_local = Path(config.model).expanduser().is_dir()
    setup = prepare(config, needs_weights=False)
    if is_local:
        weights.check(setup.folder, setup.spec, setup.family, setup.layout)
    if not config.skip_tokenizer_init:
        load_tokenizer(config.tokenizer or setup.folder)
    described = weights.abstract(setup.spec, setup.layout, setup.dtype)
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(described))
    plan = plan_memory(config, setup, free_bytes(setup))
    if setup.prepared:
        kind = f"recorded by `jaxllm compile` in {config.cache_dir()}"
    else:
        kind = f"the default on {'a CPU' if setup.platform == 'cpu' else 'a GPU'}"
    shortened = plan.max_model_len < setup.max_model_len
    chosen = {
        "folder": (str(setup.folder), "local" if is_local else "from the hub"),
        "parameters": (num_parameters, f"{size(plan.need.weights)} on each device"),
        "device": (setup.platform, "JAX's default" if config.device == "auto" else "asked for"),
        "deterministic": (config.deterministic, _asked(config, "deterministic")),
        "tensor_parallel_size": (config.tensor_parallel_size, _asked(config, "tensor_parallel_size")),
        "pipeline_parallel_size": (config.pipeline_parallel_size, _asked(config, "pipeline_parallel_size")),
        "dtype": (setup.dtype.name, _dtype_reason(config, setup)),
        "quantization": _quantization(config, setup),
        "kv_cache_dtype": (setup.float8 or setup.cache_dtype.name, _asked(config, "kv_cache_dtype")),
        "max_model_len": (
            plan.max_model_len,
            f"reduced from {setup.max_model_len}: the KV blocks hold no more"
            if shortened
            else ("the model's context length" if not setup.prepared else kind)
            if config.max_model_len is None
            else "asked for",
        ),
        "max_num_batched_tokens": (setup.max_num_batched_tokens, _default(config, "max_num_batched_tokens", kind)),
        "max_num_seqs": (setup.max_num_seqs, _default(config, "max_num_seqs", kind)),
        "block_size": (config.block_size, _asked(config, "block_size")),
        "num_kv_blocks": (
            plan.num_blocks,
            kind if plan.num_blocks == setup.prepared.get("num_kv_blocks") else _blocks_reason(config, setup),
        ),
        **({"blocks of windowed layers": (plan.num_window_blocks, _window_reason(plan))} if plan.need.windowed else {}),
        **{
            f"kernel {name}": (str(setup.kernels[name]), why)
            for name, why in kernel_reasons(config, setup.platform, setup.kernels).items()
        },
    }
    shared = {
        "free_bytes": plan.device.free,
        "weight_bytes": plan.need.weights,
        "temporary_bytes": plan.need.temporaries,
        "slot_bytes": plan.need.slots,
        "kv_bytes": plan.kv_bytes,
        "table": describe_memory(plan, setup).splitlines(),
    }
    return {name: {"value": value, "why": why} for name, (value, why) in chosen.items()}, shared


def _asked(config: EngineConfig, name: str) -> str:
    return "the default" if getattr(config, name) == EngineConfig.__dataclass_fields__[name].default else "asked for"


def _default(config: EngineConfig, name: str, kind: str) -> str:
    return kind if getattr(config, name) is None else "asked for"


def _quantization(config: EngineConfig, setup: Setup) -> tuple[str, str]:
    stored = setup.family.stored
    if stored is not None:
        return f"{stored.method}, {stored.scheme.kind}", "how the checkpoint is stored"
    return config.quantization or "none", _asked(config, "quantization")


def _dtype_reason(config: EngineConfig, setup: Setup) -> str:
    if config.dtype != "auto":
        return "asked for"
    return "the default on a CPU" if setup.platform == "cpu" else "the checkpoint's, or bfloat16 for float32"


def _window_reason(plan: MemoryPlan) -> str:
    assert plan.need.windowed is not None
    return f"a window of {plan.need.windowed.window} tokens for as many requests as those hold"


def _blocks_reason(config: EngineConfig, setup: Setup) -> str:
    if config.num_kv_blocks is not None:
        return "asked for"
    if config.kv_cache_memory_bytes is not None:
        return f"as many as fit into {size(config.kv_cache_memory_bytes)}, as asked for"
    if setup.platform == "cpu":
        return f"at most {CPU_SHARE:.0%} of the free memory, {size(CPU_CEILING)} and what all requests could use"
    return f"about as many as fit into {config.gpu_memory_utilization:.0%} of the memory with weights and programs"
