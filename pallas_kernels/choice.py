"""Which implementation of an operation runs where: what each can do, and which one is the default.

Decided once per engine, before anything is compiled. Knows no kernel: their modules are imported when they are chosen,
so that Triton is not needed without a GPU.
"""

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

# The module of each operation's implementations, the reference first. A module has a function named after the
# operation and, unless it can do everything, `refusal(operation, site)`.
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
COMPILED = ("triton", "flashinfer")  # whose functions are told the capability, since they compile when they are traced
OLDEST_TRITON = (3, 6)  # whose kernels take what JAX gives them
# By platform, the best first; the reference, which can do everything, stands behind them all.
PREFERRED: dict[str, dict[str, tuple[str, ...]]] = {
    "cpu": {"linear": ("native",), "paged_decode": ("native", "xla_lanes"), "paged_prefill": ("native",)},
    "gpu": {operation: ("triton",) for operation in MODULES},
}
# Operations whose implementation depends on a program's number of tokens, and the upper bounds of the ranges. Above the
# last bound the reference runs.
SIZES: dict[str, tuple[int, ...]] = {"fused_linear": (2, 16, 32, 64)}
# What was faster than those, by `deciding` facts; `python -m tests.gpu_check` measures it and writes the table.
FASTEST = Path(__file__).with_name("fastest.json")


@dataclass(frozen=True, slots=True)
class Site:
    """Where an operation will run, and on what; sizes are those of one shard."""

    platform: str  # as JAX names it: "cpu", "gpu"
    capability: int | None = None  # of an NVIDIA GPU: 90 for 9.0
    dtype: str = "float32"  # of queries, and of keys and values before they are stored
    cache_dtype: str = "float32"
    heads: int = 1  # of queries
    kv_heads: int = 1
    head_size: int = 64
    value_size: int | None = None  # of values that are the beginning of their keys; None where they are their own
    block_tokens: int = 16
    has_softcap: bool = False  # whether scores are bounded
    shards: int = 1  # of the vocabulary
    kind: str = "float"  # of a weight's numbers
    rounds_rows: bool = False  # that it is multiplied with
    is_deterministic: bool = False  # bits of a token must not depend on what else is computed
    tokens: int = 0  # a program's tokens, for operations in SIZES


@dataclass(frozen=True, slots=True)
class Choice:
    """An implementation that was chosen, with what it must know of where it will run."""

    name: str
    capability: int | None = None
    reason: str = ""  # why it is not the one that would be best
    is_deterministic: bool = False  # as of `Site`
    sizes: tuple[tuple[int, str], ...] = ()  # for operations in SIZES: most tokens, and the implementation up to there

    def of(self, tokens: int) -> Choice:
        """Return the choice for a program with this number of tokens."""
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
    """Return the compute capability of a JAX device, 90 for 9.0; None where it has none."""
    text = str(getattr(device, "compute_capability", None) or "").replace(".", "")
    return int(text) if text.isdigit() else None


def implementations(operation: str) -> tuple[str, ...]:
    """Name the implementations of an operation, the reference first; an unknown operation is a ValueError."""
    if operation not in MODULES:
        raise ValueError(f"{operation!r} is not one of {', '.join(MODULES)}")
    return tuple(MODULES[operation])


def module(operation: str, name: str) -> ModuleType:
    """Import the module that has an implementation; an unknown name is a ValueError."""
    known = implementations(operation)
    if name not in known:
        raise ValueError(f"{operation} has no implementation {name!r}; it has {', '.join(known)}")
    return importlib.import_module(f"pallas_kernels.{MODULES[operation][name]}")


def refusal(operation: str, name: str, site: Site) -> str | None:
    """Say why an implementation cannot do an operation there; None where it can."""
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        version = importlib.metadata.version("triton")
        if tuple(map(int, version.split(".")[:2])) < OLDEST_TRITON:
            return f"it needs triton {'.'.join(map(str, OLDEST_TRITON))}, here is {version}"
    own = module(operation, name)
    return own.refusal(operation, site) if hasattr(own, "refusal") else None


def deciding(operation: str, site: Site) -> dict[str, Any]:
    """Return the facts by which a row of the table of `FASTEST` is found."""
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
    """Read what was measured: rows of deciding facts, the implementation that was fastest, and how it was measured."""
    return json.loads(FASTEST.read_text())


def _preferred(operation: str, site: Site) -> tuple[str, ...]:
    """Name implementations, the best first."""
    facts = deciding(operation, site)
    measured = [row["fastest"] for row in fastest() if facts.items() <= row.items()] if site.platform == "gpu" else []
    return (*measured, *PREFERRED.get(site.platform, {}).get(operation, ()))


def resolve(operation: str, site: Site, name: str | None = None) -> Choice:
    """Choose the implementation of an operation: the one that is named, or the best that can do it there.

    One that is named and cannot do it is a ValueError that says why; nothing takes its place.
    """
    if operation not in SIZES:
        return _resolve(operation, site, name)
    each = [(most, _resolve(operation, replace(site, tokens=most), name)) for most in SIZES[operation]]
    following = [one.name for _, one in each[1:]] + [None]
    sizes = tuple((most, one.name) for (most, one), after in zip(each, following, strict=True) if one.name != after)
    return replace(each[-1][1], sizes=sizes)


def _resolve(operation: str, site: Site, name: str | None) -> Choice:
    """Choose for the site's number of tokens."""
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
