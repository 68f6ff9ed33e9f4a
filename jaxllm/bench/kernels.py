"""Benchmark all `pallas_kernels` implementations: error against `xla`, and share of memory bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels import Site, measuring

REFERENCE = "xla"
HEADS = {"0.5B": (14, 2, 64), "8B": (32, 8, 128)}  # query heads, KV heads, head size: Qwen2.5-0.5B, Llama 3 8B
READ_BYTES = 256 << 20  # exceeds caches
READ_ROWS = 4096


class Case(NamedTuple):
    """A call to measure."""

    operation: str
    shape: str
    call: Callable[..., Any]  # (implementation, *arrays)
    arrays: tuple[Any, ...]
    num_bytes: int  # minimal traffic


class Measured(NamedTuple):
    """Measurements of one implementation."""

    case: Case
    implementation: str
    microseconds: np.ndarray  # [rounds]
    max_difference: float
    bandwidth_share: float  # relative to summing an array


def make_cases(dtype: str, decode: Sequence[tuple[int, int]], prefill: Sequence[tuple[int, int]]) -> list[Case]:
    """Return attention cases for each model's heads: `decode` by (rows, cached tokens), `prefill` by (rows, tokens)."""
    cases = []
    for model, heads in HEADS.items():
        for size in decode:
            made = measuring.decode(heads, *size, dtype, pool_bytes=1)
            cases.append(_case("paged_decode", model, *size, made))
        cases += [_case("paged_prefill", model, *size, measuring.prefill(heads, *size, dtype)) for size in prefill]
    return cases


def measure(cases: Sequence[Case], num_rounds: int, advance: Callable[[], object]) -> tuple[list[Measured], np.ndarray]:
    source = jnp.ones((READ_ROWS, READ_BYTES // 4 // READ_ROWS), jnp.float32)
    read = jax.jit(lambda array: array.sum(axis=1))
    measured, reads = [], []
    for case in cases:
        names = _able(case)
        calls = {name: jax.jit(partial(case.call, name)) for name in names}
        outputs = {name: np.asarray(call(*case.arrays), np.float32) for name, call in calls.items()}
        seconds_of(read, source)
        taken: dict[str, list[float]] = {name: [] for name in names}
        own_reads = []
        for _ in range(num_rounds):
            own_reads.append(READ_BYTES / seconds_of(read, source))
            for name, call in calls.items():
                taken[name].append(seconds_of(call, *case.arrays))
            advance()
        reads += own_reads
        for name in names:
            speed = case.num_bytes / float(np.median(taken[name]))
            difference = float(np.abs(outputs[name] - outputs[REFERENCE]).max())
            share = speed / float(np.median(own_reads))
            measured.append(Measured(case, name, 1e6 * np.array(taken[name]), difference, share))
    return measured, np.array(reads)


def report(measured: Sequence[Measured], reads: np.ndarray) -> tuple[str, dict[str, Any]]:
    lines = [f"reading an array: {np.median(reads) / 1e9:.1f} GB/s"]
    lines.append(
        f"{'operation':14} {'shape':24} {'kernel':12} {'median us':>10} {'of the bandwidth':>16} {'difference':>11}"
    )
    figures: dict[str, Any] = {"read_bandwidth": float(np.median(reads)), "samples": {}, "max_difference": {}}
    for result in measured:
        name = f"{result.case.operation}_{result.case.shape}_{result.implementation}"
        median = float(np.median(result.microseconds))
        figures[f"median_{name}_us"] = median
        figures[f"{name}_bandwidth_share"] = result.bandwidth_share
        figures["max_difference"][name] = result.max_difference
        figures["samples"][f"{name}_us"] = result.microseconds.tolist()
        lines.append(
            f"{result.case.operation:14} {result.case.shape:24} {result.implementation:12} {median:10.0f} "
            f"{result.bandwidth_share:16.1%} {result.max_difference:11.2g}"
        )
    return "\n".join(lines), figures


def _able(case: Case) -> list[str]:
    device, (q, cache) = jax.devices()[0], case.arrays[:2]
    site = Site(
        platform=device.platform,
        capability=pallas_kernels.capability_of(device),
        dtype=str(q.dtype),
        cache_dtype=str(cache.dtype),
        heads=q.shape[1],
        kv_heads=cache.shape[1],
        head_size=q.shape[2],
        block_tokens=cache.shape[2],
    )
    known = pallas_kernels.implementations(case.operation)
    return [name for name in known if pallas_kernels.refusal(case.operation, name, site) is None]


def seconds_of(call: Callable[..., Any], *arrays: Any) -> float:
    began = time.perf_counter()
    jax.block_until_ready(call(*arrays))
    return time.perf_counter() - began


def _case(operation: str, model: str, rows: int, tokens: int, made: measuring.Case) -> Case:
    def call(implementation: str, *arrays: Any) -> jax.Array:
        out, _ = made.step(implementation)(jnp.int32(0), arrays)
        return out

    return Case(operation, f"{model}_{rows}x{tokens}", call, made.arrays, made.num_bytes)
