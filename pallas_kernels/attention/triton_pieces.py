"""Combine the pieces of decode rows (division.py), in Triton.

A piece stores, per head, V weighted value sums, and separately, for 16-byte accesses, the highest score (base 2) and
the weights' sum.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import tuning
from pallas_kernels.attention.division import Pieces
from pallas_kernels.triton_bridge import call

LOG2_E = math.log2(math.e)
_LOG2_E = tl.constexpr(LOG2_E)
LOWEST = tl.constexpr(-1e30)  # finite: infinities' difference is NaN


def outputs(pieces: Pieces, rows: int, heads: int, width: int) -> list[jax.ShapeDtypeStruct]:
    """Describe outputs for pieces: values [B, H, V] and sums [B, H, 2]; [] if no row is cut."""
    count = len(pieces.row)
    return [] if count == rows else [jax.ShapeDtypeStruct((count, heads, size), jnp.float32) for size in (width, 2)]


@triton.jit
def combine(
    values,
    sums,
    piece_first,
    piece_counts,
    sinks,
    out,
    H: tl.constexpr,
    V: tl.constexpr,
    BH: tl.constexpr,
    BV: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Combine BV values of BH heads of a row's pieces; grid (rows, blocks of H, blocks of V)."""
    row = tl.program_id(0)
    heads = tl.program_id(1) * BH + tl.arange(0, BH)
    columns = tl.program_id(2) * BV + tl.arange(0, BV)
    count = tl.load(piece_counts + row)
    first = tl.load(piece_first + row)
    if count > 1:
        is_own = heads < H
        is_stored = is_own[:, None] & (columns < V)[None, :]
        result = tl.zeros((BH, BV), tl.float32)
        highest = tl.full((BH,), LOWEST, tl.float32)
        total = tl.zeros((BH,), tl.float32)
        if sinks is not None:
            highest = tl.load(sinks + heads, mask=is_own, other=0.0).to(tl.float32) * _LOG2_E
            total = tl.full((BH,), 1.0, tl.float32)
        for at in range(0, count, AT_ONCE):
            pieces = at + tl.arange(0, AT_ONCE)
            is_there = is_own[:, None] & (pieces < count)[None, :]
            own = (first + pieces)[None, :] * H + heads[:, None]
            mask = is_there[:, :, None] & (columns < V)[None, None, :]
            found = tl.load(values + own[:, :, None] * V + columns[None, None, :], mask=mask, other=0.0)
            highests = tl.load(sums + 2 * own, mask=is_there, other=LOWEST)
            totals = tl.load(sums + 2 * own + 1, mask=is_there, other=0.0)
            higher = tl.maximum(highest, tl.max(highests, 1))
            shrink = tl.exp2(highest - higher)
            weights = tl.where(is_there, tl.exp2(highests - higher[:, None]), 0.0)
            result = result * shrink[:, None] + tl.sum(found * weights[:, :, None], 1)
            total = total * shrink + tl.sum(weights * totals, 1)
            highest = higher
        out_at = out + (row * H + heads)[:, None] * V + columns[None, :]
        result = result / tl.where(is_own, total, 1.0)[:, None]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=is_stored)


def joined(out: Array, written: list[Array], pieces: Pieces, sinks: Array | None, capability: int | None) -> Array:
    if not written:
        return out
    rows, heads, width = out.shape
    chosen = tuning.of_joined(rows, heads, width)
    (out,) = call(
        combine,
        (*written, pieces.first, pieces.count, sinks, out),
        [jax.ShapeDtypeStruct(out.shape, out.dtype)],
        (rows, triton.cdiv(heads, chosen.heads), triton.cdiv(width, chosen.columns)),
        chosen.tuning,
        capability,
        aliases={5: 0},
        H=heads,
        V=width,
        BH=chosen.heads,
        BV=chosen.columns,
        AT_ONCE=chosen.pieces,
    )
    return out
