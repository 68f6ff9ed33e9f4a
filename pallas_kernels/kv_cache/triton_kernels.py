"""Cache writes on NVIDIA GPUs in Triton: rotary embedding and both stores in one kernel.

Small models' decode steps are bound by launches (measured on 8.0 and 9.0).
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import jax
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import triton_bridge, tuning
from pallas_kernels.choice import Site
from pallas_kernels.kv_cache.xla import LIMITS
from pallas_kernels.triton_bridge import call


def refusal(operation: str, site: Site) -> str | None:
    return triton_bridge.refusal(site)


@triton.jit
def _stored(x, inverse, IS_INTEGER: tl.constexpr, LIMIT: tl.constexpr):
    scaled = x * inverse
    if IS_INTEGER:
        scaled = tl.floor(scaled + 0.5)
    return tl.minimum(tl.maximum(scaled, -LIMIT), LIMIT)


@triton.jit
def rotate_and_store(
    qkv,
    blocks,
    offsets,
    cosine,
    sine,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    q,
    T: tl.constexpr,  # None if BT divides it, to reuse kernels
    N: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    ALL: tl.constexpr,
    C: tl.constexpr,
    P: tl.constexpr,
    F: tl.constexpr,
    FP: tl.constexpr,
    REST: tl.constexpr,
    RP: tl.constexpr,
    BT: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    LIMIT: tl.constexpr,  # of scaled numbers; None: no scales
):
    """Rotate and store one head of BT tokens; grid (token blocks, ALL heads: H queries, keys, values).

    Without queries, H is 0. F pairs are rotated, REST coordinates are not; FP and RP are padded to powers of two.
    """
    head = tl.program_id(1)
    tokens = tl.program_id(0) * BT + tl.arange(0, BT)
    is_token = tokens < T if T is not None else tl.full((BT,), 1, tl.int1)
    pairs = tl.arange(0, FP)
    rest = 2 * F + tl.arange(0, RP)
    source = (tokens.to(tl.int64) * ALL + head) * C
    is_pair = is_token[:, None] & (pairs < F)[None, :]
    is_rest = is_token[:, None] & (rest < C)[None, :]
    if IS_INTERLEAVED:
        if head < H + K:
            first_at = 2 * pairs
            second_at = 2 * pairs + 1
        else:
            first_at = pairs
            second_at = pairs + F
    else:
        first_at = pairs
        second_at = pairs + F
    if F > 0:
        first = tl.load(qkv + source[:, None] + first_at[None, :], mask=is_pair, other=0.0).to(tl.float32)
        second = tl.load(qkv + source[:, None] + second_at[None, :], mask=is_pair, other=0.0).to(tl.float32)
        if head < H + K:
            turn = tokens[:, None] * F + pairs[None, :]
            c = tl.load(cosine + turn, mask=is_pair, other=0.0)
            s = tl.load(sine + turn, mask=is_pair, other=0.0)
            turned = first * c - second * s
            second = second * c + first * s
            first = turned
        # Once, for any cache.
        first = first.to(qkv.dtype.element_ty).to(tl.float32)
        second = second.to(qkv.dtype.element_ty).to(tl.float32)
    else:
        first = tl.zeros((BT, FP), tl.float32)
        second = first
    if REST > 0:
        behind = tl.load(qkv + source[:, None] + rest[None, :], mask=is_rest, other=0.0).to(tl.float32)
    else:
        behind = tl.zeros((BT, RP), tl.float32)
    if H > 0 and head < H:
        target = q + ((tokens.to(tl.int64) * H + head) * C)[:, None]
        if F > 0:
            tl.store(target + pairs[None, :], first.to(q.dtype.element_ty), mask=is_pair)
            tl.store(target + F + pairs[None, :], second.to(q.dtype.element_ty), mask=is_pair)
        if REST > 0:
            tl.store(target + rest[None, :], behind.to(q.dtype.element_ty), mask=is_rest)
    else:
        block = tl.load(blocks + tokens, mask=is_token, other=N)
        offset = tl.load(offsets + tokens, mask=is_token, other=0)
        is_kept = is_token & (block < N)
        slot = (block.to(tl.int64) * K + (head - H) % K) * P + offset
        cache = k_cache
        if v_cache is not None:
            if head >= H + K:
                cache = v_cache
        if k_scales is not None:
            scales = k_scales
            if v_scales is not None:
                if head >= H + K:
                    scales = v_scales
            largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
            largest = tl.maximum(largest, tl.max(tl.abs(behind), 1))
            scale = largest / LIMIT
            tl.store(scales + slot, scale, mask=is_kept)
            inverse = (1.0 / tl.where(scale > 0, scale, 1.0))[:, None]
            first = _stored(first, inverse, IS_INTEGER, LIMIT)
            second = _stored(second, inverse, IS_INTEGER, LIMIT)
            behind = _stored(behind, inverse, IS_INTEGER, LIMIT)
        stored_at = cache + slot[:, None] * C
        is_pair = is_pair & is_kept[:, None]
        if F > 0:
            tl.store(stored_at + pairs[None, :], first.to(cache.dtype.element_ty), mask=is_pair)
            tl.store(stored_at + F + pairs[None, :], second.to(cache.dtype.element_ty), mask=is_pair)
        if REST > 0:
            tl.store(stored_at + rest[None, :], behind.to(cache.dtype.element_ty), mask=is_rest & is_kept[:, None])


def write_kv(
    qkv: Array,
    k_cache: Array,
    v_cache: Array | None,
    blocks: Array,
    offsets: Array,
    cosine: Array | None,
    sine: Array | None,
    k_scales: Array | None,
    v_scales: Array | None,
    *,
    is_interleaved: bool,
    capability: int | None,
) -> tuple[Array, Array, Array | None, Array | None, Array | None]:
    num_blocks, kv_heads, block_tokens, _ = k_cache.shape
    heads = qkv.shape[1] - kv_heads * (1 if v_cache is None else 2)
    unchanged = None
    if cosine is None:
        unchanged, qkv, heads = qkv[:, :heads], qkv[:, heads:], 0
    tokens, every, size = qkv.shape
    pairs = 0 if cosine is None else cosine.shape[1]
    rest = size - 2 * pairs
    changed = [(place, one) for place, one in enumerate((k_cache, v_cache, k_scales, v_scales)) if one is not None]
    queries = [] if unchanged is not None else [jax.ShapeDtypeStruct((tokens, heads, size), qkv.dtype)]
    outputs = queries + [jax.ShapeDtypeStruct(one.shape, one.dtype) for _, one in changed]
    block = tuning.write_tokens(tokens)
    name = str(k_cache.dtype)
    given = {} if unchanged is None else {"q": None}
    results = call(
        rotate_and_store,
        (qkv, blocks, offsets, cosine, sine, k_cache, v_cache, k_scales, v_scales),
        outputs,
        (triton.cdiv(tokens, block), every),
        tuning.write(block),
        capability,
        aliases={5 + place: len(queries) + number for number, (place, _) in enumerate(changed)},
        T=tokens if tokens % block else None,
        N=num_blocks,
        H=heads,
        K=kv_heads,
        ALL=every,
        C=size,
        P=block_tokens,
        F=pairs,
        FP=triton.next_power_of_2(max(1, pairs)),
        REST=rest,
        RP=triton.next_power_of_2(max(1, rest)),
        BT=block,
        IS_INTERLEAVED=is_interleaved,
        IS_INTEGER=name == "int8",
        LIMIT=LIMITS[name] if k_scales is not None else None,
        **given,
    )
    q, written = (results[0], results[1:]) if unchanged is None else (unchanged, results)
    found: list[Array | None] = [None] * 4
    for (place, _), array in zip(changed, written, strict=True):
        found[place] = array
    new_keys, new_values, new_k_scales, new_v_scales = found
    assert new_keys is not None
    return q, new_keys, new_values, new_k_scales, new_v_scales
