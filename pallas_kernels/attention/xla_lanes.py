"""Decode attention for many rows of different lengths on a CPU.

In xla.py every row iterates as often as the longest; here 16 lanes process rows in sequence, balanced to end together.
Rows do not affect each other's bits. Further letters: W lanes, D rows per lane.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.attention import xla
from pallas_kernels.attention.arguments import AttentionArgs
from pallas_kernels.attention.xla import KEYS, Mixed, keys_and_values, mix_in, unseen

# Float32, 8 heads of 64, 64 rows, two Zen 5 cores: 4.4 ms with 16 lanes, 5.3 with 4, 8.3 with 32, 12.0 without.
_LANES = 16


def paged_decode(q: Array, lengths: Array, args: AttentionArgs) -> Array:
    rows, heads, size = q.shape
    if rows <= _LANES:
        return xla.paged_decode(q, lengths, args)
    kv_heads, block_tokens = args.k_cache.shape[1:3]
    tables, window, sinks = args.tables, args.window, args.sinks
    group = heads // kv_heads
    blocks = max(1, KEYS // block_tokens)
    stride = blocks * block_tokens  # S
    width = -(-tables.shape[1] // blocks)
    tables = jnp.pad(tables, ((0, 0), (0, width * blocks - tables.shape[1]))).reshape(rows, width, blocks)
    firsts = jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0) // stride  # [B]
    order, ends = deal(-(-lengths // stride) - firsts)
    grouped = q.reshape(rows, kv_heads, group, size)
    lanes = jnp.arange(_LANES, dtype=jnp.int32)
    logits = None if sinks is None else sinks.reshape(kv_heads, group)
    nothing = unseen((_LANES, kv_heads, group), args.value_width, logits)

    def visit(turn: Array, carry: tuple[Mixed, Array]) -> tuple[Mixed, Array]:
        mixed, out = carry
        number = jnp.sum(ends <= turn, axis=0)  # the lane's current row; D when done
        row = order.at[number, lanes].get(mode="fill", fill_value=rows)
        done = jnp.where(number > 0, ends.at[number - 1, lanes].get(mode="clip"), 0)
        length = lengths.at[row].get(mode="fill", fill_value=0)
        own = jnp.minimum(row, rows - 1)
        chunk = turn - done + firsts[own]
        key_places = chunk[:, None] * stride + jnp.arange(stride, dtype=jnp.int32)  # [W, S]
        is_written = key_places < length[:, None]
        is_seen = is_written if window is None else is_written & (key_places >= length[:, None] - window)
        is_next = (turn == done)[:, None, None]
        mixed = Mixed(
            jnp.where(is_next[..., None], nothing.values, mixed.values),
            jnp.where(is_next, nothing.highest, mixed.highest),
            jnp.where(is_next, nothing.total, mixed.total),
        )
        chosen = tables[own, jnp.clip(chunk, 0, width - 1)]  # [W, n]
        k, v = keys_and_values(args, chosen)
        mixed = mix_in(mixed, grouped[own], k, v, is_seen[:, None], is_written, args.scale, args.softcap)
        # The last write counts; testing would cost more.
        return mixed, out.at[row].set(mixed.values / mixed.total[..., None], mode="drop")

    out = jnp.zeros((rows, *nothing.values.shape[1:]), jnp.float32)
    _, out = lax.fori_loop(0, jnp.max(ends[-1]), visit, (nothing, out))
    return out.reshape(rows, heads, -1).astype(q.dtype)


def deal(turns: Array) -> tuple[Array, Array]:
    """Assign rows that need `turns` [B] iterations to W lanes: row indices i32[D, W], and end iterations [D, W].

    Longest first, alternating the lane order. Empty places have index B.
    """
    rows = len(turns)
    depth = -(-rows // _LANES)
    order = jnp.pad(jnp.argsort(-turns).astype(jnp.int32), (0, depth * _LANES - rows), constant_values=rows)
    order = order.reshape(depth, _LANES)
    # XLA:CPU of jax 0.12 miscompiles `order.at[1::2].set(order[1::2, ::-1])`, in place over its input.
    order = jnp.where((jnp.arange(depth) % 2 == 1)[:, None], order[:, ::-1], order)
    return order, jnp.cumsum(turns.at[order].get(mode="fill", fill_value=0), axis=0)
