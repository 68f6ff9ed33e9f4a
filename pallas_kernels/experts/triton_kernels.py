"""Mixture of experts for NVIDIA GPUs in Triton: one launch selects, three multiply; one CUDA graph serves all cases.

Weight rows are the first tensor core operand (Hopper: 64), so tiles of assignments can be as narrow as 8.
Half-full last tiles are multiplied as half tiles, but not in deterministic mode: the instruction may differ (mma.sync
for 8, wgmma for 16).
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import triton_bridge, tuning
from pallas_kernels.activations import Activation
from pallas_kernels.choice import Site
from pallas_kernels.experts.xla import Scores
from pallas_kernels.triton_activations import gated
from pallas_kernels.triton_bridge import call


def refusal(operation: str, site: Site) -> str | None:
    if operation == "fused_topk":
        return triton_bridge.refusal(replace(site, cache_dtype=site.dtype))
    if site.kind != "float":
        return f"experts of {site.kind} are XLA's to multiply"
    if site.dtype == "float32" and not triton_bridge.is_interpreted():
        return "experts of float32 are XLA's to multiply"
    return triton_bridge.refusal(replace(site, cache_dtype=site.dtype))


@triton.jit
def choose(
    scores,
    bias,
    chosen,
    gates,
    E: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    SCALE: tl.constexpr,
    BINS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Select a token's experts one by one; grid (tokens,). BINS and PLACES are padded E and n.

    Compares integers ordered like the floats: every index is valid.
    """
    lowest: tl.constexpr = -(2**31)
    token = tl.program_id(0)
    experts, places = tl.arange(0, BINS), tl.arange(0, PLACES)
    is_expert = experts < E
    score = tl.load(scores + token * E + experts, mask=is_expert, other=float("-inf"))
    if IS_SIGMOID:
        score = tl.sigmoid(score)
    else:
        score = tl.exp(score - tl.max(score))
        score = score / tl.sum(score)
    candidate = score
    if bias is not None:
        candidate += tl.load(bias + experts, mask=is_expert, other=0.0)
    bits = candidate.to(tl.int32, bitcast=True)
    keys = tl.where(candidate == candidate, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)  # NaN of both signs
    keys = tl.where(is_expert, keys, lowest)
    best, kept = tl.zeros((PLACES,), tl.int32), tl.zeros((PLACES,), tl.float32)
    for place in tl.static_range(PER_TOKEN):
        winner = tl.argmax(keys, axis=0)
        is_winner = experts == winner
        best = tl.where(places == place, winner, best)
        kept = tl.where(places == place, tl.sum(tl.where(is_winner, score, 0.0)), kept)
        keys = tl.where(is_winner, lowest, keys)
    if IS_NORMALISED:
        kept = kept / (tl.sum(kept) + 1e-20)
    here = token * PER_TOKEN + places
    tl.store(chosen + here, best, mask=places < PER_TOKEN)
    tl.store(gates + here, kept * SCALE, mask=places < PER_TOKEN)


