"""Choose the implementation of each operation, once per engine."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

# Modules, reference first: a function named as the operation, and, unless all is supported, `refusal`.
MODULES: dict[str, dict[str, str]] = {
    "write_kv": {"xla": "kv_cache.xla", "pallas": "kv_cache.pallas", "triton": "kv_cache.triton_kernels"},
    "paged_decode": {
        "xla": "attention.xla",
        "xla_lanes": "attention.xla_lanes",
        "pallas": "attention.pallas_decode",
        "triton": "attention.triton_decode",
        "native": "native.attention",
        "flashinfer": "native.flashinfer",
    },
    "paged_prefill": {
        "xla": "attention.xla",
        "triton": "attention.triton_kernels",
        "native": "native.attention",
    },
    "sample": {"xla": "sampling.xla", "triton": "sampling.triton_kernels"},
    "linear": {"xla": "linear.xla", "triton": "linear.triton_kernels", "native": "native.linear"},
    "fused_linear": {"xla": "linear.fused_xla", "triton": "linear.fused_triton"},
    "fused_topk": {"xla": "experts.xla", "triton": "experts.triton_kernels"},
    "fused_experts": {"xla": "experts.xla", "triton": "experts.triton_kernels"},
}
COMPILED = ("triton", "flashinfer")  # compiled when traced, for a capability
OLDEST_TRITON = (3, 6)  # older ones reject JAX's buffers
# Best first; the reference is the fallback.
PREFERRED: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": {"linear": ("native",), "paged_decode": ("native", "xla_lanes"), "paged_prefill": ("native",)},
    "gpu": {operation: ("triton",) for operation in MODULES},
}
# Operations chosen by number of tokens, with the ranges' upper bounds.
SIZES: dict[str, tuple[int, ...]] = {"fused_linear": (2, 16, 32, 64)}
# Faster implementations by `deciding` facts, from `python -m tests.gpu_check`.
FASTEST = Path(__file__).with_name("fastest.json")


@dataclass(frozen=True, slots=True)
class Site:
    """Platform and arguments of an operation, per shard."""

    platform: str  # JAX's name: "cpu", "gpu"
    capability: int | None = None  # 90 for NVIDIA's 9.0
    dtype: str = "float32"  # before storage
    cache_dtype: str = "float32"
    heads: int = 1
    kv_heads: int = 1
    head_size: int = 64
    value_size: int | None = None  # for prefixes of keys
    block_tokens: int = 16
    has_softcap: bool = False
    has_bias: bool = False  # of scores, by distance
    looks_ahead: bool = False  # queries of prompts see keys after them, see `last_seen` of `paged_prefill`
    shards: int = 1  # of the vocabulary
    kind: str = "float"  # of weights
    rounds_rows: bool = False
    is_deterministic: bool = False  # no token affects another's bits
    tokens: int = 0  # of the program


@dataclass(frozen=True, slots=True)
class Choice:
    """A chosen implementation and its requirements."""

    name: str
    capability: int | None = None
    reason: str = ""  # why a preferred one is not used
    is_deterministic: bool = False
    sizes: tuple[tuple[int, str], ...] = ()  # most tokens, implementation

    def of(self, tokens: int) -> Choice:
        if not self.sizes:
            return self
        name = next((name for most, name in self.sizes if tokens <= most), "xla")
        return replace(self, name=name, sizes=())

    def __str__(self) -> str:
        if not self.sizes:
            return self.name
        each = [f"{name} up to {most} tokens" for most, name in self.sizes if name != "xla" or len(self.sizes) > 1]
        return ", ".join([*each, "xla"])


def capability_of(device: Any) -> int | None:
    text = str(getattr(device, "compute_capability", None) or "").replace(".", "")
    return int(text) if text.isdigit() else None


def implementations(operation: str) -> tuple[str, ...]:
    if operation not in MODULES:
        raise ValueError(f"{operation!r} is not one of {', '.join(MODULES)}")
    return tuple(MODULES[operation])


def module(operation: str, name: str) -> ModuleType:
    known = implementations(operation)
    if name not in known:
        raise ValueError(f"{operation} has no implementation {name!r}; it has {', '.join(known)}")
    return importlib.import_module(f"pallas_kernels.{MODULES[operation][name]}")


def refusal(operation: str, name: str, site: Site) -> str | None:
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        version = importlib.metadata.version("triton")
        if tuple(map(int, version.split(".")[:2])) < OLDEST_TRITON:
            return f"it needs triton {'.'.join(map(str, OLDEST_TRITON))}, here is {version}"
    if site.has_bias and name != "xla" and operation.startswith("paged_"):
        return "it adds no bias to scores"
    if site.looks_ahead and name not in ("xla", "triton") and operation == "paged_prefill":
        return "its queries see no keys after them, as those of images must"
    own = module(operation, name)
    return own.refusal(operation, site) if hasattr(own, "refusal") else None


def deciding(operation: str, site: Site) -> dict[str, Any]:
    if operation in SIZES:
        own = {"operation": operation, "capability": site.capability, "dtype": site.dtype}
        return own | {"tokens": next((most for most in SIZES[operation] if site.tokens <= most), None)}
    return {
        "operation": operation,
        "capability": site.capability,
        "dtype": site.dtype,
        "cache_dtype": site.cache_dtype,
        "group": site.heads // max(site.kv_heads, 1),
        "head_size": site.head_size,
        "block_tokens": site.block_tokens,
    }


@functools.cache
def fastest() -> list[dict[str, Any]]:
    return json.loads(FASTEST.read_text())


def _preferred(operation: str, site: Site) -> tuple[str, ...]:
    facts = deciding(operation, site)
    measured = [row["fastest"] for row in fastest() if facts.items() <= row.items()] if site.platform == "gpu" else []
    return (*measured, *PREFERRED.get(site.platform, {}).get(operation, ()))


def resolve(operation: str, site: Site, name: str | None = None) -> Choice:
    """Return the named implementation, else the best; raise `ValueError` if the named one is unsupported."""
    if operation not in SIZES:
        return _resolve(operation, site, name)
    each = [(most, _resolve(operation, replace(site, tokens=most), name)) for most in SIZES[operation]]
    following = [one.name for _, one in each[1:]] + [None]
    sizes = tuple((most, one.name) for (most, one), after in zip(each, following, strict=True) if one.name != after)
    return replace(each[-1][1], sizes=sizes)


def _resolve(operation: str, site: Site, name: str | None) -> Choice:
    if name is not None:
        reason = refusal(operation, name, site)
        if reason is not None:
            raise ValueError(f"{operation}={name}: {reason}")
        return Choice(name, site.capability, "", site.is_deterministic)
    reference = implementations(operation)[0]
    reasons = []
    for preferred in _preferred(operation, site):
        reason = refusal(operation, preferred, site)
        if reason is None:
            return Choice(preferred, site.capability, "; ".join(reasons), site.is_deterministic)
        reasons.append(f"not {preferred}: {reason}")
    return Choice(reference, site.capability, "; ".join(reasons), site.is_deterministic)
