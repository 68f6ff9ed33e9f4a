"""Cache writes in plain JAX: the reference."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

# A vector's largest coordinate is scaled to it.
LIMITS = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def write_kv(
    qkv: Array,
    k_cache: Array,
    v_cache: Array | None,
    blocks: Array,
    offsets: Array,
    cosine: Array | None,
    sine: Array | None,
    k_scales: Array | None,
    v_scales: Array | None,
    *,
    is_interleaved: bool,
    float8: str | None = None,
) -> tuple[Array, Array, Array | None, Array | None, Array | None]:
    kv_heads = k_cache.shape[1]
    heads = qkv.shape[1] - kv_heads * (1 if v_cache is None else 2)
    q, k, v = jnp.split(qkv, (heads, heads + kv_heads), axis=1)
    if cosine is not None and sine is not None:
        q, k = (rotate(one, cosine, sine, is_interleaved) for one in (q, k))
    k_cache, k_scales = _store(k_cache, k_scales, k, blocks, offsets, float8)
    if v_cache is not None:
        v_cache, v_scales = _store(v_cache, v_scales, v, blocks, offsets, float8)
    return q, k_cache, v_cache, k_scales, v_scales


def rotate(x: Array, cosine: Array, sine: Array, is_interleaved: bool) -> Array:
    """Rotate the first coordinates of each head of `x` [T, H, C] by `cosine` and `sine` [T, F].

    If interleaved, moves first coordinates of pairs before second ones, which preserves products of queries and keys.
    """
    size = 2 * cosine.shape[1]
    cosine, sine = cosine[:, None], sine[:, None]
    wide = x[..., :size].astype(jnp.float32)
    first, second = (wide[..., 0::2], wide[..., 1::2]) if is_interleaved else jnp.split(wide, 2, axis=-1)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., size:]], axis=-1)


def quantize(x: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Quantize vectors [..., C] to a type of `LIMITS`; return numbers, and float32 scales.

    Integers round half up, as all kernels can.
    """
    limit = LIMITS[str(dtype)]
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1) / limit
    scaled = wide / jnp.where(scale > 0, scale, 1.0)[..., None]
    if jnp.issubdtype(dtype, jnp.integer):
        scaled = jnp.floor(scaled + 0.5)
    return jnp.clip(scaled, -limit, limit).astype(dtype), scale


def copy_blocks(k_cache: Array, v_cache: Array | None, sources: Array, targets: Array) -> tuple[Array, Array | None]:
    def copied(cache: Array) -> Array:
        return cache.at[targets].set(cache.at[sources].get(mode="clip"), mode="drop", unique_indices=True)

    return copied(k_cache), None if v_cache is None else copied(v_cache)


def _store(
    cache: Array, scales: Array | None, new: Array, blocks: Array, offsets: Array, float8: str | None
) -> tuple[Array, Array | None]:
    if scales is None:
        new = new.astype(cache.dtype)
    else:
        new, scale = quantize(new, jnp.dtype(float8 or cache.dtype))
        new = new if float8 is None else lax.bitcast_convert_type(new, cache.dtype)
        scales = scales.at[blocks, :, offsets].set(scale, mode="drop", unique_indices=True)
    return cache.at[blocks, :, offsets].set(new, mode="drop", unique_indices=True), scales
