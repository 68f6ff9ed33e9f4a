"""Sampling in plain JAX: the reference, with sorting, and arithmetic common to all samplers.

Vocabulary sums are of integers, independent of order and sharding. Vx: columns of a part.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.random import threefry_2x32

_INT32_MAX = 2**31 - 1
WORD_BITS = 12  # per word of a three-word number; uint32 holds the sum
MOST_TOKENS = (1 << 32 - WORD_BITS) - 1  # larger ones overflow
MASS_BITS = 30  # bound of a row's total mass


def sample(
    logits: Array,
    temperature: Array | None,
    keys: Array | None,
    positions: Array | None,
    top_k: Array | None,
    top_p: Array | None,
    min_p: Array | None,
) -> tuple[Array, Array]:
    is_finite = jnp.all(jnp.isfinite(logits), axis=-1)
    scores = logits
    if temperature is not None:
        assert keys is not None and positions is not None
        is_random = (temperature > 0.0)[:, None]
        divisor = jnp.where(is_random, temperature[:, None], 1.0)
        scaled = logits / divisor
        noise = gumbel(keys, positions, jnp.arange(logits.shape[1], dtype=jnp.int32))
        scores = jnp.where(is_random, scaled + noise, logits)
        # Subtract first: the largest weight is exactly 1.
        weight = jnp.exp((logits - jnp.max(logits, axis=-1, keepdims=True)) / divisor)
        scores = jnp.where(_kept(scaled, weight, top_k, top_p, min_p), scores, -jnp.inf)
    return jnp.argmax(scores, axis=-1).astype(jnp.int32), is_finite


def _kept(scaled: Array, weight: Array, top_k: Array | None, top_p: Array | None, min_p: Array | None) -> Array:
    """Return whether tokens pass the filters, bool[R, V]; `weight` is exp(`scaled` - its row's maximum)."""
    size = scaled.shape[1]
    order = ordered(scaled)
    kept = jnp.ones_like(scaled, jnp.bool_)
    if min_p is not None:
        kept &= weight >= min_p[:, None]
    falling = jnp.argsort(order, axis=-1)[:, ::-1]

    def at_rank(values: Array, rank: Array) -> Array:
        return jnp.take_along_axis(jnp.take_along_axis(values, falling, axis=-1), rank[:, None], axis=-1)

    if top_k is not None:
        limits = (top_k > 0) & (top_k < size)
        last = at_rank(order, jnp.clip(top_k, 1, size) - 1)
        kept &= (order >= last) | ~limits[:, None]
    if top_p is not None:
        mass = jnp.where(kept, masses(weight, from_words(words(weight))), 0)
        wanted = top_p * jnp.sum(mass, axis=-1).astype(jnp.float32)
        summed = jnp.cumsum(jnp.take_along_axis(mass, falling, axis=-1), axis=-1)
        last = at_rank(order, jnp.argmax(summed.astype(jnp.float32) >= wanted[:, None], axis=-1))
        kept &= (order >= last) | ~(top_p < 1.0)[:, None]
    return kept


def gumbel(keys: Array, positions: Array, ids: Array) -> Array:
    """Draw Gumbel noise, f32[R, Vx], of each row's key and position and each token's id.

    Equals `jax.random.gumbel(fold_in(key, position), (V,))` at those ids, so shards can draw theirs
    (jax_threefry_partitionable).
    """
    counters = jnp.stack([jnp.zeros_like(ids), ids]).astype(jnp.uint32)  # high and low words
    tiny = jnp.finfo(jnp.float32).tiny

    def row(key: Array, position: Array) -> Array:
        # Independent of jax_default_prng_impl.
        at_position = jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), position)
        high, low = threefry_2x32(jax.random.key_data(at_position), counters)
        mantissa = (high ^ low) >> 9
        uniform = lax.bitcast_convert_type(mantissa | jnp.uint32(0x3F800000), jnp.float32) - 1.0  # [0, 1)
        return -jnp.log(-jnp.log(jnp.maximum(uniform, tiny)))

    return jax.vmap(row)(keys, positions)


def ordered(values: Array) -> Array:
    """Map floats to int32 in order; equal floats to equal integers."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0.0, 0.0, values), jnp.int32)  # -0.0 equals 0.0
    return jnp.where(bits < 0, bits ^ _INT32_MAX, bits)  # negative floats are reversed


def words(weights: Array) -> Array:
    """Sum this shard's weights, f32[R, Vx] in [0, 1], to 36 fractional bits: three words, u32[R, 3].

    Words of shards add up exactly.
    """
    parts = []
    for _ in range(3):
        weights = weights * float(1 << WORD_BITS)
        whole = jnp.floor(weights)
        parts.append(whole.astype(jnp.uint32))
        weights = weights - whole
    # One pass: 4.2 ms at [16, 152000] on two CPU cores, not 29; a float sum takes 2.3.
    zero = jnp.uint32(0)
    sums = lax.reduce(tuple(parts), (zero,) * 3, lambda left, right: tuple(map(jnp.add, left, right)), (1,))
    return jnp.stack(sums, axis=-1)


def from_words(totals: Array) -> Array:
    high, middle, low = (totals[:, at : at + 1].astype(jnp.float32) for at in range(3))
    return (high + (middle + low * 2.0**-WORD_BITS) * 2.0**-WORD_BITS) * 2.0**-WORD_BITS


def masses(weights: Array, total: Array) -> Array:
    """Scale weights, f32[R, Vx] in [0, 1], to int32[R, Vx] with sums of 2**29 to 2**31; `total` f32[R, 1] is theirs.

    The scale is a power of two.
    """
    exponent = (lax.bitcast_convert_type(total, jnp.int32) >> 23) - 127  # total < 2**(exponent + 1)
    scale = lax.bitcast_convert_type((127 + MASS_BITS - 1 - exponent) << 23, jnp.float32)
    return (weights * scale + 0.5).astype(jnp.int32)
