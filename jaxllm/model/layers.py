"""Products, norms and rotations of a decoder layer; products accumulate in float32, the others compute in it."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

import pallas_kernels
from jaxllm.model.quantized import Quantized, floats
from jaxllm.model.spec import BandScaling, LinearScaling, NormKind, PairScaling, Rope, YarnScaling


@jax.jit
def linear(x: Array, weight: Array | Quantized[Array], bias: Array | None = None) -> Array:
    """Return `x` [T, in] times `weight` [out, in] plus `bias` [out]: float32 [T, out]."""
    if isinstance(weight, Quantized):
        scheme, arrays = weight.scheme, (weight.values, weight.scales, weight.zeros)
        product = pallas_kernels.linear(x, *arrays, kind=scheme.kind, rounds_rows=scheme.rounds_rows)
    else:
        product = pallas_kernels.linear(x, weight)
    return product if bias is None else product + bias.astype(jnp.float32)


def lookup(table: Array | Quantized[Array], rows: Array, dtype: DTypeLike) -> Array:
    """Return `rows` [T] of `table` [V, D] as `dtype`. Out of range rows are arbitrary."""
    if isinstance(table, Quantized):
        found = Quantized(
            table.values.at[rows].get(mode="clip"),
            *(None if of is None else of.T.at[rows].get(mode="clip").T for of in (table.scales, table.zeros)),
            scheme=table.scheme,
        )
        return floats(found, dtype)
    return table.at[rows].get(mode="clip").astype(dtype)


@partial(jax.jit, static_argnames=("kind", "eps"))
def norm(x: Array, scale: Array, bias: Array | None, kind: NormKind, eps: float, power: Array | None = None) -> Array:
    """Apply RMS norm (Zhang & Sennrich 2019) or layer norm (Ba et al. 2016), in the type of `x`.

    `power` replaces the mean square.
    """
    wide = x.astype(jnp.float32)
    if kind == "layer":
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    power = jnp.mean(jnp.square(wide), axis=-1, keepdims=True) if power is None else power
    wide = wide * lax.rsqrt(power + eps)
    gain = scale.astype(jnp.float32)
    wide = wide * (1.0 + gain if kind == "rms+1" else gain)
    if bias is not None:
        wide = wide + bias.astype(jnp.float32)
    return wide.astype(x.dtype)


def softcap(x: Array, cap: float | None) -> Array:
    """Bound `x` smoothly to ±`cap` (Riviere et al. 2024, §2); None leaves it unchanged."""
    return x if cap is None else jnp.tanh(x / cap) * cap


def inverse_frequencies(rope: Rope) -> np.ndarray:
    """Return the angle per position of each coordinate pair, float32 [size / 2]."""
    frequencies = rope.theta ** -(np.arange(0, rope.size, 2, dtype=np.float64) / rope.size)
    match rope.scaling:
        case LinearScaling(factor):
            frequencies = frequencies / factor
        case BandScaling():
            frequencies = _band(frequencies, rope.scaling)
        case YarnScaling():
            frequencies = _yarn(frequencies, rope.scaling, rope.theta)
        case PairScaling(factors):
            frequencies = frequencies / np.asarray(factors)
    return frequencies.astype(np.float32)


def _band(frequencies: np.ndarray, scaling: BandScaling) -> np.ndarray:
    # llama-models, models/llama3/model.py, apply_scaling; `kept` is the unscaled share.
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


def _yarn(frequencies: np.ndarray, scaling: YarnScaling, theta: float) -> np.ndarray:
    # github.com/jquesnelle/yarn, LlamaYaRNScaledRotaryEmbedding.
    pairs = len(frequencies)

    def coordinate(turns: float) -> float:
        return pairs * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / math.log(theta)

    low, high = coordinate(scaling.fast), coordinate(scaling.slow)
    if scaling.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    slowed = np.clip((np.arange(pairs) - low) / max(high - low, 0.001), 0.0, 1.0)
    return (1.0 - slowed) * frequencies + slowed * frequencies / scaling.factor


def rotation(rope: Rope, positions: Array) -> tuple[Array, Array]:
    """Return cosine and sine, each float32 [T, size / 2]; `positions` are [T], or [dimensions or 1, T]."""
    if positions.ndim == 2 and len(positions) == 1:
        positions = positions[0]
    wide = positions.astype(jnp.float32)
    each = wide[:, None] if wide.ndim == 1 else wide[np.asarray(rope.axes)].T  # of each pair
    angles = each * inverse_frequencies(rope)  # [T, size / 2]
    return jnp.cos(angles) * rope.amplitude, jnp.sin(angles) * rope.amplitude


def relative_bias(table: Array, length: int, buckets: int, distance: int) -> Array:
    """Return relative position biases [H, length, length] from `table` [buckets, H], half for keys after the query."""
    steps = np.arange(1 - length, length)  # key position minus query position
    half = buckets // 2
    values = table[_buckets(np.abs(steps), half, distance) + half * (steps > 0)]  # [2 length - 1, H]
    places = jnp.arange(length)
    return values.T[:, places - places[:, None] + length - 1]


def causal_bias(table: Array, buckets: int, distance: int) -> Array:
    """Return relative position biases [H, distance + 1] of keys before the query."""
    return table[_buckets(np.arange(distance + 1), buckets, distance)].T


def _buckets(steps: np.ndarray, count: int, distance: int) -> np.ndarray:
    """Return the bucket of each step: half are single steps, others logarithmic ranges (Raffel et al. 2020, §2.1)."""
    exact = count // 2
    wide = np.maximum(steps, 1).astype(np.float32)
    far = np.log(wide / exact) / math.log(distance / exact) * (count - exact)
    return np.where(steps < exact, steps, np.minimum(exact + np.trunc(far), count - 1)).astype(np.int32)
