"""Latent attention for NVIDIA GPUs, in Triton's language: all heads of a token over one key, which is the value too.

A key is V coordinates of the latent and R that are rotated (DeepSeek-AI 2024, "DeepSeek-V2", §2.1: 512 and 64). A tile
of latents is loaded once, for scores and for values; heads of tokens stand below one another in a tile of queries. The
context of a decode row is divided among programs, and a second kernel joins the pieces, as in `triton_kernels.py`.
Online softmax with base 2 (Milakov & Gimelshein 2018; Dao 2023, arXiv:2307.08691); scores and sums are float32.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import tuning
from pallas_kernels.attention.arguments import AttentionArgs, Tiles
from pallas_kernels.triton_bridge import call

_LOG2_E = math.log2(math.e)
_LOWEST = tl.constexpr(-1e30)  # finite: the difference of two of these is 0, of two infinities NaN
_SMALLEST, _LARGEST = 16, 512  # coordinates of a latent; the largest one's values fill the registers


def fits(kv_heads: int, head_size: int, value_size: int | None) -> bool:
    """Say whether values are the beginning of the only head's keys, and of a size that this is for."""
    if value_size is None or kv_heads != 1 or not 0 < head_size - value_size <= value_size:
        return False
    return _SMALLEST <= value_size <= _LARGEST and triton.next_power_of_2(value_size) == value_size


def takes(args: AttentionArgs, largest: int) -> bool:
    """Say whether this is what attends; a ValueError where heads are larger than `largest` and it cannot.

    Others attend to heads up to `largest`.
    """
    size = args.k_cache.shape[3]
    if not fits(args.kv_heads, size, args.value_size):
        return False
    others = [name for name in ("window", "softcap", "sinks") if getattr(args, name) is not None]
    if others and size > largest:
        raise ValueError(f"latent heads of {size} attend without {' and '.join(others)}")
    return not others


