"""Paged prefill attention for NVIDIA GPUs in Triton.

A tile stacks the queries of heads that share keys. Online softmax in base 2 (Dao 2023, arXiv:2307.08691): SCALE
includes log2(e).
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import triton_bridge, tuning
from pallas_kernels.attention import triton_latent
from pallas_kernels.attention.arguments import AttentionArgs, Tiles
from pallas_kernels.attention.triton_pieces import LOG2_E, LOWEST
from pallas_kernels.choice import Site
from pallas_kernels.triton_bridge import call

_LOG2_E = tl.constexpr(LOG2_E)
LARGEST = 256  # larger ones: `triton_latent`
_SMALLEST = 16  # of tensor cores


def refusal(operation: str, site: Site) -> str | None:
    if site.dtype == "float16" and site.cache_dtype == "float8_e5m2":
        return "float16 cannot hold weights times the scales of a cache of float8_e5m2"
    is_latent = triton_latent.fits(site.kv_heads, site.head_size, site.value_size)
    if is_latent and site.cache_dtype == "float8_e5m2" and (site.capability or 90) < 90:
        return "latents of float8_e5m2 need compute capability 9.0"  # for Triton 3.6's bfloat16 code
    if is_latent and site.looks_ahead and operation == "paged_prefill":
        return "queries of latents see no keys after them"
    if site.head_size > LARGEST and not is_latent:
        values = "one head of keys of which the first 2^n, 16 to 512, are the values"
        return f"heads of {site.head_size} do not fit; up to {LARGEST} do, and {values}"
    return triton_bridge.refusal(site)


@triton.jit
def _visit(
    carry_values,
    carry_highest,
    carry_total,
    queries,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    table,
    head,
    at,
    end,
    place,
    seen,
    K: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    CP: tl.constexpr,
    VP: tl.constexpr,
    P: tl.constexpr,
    BN: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Update online softmax of queries [BM, CP] at `place` [BM] with BN keys from `at`; below `end` if MASKED.

    Queries see keys up to `seen` [BM].
    """
    keys = at + tl.arange(0, BN)
    coordinates = tl.arange(0, CP)
    values_at = tl.arange(0, VP)
    is_there = keys < end
    if MASKED:
        blocks = tl.load(table + keys // P, mask=is_there, other=0)
    else:
        blocks = tl.load(table + keys // P)
    slots = (blocks.to(tl.int64) * K + head) * P + keys % P
    k_at = k_cache + slots[None, :] * C + coordinates[:, None]
    v_at = (k_cache + slots[:, None] * C if v_cache is None else v_cache + slots[:, None] * V) + values_at[None, :]
    # Unwritten values may be NaN.
    if MASKED:
        k = tl.load(k_at, mask=is_there[None, :] & (coordinates < C)[:, None], other=0.0)
    elif C != CP:
        k = tl.load(k_at, mask=(coordinates < C)[:, None], other=0.0)
    else:
        k = tl.load(k_at)
    scores = tl.dot(queries, k.to(queries.dtype), input_precision="ieee") * SCALE
    if k_scales is not None:
        scores *= tl.load(k_scales + slots, mask=is_there, other=0.0)[None, :]
    if SOFTCAP is not None:
        cap: tl.constexpr = SOFTCAP * _LOG2_E
        scores = (2 * tl.sigmoid(scores * (2 / cap)) - 1) * cap
    if MASKED:
        is_seen = is_there[None, :] & (keys[None, :] <= seen[:, None])
        if WINDOW is not None:
            is_seen = is_seen & (keys[None, :] > place[:, None] - WINDOW)
        scores = tl.where(is_seen, scores, LOWEST)
    highest = tl.maximum(carry_highest, tl.max(scores, 1))
    weights = tl.exp2(scores - highest[:, None])
    if MASKED:
        weights = tl.where(is_seen, weights, 0.0)
    shrink = tl.exp2(carry_highest - highest)
    total = carry_total * shrink + tl.sum(weights, 1)
    if MASKED:
        v = tl.load(v_at, mask=is_there[:, None] & (values_at < V)[None, :], other=0.0)
    elif V != VP:
        v = tl.load(v_at, mask=(values_at < V)[None, :], other=0.0)
    else:
        v = tl.load(v_at)
    if v_scales is not None:
        weights *= tl.load(v_scales + slots, mask=is_there, other=0.0)[None, :]
    values = carry_values * shrink[:, None] + tl.dot(
        weights.to(queries.dtype), v.to(queries.dtype), input_precision="ieee"
    )
    return values, highest, total


@triton.jit
def _first_key(place, BN: tl.constexpr, WINDOW: tl.constexpr):
    if WINDOW is None:
        return 0
    else:
        return tl.maximum(place - WINDOW + 1, 0) // BN * BN


@triton.jit
def attend(
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    tables,
    lengths,
    starts,
    positions,
    sinks,
    last_seen,
    out,
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
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Attend with BM rows of one tile and KV head; grid (tiles, KV heads x row blocks)."""
    tile = tl.program_id(0)
    head = tl.program_id(1) % K
    first_row = tl.program_id(1) // K * BM
    G: tl.constexpr = H // K
    start = tl.load(starts + tile)
    position = tl.load(positions + tile)
    count = tl.load(lengths + tile)
    some = tl.minimum(count, 1)  # always 1 below; branches on it prevent spills
    rows = first_row + tl.arange(0, BM)
    tokens = rows // G
    is_row = tokens < count
    coordinates = tl.arange(0, CP)
    values_at = tl.arange(0, VP)
    own = (start + tokens).to(tl.int64) * H + head * G + rows % G
    if first_row < count * G:
        place = position + tokens
        begin = _first_key(position + first_row // G, BN, WINDOW)
        end = position + tl.minimum(count, (first_row + BM - 1) // G + 1)
        seen = place
        if last_seen is not None:
            seen = tl.load(last_seen + start + tokens, mask=is_row, other=-1)
            end = tl.maximum(end, tl.max(seen, 0) + 1)
        mask = is_row[:, None] & (coordinates < C)[None, :]
        queries = tl.load(q + own[:, None] * C + coordinates[None, :], mask=mask, other=0.0)
        values = tl.zeros((BM, VP), tl.float32)
        highest = tl.full((BM,), LOWEST, tl.float32)
        total = tl.zeros((BM,), tl.float32)
        if sinks is not None:
            if some == 1:
                highest = tl.load(sinks + head * G + rows % G).to(tl.float32) * _LOG2_E
                total = tl.full((BM,), 1.0, tl.float32)
        if WINDOW is None:  # these keys need no mask
            whole = begin + tl.maximum(tl.minimum(end, position + first_row // G + 1) - begin, 0) // BN * BN
        else:
            whole = begin
        for at in range(begin, whole, BN):
            values, highest, total = _visit(
                values, highest, total, queries, k_cache, v_cache, k_scales, v_scales, tables + tile * M, head, at,
                end, place, seen, K, C, V, CP, VP, P, BN, SCALE, WINDOW, SOFTCAP, False,
            )  # fmt: skip
        for at in range(whole, end, BN):
            values, highest, total = _visit(
                values, highest, total, queries, k_cache, v_cache, k_scales, v_scales, tables + tile * M, head, at,
                end, place, seen, K, C, V, CP, VP, P, BN, SCALE, WINDOW, SOFTCAP, True,
            )  # fmt: skip
        is_stored = is_row[:, None] & (values_at < V)[None, :]
        if some == 1:
            result = values / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(out + own[:, None] * V + values_at[None, :], result.to(out.dtype.element_ty), mask=is_stored)


def paged_prefill(q: Array, tiles: Tiles, args: AttentionArgs, *, tile: int, capability: int | None) -> Array:
    if triton_latent.takes(args, LARGEST):
        return triton_latent.paged_prefill(q, tiles, args, tile=tile, capability=capability)
    heads, kv_heads = q.shape[1], args.kv_heads
    rows = tile * (heads // kv_heads)
    chosen = tuning.of_prefill(capability, rows, q.shape[2], str(q.dtype), str(args.k_cache.dtype))
    width = args.value_width
    shape = (q.shape[0], heads, width)
    blocks = -(-rows // chosen.rows)
    untouched = jnp.zeros(shape, q.dtype)
    (out,) = call(
        attend,
        (
            q,
            *cache_arrays(args),
            args.tables,
            tiles.length,
            tiles.start,
            tiles.position,
            args.sinks,
            args.last_seen,
            untouched,
        ),
        [jax.ShapeDtypeStruct(shape, q.dtype)],
        (len(tiles.start), kv_heads * blocks),
        chosen.tuning,
        capability,
        aliases={11: 0},
        **constants(q, args),
        WINDOW=args.window,
        BM=chosen.rows,
        BN=chosen.keys,
    )
    return out


def cache_arrays(args: AttentionArgs) -> tuple[Array | None, ...]:
    v_scales = args.k_scales if args.v_cache is None else args.v_scales
    return args.k_cache, args.v_cache, args.k_scales, v_scales


def constants(q: Array, args: AttentionArgs) -> dict[str, Any]:
    size, width = q.shape[2], args.value_width
    return {
        "H": q.shape[1],
        "K": args.kv_heads,
        "C": size,
        "V": width,
        "CP": padded(size),
        "VP": padded(width),
        "P": args.k_cache.shape[2],
        "M": args.tables.shape[1],
        "SCALE": args.scale * LOG2_E,
        "SOFTCAP": args.softcap,
    }


def padded(size: int) -> int:
    return max(_SMALLEST, triton.next_power_of_2(size))
