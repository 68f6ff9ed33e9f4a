"""Paged decode attention for NVIDIA GPUs in Triton: a program per piece and KV head.

Reads beyond the end repeat the last key: unwritten blocks may hold NaN. SCALE includes log2(e).
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import jax
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import tuning
from pallas_kernels.attention import triton_latent, triton_pieces
from pallas_kernels.attention.arguments import AttentionArgs
from pallas_kernels.attention.division import divide
from pallas_kernels.attention.triton_kernels import LARGEST, cache_arrays, constants, padded, refusal
from pallas_kernels.attention.triton_pieces import LOG2_E, LOWEST
from pallas_kernels.triton_bridge import call

__all__ = ["paged_decode", "refusal"]

_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def attend_piece(
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    tables,
    sinks,
    piece_row,
    piece_begin,
    piece_end,
    piece_siblings,
    out,
    parts,
    sums,
    H: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    CP: tl.constexpr,
    VP: tl.constexpr,
    P: tl.constexpr,
    M: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Attend with the queries of one row and KV head; grid (pieces, KV heads)."""
    number = tl.program_id(0)
    head = tl.program_id(1)
    G: tl.constexpr = H // K
    row = tl.load(piece_row + number)
    begin = tl.load(piece_begin + number)
    end = tl.load(piece_end + number)
    pieces = tl.load(piece_siblings + number)
    if row >= 0:
        rows = tl.arange(0, BM)
        is_row = rows < G
        coordinates = tl.arange(0, CP)
        values_at = tl.arange(0, VP)
        own = row.to(tl.int64) * H + head * G + rows
        last = tl.maximum(end - 1, 0)
        table = tables + row * M
        blocks = tl.load(table + tl.minimum(begin + tl.arange(0, BN), last) // P)
        mask = is_row[:, None] & (coordinates < C)[None, :]
        queries = tl.load(q + own[:, None] * C + coordinates[None, :], mask=mask, other=0.0)
        values = tl.zeros((BM, VP), tl.float32)
        highest = tl.full((BM,), LOWEST, tl.float32)
        total = tl.zeros((BM,), tl.float32)
        if sinks is not None:
            if pieces == 1:  # else added in `combine`
                highest = tl.load(sinks + head * G + rows, mask=is_row, other=0.0).to(tl.float32) * _LOG2_E
                total = tl.full((BM,), 1.0, tl.float32)
        for at in range(begin, end, BN):
            keys = at + tl.arange(0, BN)
            slots = (blocks.to(tl.int64) * K + head) * P + tl.minimum(keys, last) % P
            blocks = tl.load(table + tl.minimum(keys + BN, last) // P)
            k_at = k_cache + slots[:, None] * C + coordinates[None, :]
            if C == CP:
                k = tl.load(k_at)
            else:
                k = tl.load(k_at, mask=(coordinates < C)[None, :], other=0.0)
            v_at = (k_cache + slots[:, None] * C if v_cache is None else v_cache + slots[:, None] * V) + values_at
            if V == VP:
                v = tl.load(v_at)
            else:
                v = tl.load(v_at, mask=(values_at < V)[None, :], other=0.0)
            scores = tl.dot(queries, tl.trans(k.to(queries.dtype)), input_precision="ieee") * SCALE
            if k_scales is not None:
                scores *= tl.load(k_scales + slots)[None, :]
            if SOFTCAP is not None:
                # tanh(x) = 2 sigmoid(2 x) - 1. SCALE includes log2(e).
                cap: tl.constexpr = SOFTCAP * _LOG2_E
                scores = (2 * tl.sigmoid(scores * (2 / cap)) - 1) * cap
            is_seen = keys < end
            scores = tl.where(is_seen[None, :], scores, LOWEST)
            higher = tl.maximum(highest, tl.max(scores, 1))
            weights = tl.where(is_seen[None, :], tl.exp2(scores - higher[:, None]), 0.0)
            shrink = tl.exp2(highest - higher)
            highest = higher
            total = total * shrink + tl.sum(weights, 1)
            if v_scales is not None:
                weights *= tl.load(v_scales + slots)[None, :]
            values = values * shrink[:, None] + tl.dot(
                weights.to(queries.dtype), v.to(queries.dtype), input_precision="ieee"
            )
        is_stored = is_row[:, None] & (values_at < V)[None, :]
        if pieces == 1:
            result = values / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(out + own[:, None] * V + values_at[None, :], result.to(out.dtype.element_ty), mask=is_stored)
        if parts is not None:
            if pieces > 1:
                part = number * H + head * G + rows
                tl.store(parts + part[:, None] * V + values_at[None, :], values, mask=is_stored)
                tl.store(sums + 2 * part, highest, mask=is_row)
                tl.store(sums + 2 * part + 1, total, mask=is_row)


def paged_decode(q: Array, lengths: Array, args: AttentionArgs, *, capability: int | None) -> Array:
    if triton_latent.takes(args, LARGEST):
        return triton_latent.paged_decode(q, lengths, args, capability=capability)
    rows, heads, _ = q.shape
    kv_heads, width = args.kv_heads, args.value_width
    context = args.tables.shape[1] * args.k_cache.shape[2]
    chosen = tuning.of_decode(capability, rows, kv_heads, q.shape[2], str(q.dtype), str(args.k_cache.dtype), context)
    pieces = divide(lengths, context, args, chosen)
    own = constants(q, args)
    apart = triton_pieces.outputs(pieces, rows, heads, width)
    if not apart:
        own |= {"parts": None, "sums": None}
    places = (pieces.row, pieces.begin, pieces.end, pieces.siblings)
    out, *written = call(
        attend_piece,
        (q, *cache_arrays(args), args.tables, args.sinks, *places),
        [jax.ShapeDtypeStruct((rows, heads, width), q.dtype), *apart],
        (len(pieces.row), kv_heads),
        chosen.tuning,
        capability,
        **own,
        BM=padded(heads // kv_heads),
        BN=chosen.keys,
    )
    return triton_pieces.joined(out, written, pieces, args.sinks, capability)