@triton.jit
def plan(
    chosen,
    order,
    tiles,
    N: tl.constexpr,
    E: tl.constexpr,
    BM: tl.constexpr,
    TILES: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sort assignments `chosen` [N] by expert into `order` [N], and list tiles; grid (E,).

    Assignments to E, other devices' experts, are in no tile. `tiles` [3, TILES]: expert, start in `order`, count (0:
    unused). BINS: a power of two above E.
    """
    own = tl.program_id(0)
    experts = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for begin in range(0, N, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        counts += tl.histogram(tl.load(chosen + at, mask=at < N, other=E), BINS)
    before = experts < own
    place = tl.sum(tl.where(before, counts, 0))
    count = tl.sum(tl.where(experts == own, counts, 0))
    first_tile = tl.sum(tl.where(before, (counts + BM - 1) // BM, 0))
    end = first_tile + (count + BM - 1) // BM
    if own == E - 1:
        end = TILES
    for begin in range(first_tile, end, 32):
        at = begin + tl.arange(0, 32)
        inside = (at - first_tile) * BM
        here = tiles + at
        tl.store(here, own, mask=at < end)
        tl.store(here + TILES, place + inside, mask=at < end)
        tl.store(here + 2 * TILES, tl.minimum(tl.maximum(count - inside, 0), BM), mask=at < end)
    for begin in range(0, N, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        is_own = (tl.load(chosen + at, mask=at < N, other=E) == own).to(tl.int32)
        tl.store(order + place + tl.cumsum(is_own) - 1, at, mask=is_own != 0)
        place += tl.sum(is_own)


@triton.jit
def _up(
    x,
    weight,
    bias,
    order,
    inner,
    expert,
    first,
    count,
    D: tl.constexpr,
    F: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CLAMP: tl.constexpr,
    SLOPE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    # Loads past the end repeat a valid one.
    places = tl.arange(0, BM)
    tokens = tl.load(order + first + places, mask=places < count, other=0) // PER_TOKEN
    rows = tl.program_id(1) * BN + tl.arange(0, BN)
    columns = tl.arange(0, BK)
    x_at = x + tokens.to(tl.int64)[:, None] * D + columns[None, :]
    own = expert.to(tl.int64) * (2 * F) + tl.minimum(rows, F - 1)
    weight_at = weight + own[:, None] * D + columns[None, :]
    gates, ups = tl.zeros((BN, BM), tl.float32), tl.zeros((BN, BM), tl.float32)
    for begin in range(0, D, BK):
        if D % BK == 0:
            part = tl.load(x_at + begin)
            gate, up = tl.load(weight_at + begin), tl.load(weight_at + F * D + begin)
        else:
            is_there = (begin + columns < D)[None, :]
            part = tl.load(x_at + begin, mask=is_there, other=0.0)
            gate = tl.load(weight_at + begin, mask=is_there, other=0.0)
            up = tl.load(weight_at + F * D + begin, mask=is_there, other=0.0)
        gates = tl.dot(gate, tl.trans(part), gates, input_precision="ieee")
        ups = tl.dot(up, tl.trans(part), ups, input_precision="ieee")
    if bias is not None:
        gates += tl.load(bias + own).to(tl.float32)[:, None]
        ups += tl.load(bias + own + F).to(tl.float32)[:, None]
    result = tl.trans(gated(gates, ups, ACTIVATION, CLAMP, SLOPE).to(inner.dtype.element_ty))
    inner_at = inner + (first + places).to(tl.int64)[:, None] * F + rows[None, :]
    tl.store(inner_at, result, mask=(places < count)[:, None] & (rows < F)[None, :])


@triton.jit
def multiply_up(
    x,
    weight,
    bias,
    order,
    tiles,
    inner,
    D: tl.constexpr,
    F: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    TILES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CLAMP: tl.constexpr,
    SLOPE: tl.constexpr,
    HALVES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Multiply a tile's tokens with BN gate and BN up rows, and combine them: grid (TILES, blocks of F).

    `inner` [N, F] is in the plan's order.
    """
    tile = tl.program_id(0)
    expert, first, count = tl.load(tiles + tile), tl.load(tiles + TILES + tile), tl.load(tiles + 2 * TILES + tile)
    if HALVES:
        if count > BM // 2:
            _up(x, weight, bias, order, inner, expert, first, count,
                D, F, PER_TOKEN, ACTIVATION, CLAMP, SLOPE, BM, BN, BK)  # fmt: skip
        elif count > 0:
            _up(x, weight, bias, order, inner, expert, first, count,
                D, F, PER_TOKEN, ACTIVATION, CLAMP, SLOPE, BM // 2, BN, BK)  # fmt: skip
    elif count > 0:
        _up(x, weight, bias, order, inner, expert, first, count,
            D, F, PER_TOKEN, ACTIVATION, CLAMP, SLOPE, BM, BN, BK)  # fmt: skip


@triton.jit
def _down(
    inner,
    weight,
    bias,
    order,
    out,
    expert,
    first,
    count,
    D: tl.constexpr,
    F: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    places = tl.arange(0, BM)
    rows = tl.program_id(1) * BN + tl.arange(0, BN)
    columns = tl.arange(0, BK)
    inner_at = inner + (first + tl.minimum(places, count - 1)).to(tl.int64)[:, None] * F + columns[None, :]
    own = expert.to(tl.int64) * D + tl.minimum(rows, D - 1)
    weight_at = weight + own[:, None] * F + columns[None, :]
    sums = tl.zeros((BN, BM), tl.float32)
    for begin in range(0, F, BK):
        if F % BK == 0:
            part, numbers = tl.load(inner_at + begin), tl.load(weight_at + begin)
        else:
            is_there = (begin + columns < F)[None, :]
            part = tl.load(inner_at + begin, mask=is_there, other=0.0)
            numbers = tl.load(weight_at + begin, mask=is_there, other=0.0)
        sums = tl.dot(numbers, tl.trans(part), sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + own).to(tl.float32)[:, None]
    assignments = tl.load(order + first + places, mask=places < count, other=0)
    out_at = out + assignments.to(tl.int64)[:, None] * D + rows[None, :]
    result = tl.trans(sums.to(out.dtype.element_ty))
    tl.store(out_at, result, mask=(places < count)[:, None] & (rows < D)[None, :])


@triton.jit
def multiply_down(
    inner,
    weight,
    bias,
    order,
    tiles,
    out,
    D: tl.constexpr,
    F: tl.constexpr,
    TILES: tl.constexpr,
    HALVES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Multiply a tile of `inner` with BN rows, stored by assignment; grid (TILES, blocks of D)."""
    tile = tl.program_id(0)
    expert, first, count = tl.load(tiles + tile), tl.load(tiles + TILES + tile), tl.load(tiles + 2 * TILES + tile)
    if HALVES:
        if count > BM // 2:
            _down(inner, weight, bias, order, out, expert, first, count, D, F, BM, BN, BK)
        elif count > 0:
            _down(inner, weight, bias, order, out, expert, first, count, D, F, BM // 2, BN, BK)
    elif count > 0:
        _down(inner, weight, bias, order, out, expert, first, count, D, F, BM, BN, BK)


def fused_topk(
    scores: Array,
    bias: Array | None,
    *,
    per_token: int,
    kind: Scores,
    is_normalised: bool,
    scale: float,
    capability: int | None,
) -> tuple[Array, Array]:
    tokens, experts = scores.shape
    chosen, gates = call(
        choose,
        (scores.astype(jnp.float32), bias),
        [jax.ShapeDtypeStruct((tokens, per_token), dtype) for dtype in (jnp.int32, jnp.float32)],
        (tokens,),
        tuning.CHOOSE,
        capability,
        E=experts,
        PER_TOKEN=per_token,
        IS_SIGMOID=kind == "sigmoid",
        IS_NORMALISED=is_normalised,
        SCALE=scale,
        BINS=triton.next_power_of_2(experts),
        PLACES=triton.next_power_of_2(per_token),
    )
    return chosen, gates


def num_tiles(assignments: int, experts: int, size: int) -> int:
    """Return the most tiles of a plan: each expert's last tile may have a single assignment."""
    used = min(assignments, experts)
    return used + (assignments - used) // size


def fused_experts(
    x: Array,
    up: Array,
    down: Array,
    chosen: Array,
    gates: Array,
    up_bias: Array | None,
    down_bias: Array | None,
    *,
    activation: Activation,
    clamp: float | None,
    clamp_slope: float,
    num_experts: int | None,
    capability: int | None,
    is_deterministic: bool,
) -> Array:
    (tokens, width), (experts, _, inner_width) = x.shape, down.shape
    total = chosen.size
    tile = tuning.of_experts(capability, total, num_experts or experts, str(x.dtype), is_deterministic)
    count = num_tiles(total, experts, tile.assignments)
    sizes: dict[str, Any] = {"D": width, "F": inner_width, "TILES": count, "BM": tile.assignments, "BK": tile.columns}
    sizes["HALVES"] = tile.has_halves
    block, planned = tuning.of_plan(total)
    order, tiles = call(
        plan,
        (chosen.reshape(total).astype(jnp.int32),),
        [jax.ShapeDtypeStruct((total,), jnp.int32), jax.ShapeDtypeStruct((3, count), jnp.int32)],
        (experts,),
        planned,
        capability,
        N=total,
        E=experts,
        BM=tile.assignments,
        TILES=count,
        BINS=triton.next_power_of_2(experts + 1),
        BLOCK=block,
    )
    rows = tuning.fitting(tile.rows // 2, inner_width)
    (inner,) = call(
        multiply_up,
        (x, up, up_bias, order, tiles),
        [jax.ShapeDtypeStruct((total, inner_width), x.dtype)],
        (count, triton.cdiv(inner_width, rows)),
        tile.tuning,
        capability,
        **sizes,
        PER_TOKEN=chosen.shape[1],
        ACTIVATION=activation,
        CLAMP=clamp,
        SLOPE=clamp_slope,
        BN=rows,
    )
    rows = tuning.fitting(tile.rows, width)
    (out,) = call(
        multiply_down,
        (inner, down, down_bias, order, tiles),
        [jax.ShapeDtypeStruct((total, width), x.dtype)],
        (count, triton.cdiv(width, rows)),
        tile.tuning,
        capability,
        **sizes,
        BN=rows,
    )
    weighted = out.reshape(tokens, -1, width).astype(jnp.float32) * gates[:, :, None]
    if num_experts is not None:  # other devices' rows are not written
        weighted = jnp.where((chosen < experts)[:, :, None], weighted, 0.0)
    return jnp.sum(weighted, axis=1)
