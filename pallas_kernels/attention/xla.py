"""Paged attention in plain JAX: a loop over blocks with online softmax (Milakov & Gimelshein 2018).

Ends at the longest sequence: 10 to 66 times faster on a CPU than gathering all blocks. B rows, Y tiles, G
query heads per KV head, S keys per iteration.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.attention.arguments import AttentionArgs, Tiles

# On two cores, 16 sequences of 1,024 tokens, 14 query and 2 KV heads of 64: 4.2 ms with 64 keys, 6.0 with 32, 5.2 with
# 128; separate blocks [B, n, K, P, C] 19 ms.
KEYS = 64

# Below every score, and finite: infinities' difference is NaN.
LOWEST = -1e30


def paged_decode(q: Array, lengths: Array, args: AttentionArgs) -> Array:
    rows, heads, size = q.shape
    kv_heads, sinks = args.kv_heads, args.sinks
    group = heads // kv_heads
    grouped = q.reshape(rows, kv_heads, group, size)  # [B, K, G, C]
    places = jnp.broadcast_to((lengths - 1)[:, None], (rows, group))  # [B, G]
    logits = None if sinks is None else sinks.reshape(kv_heads, group)
    mixed = _attend(grouped, places, args.tables, logits, args)
    return mixed.reshape(rows, heads, -1).astype(q.dtype)


def paged_prefill(q: Array, tiles: Tiles, args: AttentionArgs, *, tile: int) -> Array:
    _, heads, size = q.shape
    kv_heads, sinks = args.kv_heads, args.sinks
    group = heads // kv_heads
    padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))  # room for the last tile
    logits = None if sinks is None else jnp.repeat(sinks.reshape(kv_heads, group), tile, axis=1)  # [K, G · tile]
    steps = jnp.arange(tile, dtype=jnp.int32)
    returned = (tile, heads, args.value_width)
    tables = args.tables
    last_seen = None if args.last_seen is None else jnp.pad(args.last_seen, (0, tile))

    def attend_tile(y: Array, out: Array) -> Array:
        start = (tiles.start[y], 0, 0)
        queries = lax.dynamic_slice(padded, start, (tile, heads, size))
        queries = queries.reshape(tile, kv_heads, group, size).transpose(1, 2, 0, 3)  # [K, G, tile, C]
        queries = queries.reshape(1, kv_heads, group * tile, size)
        is_real = steps < tiles.length[y]

        def by_query(values: Array) -> Array:
            return jnp.tile(jnp.where(is_real, values, -1), group)[None]  # [1, G · tile]

        places, ends = by_query(tiles.position[y] + steps), None
        if last_seen is not None:
            ends = by_query(lax.dynamic_slice(last_seen, start[:1], (tile,)))
        table = lax.dynamic_slice(tables, (y, 0), (1, tables.shape[1]))
        mixed = _attend(queries, places, table, logits, args, ends)
        mixed = mixed.reshape(kv_heads, group, tile, -1).transpose(2, 0, 1, 3).reshape(returned)
        before = lax.dynamic_slice(out, start, returned)
        return lax.dynamic_update_slice(out, jnp.where(is_real[:, None, None], mixed.astype(out.dtype), before), start)

    out = jnp.zeros((len(padded), *returned[1:]), q.dtype)
    out = lax.fori_loop(0, tables.shape[0], attend_tile, out)
    return out[: q.shape[0]]


class Mixed(NamedTuple):
    """State of queries: [B, K, R, V], and [B, K, R] twice."""

    values: Array  # relative to `highest`
    highest: Array
    total: Array


def unseen(shape: tuple[int, int, int], value_size: int, sinks: Array | None) -> Mixed:
    values = jnp.zeros((*shape, value_size), jnp.float32)
    if sinks is None:
        return Mixed(values, jnp.full(shape, LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32))
    return Mixed(values, jnp.broadcast_to(sinks.astype(jnp.float32), shape), jnp.ones(shape, jnp.float32))


def gathered(cache: Array, blocks: Array, scales: Array | None = None, float8: str | None = None) -> Array:
    """Gather blocks [B, n] of a cache [N, K, P, C] as [B, K, S, C]; float32 if scaled."""
    rows, count = blocks.shape
    _, kv_heads, block_tokens, size = cache.shape
    found = cache[blocks]
    if float8 is not None:
        found = lax.bitcast_convert_type(found, float8)
    if scales is not None:
        found = found.astype(jnp.float32) * scales[blocks][..., None]
    return found.swapaxes(1, 2).reshape(rows, kv_heads, count * block_tokens, size)


def keys_and_values(args: AttentionArgs, blocks: Array) -> tuple[Array, Array]:
    k = gathered(args.k_cache, blocks, args.k_scales, args.float8)
    if args.v_cache is None:
        return k, k[..., : args.value_size]
    return k, gathered(args.v_cache, blocks, args.v_scales, args.float8)


def mix_in(
    before: Mixed,
    q: Array,
    k: Array,
    v: Array,
    is_seen: Array,
    is_written: Array,
    scale: float,
    softcap: float | None,
    bias: Array | None = None,
) -> Mixed:
    """Update the state of q [B, K, R, C] with keys and values [B, K, S, C or V] where `is_seen` [B, R, S].

    Positions not `is_written` [B, S] may hold NaN.
    """
    is_seen = is_seen[:, None]  # [B, 1, R, S]
    scores = jnp.einsum("bkrc,bksc->bkrs", q, k, preferred_element_type=jnp.float32) * scale
    if softcap is not None:
        scores = jnp.tanh(scores / softcap) * softcap
    if bias is not None:
        scores += bias
    scores = jnp.where(is_seen, scores, LOWEST)
    highest = jnp.maximum(before.highest, jnp.max(scores, axis=-1))  # [B, K, R]
    shrink = jnp.exp(before.highest - highest)
    weights = jnp.where(is_seen, jnp.exp(scores - highest[..., None]), 0.0)
    # A zero weight does not mask NaN.
    v = jnp.where(is_written[:, None, :, None], v, 0)
    added = jnp.einsum("bkrs,bksc->bkrc", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return Mixed(before.values * shrink[..., None] + added, highest, before.total * shrink + jnp.sum(weights, axis=-1))


def _attend(
    q: Array, places: Array, tables: Array, sinks: Array | None, args: AttentionArgs, ends: Array | None = None
) -> Array:
    """Attend with q [B, K, R, C] at positions `places` [B, R] (negative: none): float32 [B, K, R, V].

    `tables` and `sinks` [K, R] override `args`. A bias requires equal numbers of query and KV heads. `ends` [B, R] are
    the last keys that queries see, by default their positions.
    """
    ends = places if ends is None else ends
    if args.bias is not None and len(args.bias) != q.shape[1]:
        raise ValueError(f"a bias of {len(args.bias)} heads does not fit {q.shape[1]} key-value heads")
    rows, kv_heads, queries, _ = q.shape
    window, block_tokens = args.window, args.k_cache.shape[2]
    blocks = max(1, KEYS // block_tokens)
    stride = blocks * block_tokens  # S
    turns = -(-tables.shape[1] // blocks)
    tables = jnp.pad(tables, ((0, 0), (0, turns * blocks - tables.shape[1])))
    furthest = jnp.max(ends, axis=1)
    last = jnp.minimum((jnp.max(furthest) + stride) // stride, turns)
    first = jnp.int32(0)
    if window is not None:
        nearest = jnp.min(jnp.where(places >= 0, places, turns * stride))
        first = jnp.clip(nearest - window + 1, 0, turns * stride) // stride

    def visit(turn: Array, carry: Mixed) -> Mixed:
        chosen = lax.dynamic_slice(tables, (0, turn * blocks), (rows, blocks))
        key_places = turn * stride + jnp.arange(stride, dtype=jnp.int32)  # [S]
        is_seen = key_places <= ends[:, :, None]  # [B, R, S]
        if window is not None:
            is_seen &= key_places > places[:, :, None] - window
        is_written = key_places <= furthest[:, None]  # [B, S]
        k, v = keys_and_values(args, chosen)
        bias = None
        if args.bias is not None:
            distance = jnp.clip(places[:, :, None] - key_places, 0, args.bias.shape[1] - 1)  # [B, R, S]
            bias = jnp.moveaxis(args.bias.astype(jnp.float32)[:, distance], 0, 1)  # [B, K, R, S]
        return mix_in(carry, q, k, v, is_seen, is_written, args.scale, args.softcap, bias)

    nothing = unseen((rows, kv_heads, queries), args.value_width, sinks)
    mixed = lax.fori_loop(first, last, visit, nothing)
    return mixed.values / jnp.where(mixed.total > 0, mixed.total, 1.0)[..., None]