@triton.jit
def _pieces(last, BN: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr):
    """Divide the keys below `last` among at most SPLITS programs: how many get some, and how many each."""
    wanted = tl.minimum(tl.maximum(last // LEAST, 1), SPLITS)
    each = tl.maximum(tl.cdiv(tl.cdiv(last, wanted), BN), 1) * BN
    return tl.maximum(tl.cdiv(last, each), 1), each


@triton.jit
def attend_latent(
    q,
    cache,
    scales,
    tables,
    lengths,
    starts,
    positions,
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
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    SCALE: tl.constexpr,
    DECODES: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):
    """Attend with BM rows (heads of tokens) of one tile; grid (row blocks, SPLITS, tiles).

    Programs that read the same keys are neighbours, and all but one find them in the device's cache.
    DECODES: tile b is the one query b, and `lengths` counts its keys; `starts` and `positions` are None.
    """
    first_row = tl.program_id(0) * BM
    split = tl.program_id(1)
    tile = tl.program_id(2)
    C: tl.constexpr = V + R
    if DECODES:
        start = tile
        position = tl.load(lengths + tile) - 1
        count = tl.minimum(position + 1, 1)
    else:
        start = tl.load(starts + tile)
        position = tl.load(positions + tile)
        count = tl.load(lengths + tile)
    rows = first_row + tl.arange(0, BM)
    is_row = rows < count * H
    own = start.to(tl.int64) * H + first_row  # the first row's head among those of all tokens
    inside = tl.arange(0, BM)
    values_at = tl.arange(0, V)
    rest_at = tl.arange(0, RP)
    out_at = out + own * V + (inside * V)[:, None] + values_at[None, :]
    if first_row < count * H:
        last = position + tl.minimum(count, (first_row + BM - 1) // H + 1)
        pieces, each = _pieces(last, BN, SPLITS, LEAST)
        if split < pieces:
            begin = split * each
            end = tl.minimum(last, begin + each)
            q_at = q + own * C + (inside * C)[:, None]
            is_rest = is_row[:, None] & (rest_at < R)[None, :]
            q_latent = tl.load(q_at + values_at[None, :], mask=is_row[:, None], other=0.0)
            q_rest = tl.load(q_at + V + rest_at[None, :], mask=is_rest, other=0.0)
            values = tl.zeros((BM, V), tl.float32)
            highest = tl.full((BM,), _LOWEST, tl.float32)
            total = tl.zeros((BM,), tl.float32)
            furthest = tl.minimum(position + rows // H, end - 1)
            # What was never written may be NaN, and a weight of zero does not silence that: the last key again.
            there = tl.minimum(begin + tl.arange(0, BN), end - 1)
            # Blocks are looked up a turn ahead: keys whose place is loaded in the same turn would wait for it.
            blocks = tl.load(tables + tile * M + there // P)
            for at in range(begin, end, BN):
                keys = at + tl.arange(0, BN)
                slots = blocks.to(tl.int64) * P + tl.minimum(keys, end - 1) % P
                blocks = tl.load(tables + tile * M + tl.minimum(keys + BN, end - 1) // P)
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
                scores = tl.where(is_seen, scores, _LOWEST)
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
                tl.store(out_at, result.to(out.dtype.element_ty), mask=is_row[:, None])
            if SPLITS > 1:
                if pieces > 1:
                    part = own * SPLITS + split + inside * SPLITS
                    tl.store(parts + part[:, None] * V + values_at[None, :], values, mask=is_row[:, None])
                    tl.store(sums + 2 * part, highest, mask=is_row)
                    tl.store(sums + 2 * part + 1, total, mask=is_row)
    elif DECODES:
        if split == 0:
            tl.store(out_at, tl.zeros((BM, V), out.dtype.element_ty), mask=(rows < H)[:, None])


@triton.jit
def join_latent(
    parts,
    sums,
    lengths,
    out,
    H: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Join the pieces of BV values of a decode row's head, BP at once; grid (V / BV, heads, rows).

    Rows of one piece are left alone.
    """
    values_at = tl.program_id(0) * BV + tl.arange(0, BV)
    row = tl.program_id(2)
    own = row * H + tl.program_id(1)
    pieces, _ = _pieces(tl.load(lengths + row), BN, SPLITS, LEAST)
    if pieces > 1:
        highest = -1e30
        total = 0.0
        values = tl.zeros((BV,), tl.float32)
        for first in range(0, pieces, BP):
            splits = first + tl.arange(0, BP)
            is_there = splits < pieces
            part = own.to(tl.int64) * SPLITS + splits
            highests = tl.load(sums + 2 * part, mask=is_there, other=_LOWEST)
            totals = tl.load(sums + 2 * part + 1, mask=is_there, other=0.0)
            found = tl.load(parts + part[:, None] * V + values_at[None, :], mask=is_there[:, None], other=0.0)
            higher = tl.maximum(highest, tl.max(highests, 0))
            shrink = tl.exp2(highest - higher)
            highest = higher
            weights = tl.where(is_there, tl.exp2(highests - higher), 0.0)
            total = total * shrink + tl.sum(weights * totals, 0)
            values = values * shrink + tl.sum(found * weights[:, None], 0)
        tl.store(out + own.to(tl.int64) * V + values_at, (values / total).to(out.dtype.element_ty))


def paged_decode(q: Array, lengths: Array, args: AttentionArgs, *, capability: int | None) -> Array:
    """See `pallas_kernels.paged_decode`."""
    rows, heads, _ = q.shape
    chosen = tuning.of_latent(capability, heads, str(q.dtype), str(args.k_cache.dtype))
    blocks = triton.cdiv(heads, chosen.rows)
    context = args.tables.shape[1] * args.k_cache.shape[2]
    splits = tuning.latent_splits(capability, rows * blocks, context, chosen)
    width = args.value_width
    outputs = [jax.ShapeDtypeStruct((rows, heads, width), q.dtype)]
    constants = _constants(q, args, chosen)
    if splits > 1:
        outputs += [jax.ShapeDtypeStruct((rows, heads, splits, size), jnp.float32) for size in (width, 2)]
    else:
        constants |= {"parts": None, "sums": None}
    division: dict[str, Any] = {"BN": chosen.keys, "SPLITS": splits, "LEAST": tuning.least_latents(chosen)}
    out, *pieces = call(
        attend_latent,
        (q, args.k_cache, args.k_scales, args.tables, lengths, None, None),
        outputs,
        (blocks, splits, rows),
        chosen.tuning,
        capability,
        **constants,
        **division,
        DECODES=True,
    )
    if splits == 1:
        return out
    columns = min(width, tuning.JOINED_VALUES)
    (out,) = call(
        join_latent,
        (*pieces, lengths, out),
        outputs[:1],
        (width // columns, heads, rows),
        tuning.JOIN,
        capability,
        aliases={3: 0},
        H=heads,
        V=width,
        BV=columns,
        BP=min(tuning.JOINED_PIECES, triton.next_power_of_2(splits)),
        **division,
    )
    return out


def paged_prefill(q: Array, tiles: Tiles, args: AttentionArgs, *, tile: int, capability: int | None) -> Array:
    """See `pallas_kernels.paged_prefill`."""
    heads = q.shape[1]
    chosen = tuning.of_latent(capability, tile * heads, str(q.dtype), str(args.k_cache.dtype))
    shape = (q.shape[0], heads, args.value_width)
    untouched = jnp.zeros(shape, q.dtype)  # what queries in no tile give
    (out,) = call(
        attend_latent,
        (q, args.k_cache, args.k_scales, args.tables, tiles.length, tiles.start, tiles.position, untouched),
        [jax.ShapeDtypeStruct(shape, q.dtype)],
        (triton.cdiv(tile * heads, chosen.rows), 1, len(tiles.start)),
        chosen.tuning,
        capability,
        aliases={7: 0},
        parts=None,
        sums=None,
        **_constants(q, args, chosen),
        BN=chosen.keys,
        SPLITS=1,
        LEAST=chosen.keys,
        DECODES=False,
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
        "SCALE": args.scale * _LOG2_E,
        "KEYS_FIRST": chosen.keys_first,
    }
