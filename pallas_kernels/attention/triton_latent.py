"""Latent attention for NVIDIA GPUs in Triton: all heads share one key; its prefix is the value.

A key is V latent and R rotated coordinates (DeepSeek-V2, 2024, §2.1: 512 and 64). SCALE includes log2(e).
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import tuning
from pallas_kernels.attention import triton_pieces
from pallas_kernels.attention.arguments import AttentionArgs, Tiles
from pallas_kernels.attention.division import divide
from pallas_kernels.attention.triton_pieces import LOG2_E, LOWEST
from pallas_kernels.triton_bridge import call

_SMALLEST, _LARGEST = 16, 512  # larger values exceed the registers


def fits(kv_heads: int, head_size: int, value_size: int | None) -> bool:
    if value_size is None or kv_heads != 1 or not 0 < head_size - value_size <= value_size:
        return False
    return _SMALLEST <= value_size <= _LARGEST and triton.next_power_of_2(value_size) == value_size


def takes(args: AttentionArgs, largest: int) -> bool:
    """Return whether this applies; raise `ValueError` if nothing supports a head size above `largest`."""
    size = args.k_cache.shape[3]
    if not fits(args.kv_heads, size, args.value_size):
        return False
    others = [name for name in ("window", "softcap", "sinks") if getattr(args, name) is not None]
    if others and size > largest:
        raise ValueError(f"latent heads of {size} attend without {' and '.join(others)}")
    return not others


@triton.jit
def attend_latent(
    q,
    cache,
    scales,
    tables,
    lengths,
    starts,
    positions,
    piece_row,
    piece_begin,
    piece_end,
    piece_counts,
    out,
    parts,
    sums,
    H: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SCALE: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):
    """Attend with BM rows (heads of tokens) of one tile; grid (row blocks, tiles): the L2 cache holds shared keys.

    With pieces, tile b is one of a decode row.
    """
    first_row = tl.program_id(0) * BM
    number = tl.program_id(1)
    C: tl.constexpr = V + R
    if piece_row is not None:
        tile = tl.load(piece_row + number)
        count = (tile >= 0).to(tl.int32)
        start = tile
        position = tl.load(lengths + tile, mask=tile >= 0, other=0) - 1
        pieces = tl.load(piece_counts + tile, mask=tile >= 0, other=1)
    else:
        tile = number
        start = tl.load(starts + tile)
        position = tl.load(positions + tile)
        count = tl.load(lengths + tile)
        pieces = tl.minimum(count, 1)
    rows = first_row + tl.arange(0, BM)
    is_row = rows < count * H
    own = start.to(tl.int64) * H + first_row
    inside = tl.arange(0, BM)
    values_at = tl.arange(0, V)
    rest_at = tl.arange(0, RP)
    if first_row < count * H:
        if piece_row is not None:
            begin = tl.load(piece_begin + number)
            end = tl.load(piece_end + number)
        else:
            begin = 0
            end = position + tl.minimum(count, (first_row + BM - 1) // H + 1)
        q_at = q + own * C + (inside * C)[:, None]
        is_rest = is_row[:, None] & (rest_at < R)[None, :]
        q_latent = tl.load(q_at + values_at[None, :], mask=is_row[:, None], other=0.0)
        q_rest = tl.load(q_at + V + rest_at[None, :], mask=is_rest, other=0.0)
        values = tl.zeros((BM, V), tl.float32)
        highest = tl.full((BM,), LOWEST, tl.float32)
        total = tl.zeros((BM,), tl.float32)
        furthest = tl.minimum(position + rows // H, end - 1)
        # Unwritten values may be NaN: repeat the last key.
        last = tl.maximum(end - 1, 0)
        there = tl.minimum(begin + tl.arange(0, BN), last)
        # Prefetched.
        blocks = tl.load(tables + tile * M + there // P)
        for at in range(begin, end, BN):
            keys = at + tl.arange(0, BN)
            slots = blocks.to(tl.int64) * P + tl.minimum(keys, last) % P
            blocks = tl.load(tables + tile * M + tl.minimum(keys + BN, last) // P)
            latent_at = cache + slots[:, None] * C
            latent = tl.load(latent_at + values_at[None, :]).to(q.dtype.element_ty)
            if R == RP:
                rest = tl.load(latent_at + V + rest_at[None, :]).to(q.dtype.element_ty)
            else:
                rest = tl.load(latent_at + V + rest_at[None, :], mask=(rest_at < R)[None, :], other=0.0)
                rest = rest.to(q.dtype.element_ty)
            if KEYS_FIRST:
                turned = tl.dot(latent, tl.trans(q_latent), input_precision="ieee")
                scores = tl.trans(tl.dot(rest, tl.trans(q_rest), turned, input_precision="ieee"))
            else:
                scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
                scores = tl.dot(q_rest, tl.trans(rest), scores, input_precision="ieee")
            scores *= SCALE
            if scales is not None:
                scale = tl.load(scales + slots)
                scores *= scale[None, :]
            is_seen = keys[None, :] <= furthest[:, None]
            scores = tl.where(is_seen, scores, LOWEST)
            higher = tl.maximum(highest, tl.max(scores, 1))
            weights = tl.where(is_seen, tl.exp2(scores - higher[:, None]), 0.0)
            shrink = tl.exp2(highest - higher)
            highest = higher
            total = total * shrink + tl.sum(weights, 1)
            if scales is not None:
                weights *= scale[None, :]
            values = tl.dot(weights.to(latent.dtype), latent, values * shrink[:, None], input_precision="ieee")
        if pieces == 1:
            result = values / tl.where(total > 0, total, 1.0)[:, None]
            out_at = out + own * V + (inside * V)[:, None] + values_at[None, :]
            tl.store(out_at, result.to(out.dtype.element_ty), mask=is_row[:, None])
        if parts is not None:
            if pieces > 1:
                part = number * H + rows
                tl.store(parts + part[:, None] * V + values_at[None, :], values, mask=is_row[:, None])
                tl.store(sums + 2 * part, highest, mask=is_row)
                tl.store(sums + 2 * part + 1, total, mask=is_row)


def paged_decode(q: Array, lengths: Array, args: AttentionArgs, *, capability: int | None) -> Array:
    rows, heads, _ = q.shape
    chosen = tuning.of_latent(capability, heads, str(q.dtype), str(args.k_cache.dtype))
    context = args.tables.shape[1] * args.k_cache.shape[2]
    pieces = divide(lengths, context, args, tuning.of_latent_decode(capability, rows, heads, context, chosen))
    constants = _constants(q, args, chosen)
    apart = triton_pieces.outputs(pieces, rows, heads, args.value_width)
    if not apart:
        constants |= {"parts": None, "sums": None}
    out, *written = call(
        attend_latent,
        (q, args.k_cache, args.k_scales, args.tables, lengths, None, None, *pieces[:3], pieces.count),
        [jax.ShapeDtypeStruct((rows, heads, args.value_width), q.dtype), *apart],
        (triton.cdiv(heads, chosen.rows), len(pieces.row)),
        chosen.tuning,
        capability,
        **constants,
    )
    return triton_pieces.joined(out, written, pieces, None, capability)


def paged_prefill(q: Array, tiles: Tiles, args: AttentionArgs, *, tile: int, capability: int | None) -> Array:
    heads = q.shape[1]
    chosen = tuning.of_latent(capability, tile * heads, str(q.dtype), str(args.k_cache.dtype))
    shape = (q.shape[0], heads, args.value_width)
    untouched = jnp.zeros(shape, q.dtype)
    no_pieces = [None] * 4
    (out,) = call(
        attend_latent,
        (
            q,
            args.k_cache,
            args.k_scales,
            args.tables,
            tiles.length,
            tiles.start,
            tiles.position,
            *no_pieces,
            untouched,
        ),
        [jax.ShapeDtypeStruct(shape, q.dtype)],
        (triton.cdiv(tile * heads, chosen.rows), len(tiles.start)),
        chosen.tuning,
        capability,
        aliases={11: 0},
        parts=None,
        sums=None,
        **_constants(q, args, chosen),
    )
    return out


def _constants(q: Array, args: AttentionArgs, chosen: tuning.Latent) -> dict[str, Any]:
    width = args.value_width
    rest = q.shape[2] - width
    return {
        "H": q.shape[1],
        "V": width,
        "R": rest,
        "RP": max(_SMALLEST, triton.next_power_of_2(rest)),
        "P": args.k_cache.shape[2],
        "M": args.tables.shape[1],
        "BM": chosen.rows,
        "BN": chosen.keys,
        "SCALE": args.scale * LOG2_E,
        "KEYS_FIRST": chosen.keys_first,
    }
