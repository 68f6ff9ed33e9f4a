"""Time operations on a device, with inputs larger than its caches.

Each iteration of a program depends on the previous; subtracts dispatch time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels import api
from pallas_kernels.api import SCALED
from pallas_kernels.choice import Choice

BLOCK, TILE = 16, 32  # tokens, queries
POOL_BYTES = 256 << 20  # several H200 caches
ROUNDS = 5
_NEVER = 12345.0  # not in results; unknown to XLA

# (iteration, arrays) -> (result, next arrays)
Step = Callable[[Array, Any], tuple[Array, Any]]


class Case(NamedTuple):
    """An operation with its arguments and minimal work."""

    step: Callable[[str | Choice | None], Step]
    arrays: Any
    num_bytes: int
    flops: int


def seconds(step: Step, arrays: Any, turns: int, rounds: int = ROUNDS) -> float:
    """Return the median seconds per iteration; donates `arrays`."""

    def turn(number: Array, carry: tuple[Array, Any]) -> tuple[Array, Any]:
        late, arrays = carry
        result, arrays = step(number + late, arrays)
        return (result.ravel()[0] == _NEVER).astype(jnp.int32), arrays

    # XLA's CUDA graphs exclude loops: the host would launch their few kernels.
    unroll = 1 if jax.default_backend() == "cpu" else 8

    def repeat(arrays: Any) -> tuple[Array, Any]:
        return lax.fori_loop(0, turns, turn, (jnp.int32(0), arrays), unroll=unroll)

    run = jax.jit(repeat, donate_argnums=0)
    nothing = jax.jit(lambda late: late + 1)
    late, arrays = jax.block_until_ready(run(arrays))
    jax.block_until_ready(nothing(late))
    taken, idle = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        late, arrays = jax.block_until_ready(run(arrays))
        between = time.perf_counter()
        jax.block_until_ready(nothing(late))
        taken.append(between - began)
        idle.append(time.perf_counter() - between)
    return max(statistics.median(taken) - statistics.median(idle), 1e-9) / turns


def noise(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Array:
    """Return varied numbers from -1.7 to 1.7 (int8: 127), without temporary arrays."""
    size = 127.0 if jnp.dtype(dtype) == jnp.int8 else 1.7

    def make() -> Array:
        rest = int(np.prod(shape[1:]))
        rows, columns = (lax.broadcasted_iota(jnp.float32, (shape[0], rest), axis) for axis in (0, 1))
        wave = jnp.sin(rows * 0.618 + columns * (1.37 + rows % 7 * 0.11) + seed) * size
        return wave.astype(dtype).reshape(shape)

    return jax.jit(make)()


def decode(
    heads: tuple[int, int, int],
    rows: int,
    context: int,
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
    pool_bytes: int = POOL_BYTES,
    value_size: int | None = None,
) -> Case:
    """Return a case of `rows` queries; `heads` are query heads, KV heads and head size.

    With `value_size`, values are prefixes of keys.
    """
    num_heads, kv_heads, size = heads
    cache_dtype = cache_dtype or dtype
    need = rows * -(-context // BLOCK)
    arrays = 1 if value_size else 2
    block_bytes = arrays * kv_heads * BLOCK * (size * jnp.dtype(cache_dtype).itemsize + 4 * (cache_dtype in SCALED))
    copies = max(1, -(-pool_bytes // (need * block_bytes)))
    k, v, k_scales, v_scales = _cache(copies * need, kv_heads, size, cache_dtype, value_size is None)
    tables = jnp.asarray(np.random.default_rng(0).permutation(need).reshape(rows, -1), jnp.int32)
    q = noise((rows, num_heads, size), dtype, 3)
    lengths = jnp.full(rows, context, jnp.int32)

    def step(implementation: str | Choice | None) -> Step:
        def attend(turn: Array, arrays: Any) -> tuple[Array, Any]:
            q, k, v, tables, lengths, k_scales, v_scales = arrays
            options = {"scale": size**-0.5, "k_scales": k_scales, "v_scales": v_scales, "value_size": value_size}
            moved = tables + turn % copies * need
            out = api.paged_decode(q, k, v, moved, lengths, **options, implementation=implementation)
            return out, arrays

        return attend

    both = size + (value_size or size)
    num_bytes = rows * context * block_bytes // BLOCK + q.nbytes * both // size
    flops = 2 * rows * context * num_heads * both
    return Case(step, (q, k, v, tables, lengths, k_scales, v_scales), num_bytes, flops)


def prefill(
    heads: tuple[int, int, int],
    rows: int,
    length: int,
    dtype: str = "bfloat16",
    cache_dtype: str | None = None,
    value_size: int | None = None,
) -> Case:
    num_heads, kv_heads, size = heads
    cache_dtype = cache_dtype or dtype
    blocks, tiles = -(-length // BLOCK), -(-length // TILE)
    k, v, k_scales, v_scales = _cache(rows * blocks, kv_heads, size, cache_dtype, value_size is None)
    tables = np.random.default_rng(0).permutation(rows * blocks).reshape(rows, blocks)
    position = np.tile(np.arange(tiles) * TILE, rows)
    start = np.repeat(np.arange(rows) * length, tiles) + position
    count = np.minimum(TILE, length - position)
    places = [jnp.asarray(array, jnp.int32) for array in (np.repeat(tables, tiles, axis=0), start, count, position)]
    q = noise((rows * length, num_heads, size), dtype, 3)

    def step(implementation: str | Choice | None) -> Step:
        def attend(turn: Array, arrays: Any) -> tuple[Array, Any]:
            q, k, v, tables, start, count, position, k_scales, v_scales = arrays
            options = {"tile": TILE, "scale": size**-0.5, "k_scales": k_scales, "v_scales": v_scales}
            options["value_size"] = value_size
            start = start + turn // (1 << 20)  # depends on the previous iteration
            out = api.paged_prefill(q, k, v, tables, start, count, position, **options, implementation=implementation)
            return out, arrays

        return attend

    scored = length * (length + 1) // 2
    both = size + (value_size or size)
    num_bytes = sum(array.nbytes for array in (k, v, k_scales, v_scales) if array is not None) + q.nbytes * both // size
    flops = 2 * rows * scored * num_heads * both
    return Case(step, (q, k, v, *places, k_scales, v_scales), num_bytes, flops)


def products(
    width: int, qkv: int, ffn_width: int, tokens: int, dtype: str = "bfloat16", pool_bytes: int = POOL_BYTES
) -> Case:
    """Return `fused_linear` products of enough layers to exceed caches, with the first qkv columns as attention."""
    sizes = ((qkv, width), (width, width), (2 * ffn_width, width), (width, ffn_width))
    layer_bytes = sum(rows * columns for rows, columns in sizes) * jnp.dtype(dtype).itemsize
    layers = [
        tuple(noise(size, dtype, 4 * layer + number) for number, size in enumerate(sizes))
        for layer in range(-(-pool_bytes // layer_bytes))
    ]
    x, gain = noise((tokens, width), dtype, 1), noise((width,), dtype, 2)

    def step(implementation: str | Choice | None) -> Step:
        def run(turn: Array, arrays: Any) -> tuple[Array, Any]:
            x, gain, layers = arrays
            norm = api.Norm(gain, 1e-5)
            multiply = partial(api.fused_linear, implementation=implementation)
            out = x + (turn // (1 << 20)).astype(x.dtype)  # depends on `turn`
            for qkv, own, up, down in layers:
                heads = multiply(out, qkv, norm=norm)
                out = multiply(heads[:, :width], own, residual=out)
                out = multiply(multiply(out, up, norm=norm, activation="silu"), down, residual=out)
            return out, arrays

        return run

    num_bytes = len(layers) * layer_bytes
    return Case(step, (x, gain, layers), num_bytes, 2 * tokens * num_bytes // jnp.dtype(dtype).itemsize)


def _cache(
    blocks: int, kv_heads: int, size: int, dtype: str, has_values: bool
) -> tuple[Array, Array | None, Array | None, Array | None]:
    shape = (blocks, kv_heads, BLOCK, size)
    k, v = noise(shape, dtype, 1), noise(shape, dtype, 2) if has_values else None
    if dtype not in SCALED:
        return k, v, None, None
    scale = 1 / 64 if dtype == "int8" else 1.0
    k_scales, v_scales = (jnp.abs(noise(shape[:3], "float32", seed)) * scale for seed in (4, 5))
    return k, v, k_scales, v_scales if has_values else None
