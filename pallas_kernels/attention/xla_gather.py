"""Paged attention that gathers every block of the table, in plain JAX: the plainest statement of what is computed.

No data-dependent loop, so that a GPU keeps the whole decode step in one CUDA graph. Reads the full width of the table
whatever the lengths are. Letters: B rows, T flat tokens, Y tiles, G query heads per key-value head, S = M · P keys.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.attention.arguments import AttentionArgs, Tiles
from pallas_kernels.attention.xla import LOWEST, keys_and_values


def paged_decode(q: Array, lengths: Array, args: AttentionArgs) -> Array:
    """See `pallas_kernels.paged_decode`."""
    places = (lengths - 1)[:, None]  # [B, 1]
    return _attend(q[:, None], places, args.tables, args)[:, 0]


def paged_prefill(q: Array, tiles: Tiles, args: AttentionArgs, *, tile: int) -> Array:
    """See `pallas_kernels.paged_prefill`. Tiles are taken in turn: all at once would hold Y · S keys."""
    tokens = q.shape[0]
    steps = jnp.arange(tile, dtype=jnp.int32)
    is_real = steps < tiles.length[:, None]  # [Y, tile]
    rows = tiles.start[:, None] + steps  # [Y, tile], of q
    places = jnp.where(is_real, tiles.position[:, None] + steps, -1)

    def attend_tile(one: tuple[Array, Array, Array]) -> Array:
        row, table, place = one
        queries = q.at[row].get(mode="clip")[None]  # [1, tile, H, C]
        return _attend(queries, place[None], table[None], args)[0]

    mixed = lax.map(attend_tile, (rows, args.tables, places))  # [Y, tile, H, V]
    target = jnp.where(is_real, rows, tokens)
    return jnp.zeros((tokens, *mixed.shape[2:]), q.dtype).at[target].set(mixed, mode="drop")


def _attend(q: Array, places: Array, tables: Array, args: AttentionArgs) -> Array:
    """Attend with q [B, R, H, C] at positions `places` [B, R] (negative: none): [B, R, H, V] in q's type."""
    rows, queries, heads, size = q.shape
    kv_heads, window, softcap, sinks = args.kv_heads, args.window, args.softcap, args.sinks
    keys, values = keys_and_values(args, tables)  # [B, K, S, C] and [B, K, S, V]
    grouped = q.reshape(rows, queries, kv_heads, heads // kv_heads, size)
    key_places = jnp.arange(keys.shape[2], dtype=jnp.int32)  # [S]
    is_seen = key_places <= places[:, :, None]  # [B, R, S]
    if window is not None:
        is_seen &= key_places > places[:, :, None] - window
    is_seen = is_seen[:, None, None]  # [B, 1, 1, R, S]
    scores = jnp.einsum("brkgc,bksc->bkgrs", grouped, keys, preferred_element_type=jnp.float32) * args.scale
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
