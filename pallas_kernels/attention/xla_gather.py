"""Paged attention that gathers every block of the table, in plain JAX: the plainest statement of what is computed.

No data-dependent loop, so that a GPU keeps the whole decode step in one CUDA graph. Reads the full width of the table
whatever the lengths are. Letters: B rows, T flat tokens, Y tiles, G query heads per key-value head, S = M · P keys.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.attention.xla import LOWEST, gathered


def paged_decode(
    q: Array,
    k_cache: Array,
    v_cache: Array | None,
    tables: Array,
    lengths: Array,
    sinks: Array | None,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    value_size: int | None,
) -> Array:
    """See `pallas_kernels.paged_decode`."""
    places = (lengths - 1)[:, None]  # [B, 1]
    options = (sinks, k_scales, v_scales, scale, window, softcap, value_size)
    return _attend(q[:, None], k_cache, v_cache, tables, places, *options)[:, 0]


def paged_prefill(
    q: Array,
    k_cache: Array,
    v_cache: Array | None,
    tables: Array,
    tile_start: Array,
    tile_length: Array,
    tile_position: Array,
    sinks: Array | None,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
    *,
    tile: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    value_size: int | None,
) -> Array:
    """See `pallas_kernels.paged_prefill`. Tiles are taken in turn: all at once would hold Y · S keys."""
    tokens = q.shape[0]
    steps = jnp.arange(tile, dtype=jnp.int32)
    is_real = steps < tile_length[:, None]  # [Y, tile]
    rows = tile_start[:, None] + steps  # [Y, tile], of q
    places = jnp.where(is_real, tile_position[:, None] + steps, -1)

    def attend_tile(one: tuple[Array, Array, Array]) -> Array:
        row, table, place = one
        queries = q.at[row].get(mode="clip")[None]  # [1, tile, H, C]
        options = (sinks, k_scales, v_scales, scale, window, softcap, value_size)
        return _attend(queries, k_cache, v_cache, table[None], place[None], *options)[0]

    mixed = lax.map(attend_tile, (rows, tables, places))  # [Y, tile, H, V]
    target = jnp.where(is_real, rows, tokens)
    return jnp.zeros((tokens, *mixed.shape[2:]), q.dtype).at[target].set(mixed, mode="drop")


def _attend(
    q: Array,
    k_cache: Array,
    v_cache: Array | None,
    tables: Array,
    places: Array,
    sinks: Array | None,
    k_scales: Array | None,
    v_scales: Array | None,
    scale: float,
    window: int | None,
    softcap: float | None,
    value_size: int | None,
) -> Array:
    """Attend with q [B, R, H, C] at positions `places` [B, R] (negative: none): [B, R, H, V] in q's type."""
    rows, queries, heads, size = q.shape
    kv_heads = k_cache.shape[1]
    keys = gathered(k_cache, tables, k_scales)  # [B, K, S, C]
    values = keys[..., :value_size] if v_cache is None else gathered(v_cache, tables, v_scales)
    grouped = q.reshape(rows, queries, kv_heads, heads // kv_heads, size)
    key_places = jnp.arange(keys.shape[2], dtype=jnp.int32)  # [S]
    is_seen = key_places <= places[:, :, None]  # [B, R, S]
    if window is not None:
        is_seen &= key_places > places[:, :, None] - window
    is_seen = is_seen[:, None, None]  # [B, 1, 1, R, S]
    scores = jnp.einsum("brkgc,bksc->bkgrs", grouped, keys, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        scores = jnp.tanh(scores / softcap) * softcap
    scores = jnp.where(is_seen, scores, LOWEST)
    highest = jnp.max(scores, axis=-1, keepdims=True)  # [B, K, G, R, 1]
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(kv_heads, heads // kv_heads, 1, 1)
        highest = jnp.maximum(highest, sink)
    weights = jnp.where(is_seen, jnp.exp(scores - highest), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - highest)
    weights = weights / jnp.where(total > 0, total, 1.0)
    # A weight of zero does not silence a NaN, so unwritten places must not reach the product.
    is_written = key_places <= jnp.max(places, axis=1)[:, None]  # [B, S]
    values = jnp.where(is_written[:, None, :, None], values, 0)
    mixed = jnp.einsum("bkgrs,bksc->brkgc", weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    return mixed.reshape(rows, queries, heads, -1).astype(q.dtype)
