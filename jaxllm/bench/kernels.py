"""Each implementation of the operations in `pallas_kernels`: how far from the reference, how near to memory speed.

The reference is `xla`. What a call must read and write, at the least, over its time is compared with the bandwidth of
summing a large array, measured in the same rounds, so that what else the machine does hits all alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels import Site

REFERENCE = "xla"
BLOCK, TILE = 16, 16
HEADS = {"0.5B": (14, 2, 64), "8B": (32, 8, 128)}  # query heads, key-value heads, head size: Qwen2.5-0.5B, Llama 3 8B
READ_BYTES = 256 << 20  # of the array that is summed: far more than caches hold
READ_ROWS = 4096


class Case(NamedTuple):
    """A call that is measured."""

    operation: str
    shape: str  # in words, part of the figures' names
    call: Callable[..., Any]  # (implementation, *arrays)
    arrays: tuple[jax.Array, ...]
    num_bytes: int  # that it cannot do without reading or writing


class Measured(NamedTuple):
    """One implementation of a case."""

    case: Case
    implementation: str
    microseconds: np.ndarray  # [rounds]
    max_difference: float  # from the reference
    bandwidth_share: float  # of what summing an array reached, median against median


def make_cases(dtype: str, decode: Sequence[tuple[int, int]], prefill: Sequence[tuple[int, int]]) -> list[Case]:
    """Make calls for rows with so many cached tokens each, and for prompts of so many tokens at a time."""
    random = np.random.default_rng(0)
    cases = []
    for model, sizes in HEADS.items():
        cases += [_decode(model, sizes, rows, context, dtype, random) for rows, context in decode]
        cases += [_prefill(model, sizes, rows, length, dtype, random) for rows, length in prefill]
    return cases


def measure(cases: Sequence[Case], num_rounds: int, advance: Callable[[], object]) -> tuple[list[Measured], np.ndarray]:
    """Run every implementation of each case in turns with the sum; return what was measured, and bytes a second."""
    source = jnp.ones((READ_ROWS, READ_BYTES // 4 // READ_ROWS), jnp.float32)
    read = jax.jit(lambda array: array.sum(axis=1))
    measured, reads = [], []
    for case in cases:
        names = _able(case)
        calls = {name: jax.jit(partial(case.call, name)) for name in names}
        outputs = {name: np.asarray(call(*case.arrays), np.float32) for name, call in calls.items()}
        _seconds(read, source)
        taken: dict[str, list[float]] = {name: [] for name in names}
        own_reads = []
        for _ in range(num_rounds):
            own_reads.append(READ_BYTES / _seconds(read, source))
            for name, call in calls.items():
                taken[name].append(_seconds(call, *case.arrays))
            advance()
        reads += own_reads
        for name in names:
            speed = case.num_bytes / float(np.median(taken[name]))
            difference = float(np.abs(outputs[name] - outputs[REFERENCE]).max())
            share = speed / float(np.median(own_reads))
            measured.append(Measured(case, name, 1e6 * np.array(taken[name]), difference, share))
    return measured, np.array(reads)


def report(measured: Sequence[Measured], reads: np.ndarray) -> tuple[str, dict[str, Any]]:
    """Write a table, and the figures of a JSON file."""
    lines = [f"reading an array: {np.median(reads) / 1e9:.1f} GB/s"]
    lines.append(
        f"{'operation':14} {'shape':24} {'kernel':12} {'median us':>10} {'of the bandwidth':>16} {'difference':>11}"
    )
    figures: dict[str, Any] = {"read_bandwidth": float(np.median(reads)), "samples": {}, "max_difference": {}}
    for one in measured:
        name = f"{one.case.operation}_{one.case.shape}_{one.implementation}"
        median = float(np.median(one.microseconds))
        figures[f"median_{name}_us"] = median
        figures[f"{name}_bandwidth_share"] = one.bandwidth_share
        figures["max_difference"][name] = one.max_difference
        figures["samples"][f"{name}_us"] = one.microseconds.tolist()
        lines.append(
            f"{one.case.operation:14} {one.case.shape:24} {one.implementation:12} {median:10.0f} "
            f"{one.bandwidth_share:16.1%} {one.max_difference:11.2g}"
        )
    return "\n".join(lines), figures


def _able(case: Case) -> list[str]:
    """Name the implementations that can do a case on this process's device."""
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


def _seconds(call: Callable[..., Any], *arrays: jax.Array) -> float:
    began = time.perf_counter()
    jax.block_until_ready(call(*arrays))
    return time.perf_counter() - began


def _decode(
    model: str, sizes: tuple[int, int, int], rows: int, context: int, dtype: str, random: np.random.Generator
) -> Case:
    """One query for each of `rows` sequences of `context` tokens."""
    heads, kv_heads, size = sizes
    keys, values, tables = _cache(rows, context, kv_heads, size, dtype, random)
    q = _normal((rows, heads, size), dtype, random)
    lengths = jnp.full(rows, context, jnp.int32)

    def call(implementation: str, *arrays: jax.Array) -> jax.Array:
        return pallas_kernels.paged_decode(*arrays, scale=size**-0.5, implementation=implementation)

    num_bytes = 2 * rows * context * kv_heads * size * keys.dtype.itemsize + 2 * q.nbytes
    shape = f"{model}_{rows}x{context}"
    return Case("paged_decode", shape, call, (q, keys, values, tables, lengths), num_bytes)


def _prefill(
    model: str, sizes: tuple[int, int, int], rows: int, length: int, dtype: str, random: np.random.Generator
) -> Case:
    """Whole prompts of `length` tokens, `rows` of them."""
    heads, kv_heads, size = sizes
    keys, values, tables = _cache(rows, length, kv_heads, size, dtype, random)
    q = _normal((rows * length, heads, size), dtype, random)
    tiles = -(-length // TILE)
    position = np.tile(np.arange(tiles) * TILE, rows)
    start = np.repeat(np.arange(rows) * length, tiles) + position
    lengths = np.minimum(TILE, length - position)
    places = [jnp.asarray(array, jnp.int32) for array in (start, lengths, position)]

    def call(implementation: str, *arrays: jax.Array) -> jax.Array:
        return pallas_kernels.paged_prefill(*arrays, tile=TILE, scale=size**-0.5, implementation=implementation)

    num_bytes = 2 * rows * length * kv_heads * size * keys.dtype.itemsize + 2 * q.nbytes
    arrays = (q, keys, values, jnp.repeat(tables, tiles, axis=0), *places)
    return Case("paged_prefill", f"{model}_{rows}x{length}", call, arrays, num_bytes)


def _cache(
    rows: int, context: int, kv_heads: int, size: int, dtype: str, random: np.random.Generator
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Make keys and values [N, K, P, C] and the tables [B, M] of sequences whose blocks lie in random order."""
    blocks = -(-context // BLOCK)
    keys, values = (_normal((rows * blocks, kv_heads, BLOCK, size), dtype, random) for _ in range(2))
    return keys, values, jnp.asarray(random.permutation(rows * blocks).reshape(rows, blocks), jnp.int32)


def _normal(shape: tuple[int, ...], dtype: str, random: np.random.Generator) -> jax.Array:
    return jnp.asarray(random.standard_normal(shape, np.float32), dtype)
