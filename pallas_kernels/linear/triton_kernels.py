"""Products with quantized weights for NVIDIA GPUs in Triton; numbers are converted in registers.

Weight rows are the first tensor core operand, which Hopper takes from registers. Few rows share columns among programs;
the consumer adds their sums in order: deterministic. Scales multiply sums of exact products: more accurate than XLA.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import functools
import operator
from dataclasses import replace

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array, lax

from pallas_kernels import triton_bridge, tuning
from pallas_kernels.choice import Site
from pallas_kernels.linear.numbers import PACKED, Kind
from pallas_kernels.triton_bridge import call

_NATIVE = 89  # first with 8-bit floats
_SMALLEST = 16  # columns of a tensor core operation


def refusal(operation: str, site: Site) -> str | None:
    if site.kind == "float":
        return "weights that are floats are XLA's to multiply"
    if site.rounds_rows:
        return "rows rounded to 8 bits are XLA's to multiply"
    return triton_bridge.refusal(replace(site, cache_dtype=site.dtype))


@triton.jit
def _integers(codes, OFFSET: tl.constexpr, DTYPE: tl.constexpr):
    """Convert `codes` minus OFFSET to floats, through the low bits of 1024 as float16, or of 128 as bfloat16.

    Exact; integer conversion takes several times as long.
    """
    if DTYPE == tl.bfloat16 and OFFSET == 8:
        return (codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - (128.0 + OFFSET)
    else:
        return (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + OFFSET)


@triton.jit
def _floats(codes, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    sign: tl.constexpr = 1 << BITS
    codes = codes.to(tl.int16)
    bits = ((codes & (sign - 1)) << (10 - MANTISSA)) | ((codes & sign) << (15 - BITS))
    return bits.to(tl.float16, bitcast=True) * (2.0 ** (15 - BIAS))


@triton.jit
def _product(raw, zero, tokens, sums, KIND: tl.constexpr):
    """Add products of `raw` [BN, C] minus `zero` [BN] with `tokens` [BM, C] to `sums` [BN, BM]."""
    if KIND == "int8":
        numbers = _integers(raw.to(tl.uint8, bitcast=True) ^ 128, 128, tokens.dtype)
    elif KIND == "int4":
        numbers = _integers(raw, 8, tokens.dtype)
    elif KIND == "float4":
        numbers = _floats(raw, 3, 1, 1)
    elif raw.dtype == tl.uint8:
        numbers = _floats(raw, 7, 3, 7)
    else:
        numbers = raw.to(tl.float16)
    if zero is not None:
        numbers = numbers.to(tl.float32) - zero[:, None]
    return tl.dot(numbers.to(tokens.dtype), tl.trans(tokens), sums, input_precision="ieee")


@triton.jit
def multiply(
    x,
    weight,
    scales,
    zeros,
    out,
    T: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    D: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Multiply BM tokens with BN rows; grid (token blocks, row blocks, SPLITS), out [T, SPLITS, O].

    A step is BK columns of one group; each split takes STEPS. T is None if BM divides it.
    """
    tokens = tl.program_id(0) * BM + tl.arange(0, BM)
    rows = tl.program_id(1) * BN + tl.arange(0, BN)
    split = tl.program_id(2)
    PACK: tl.constexpr = 2 if KIND == "int4" or KIND == "float4" else 1
    A_GROUP: tl.constexpr = (GROUP + BK - 1) // BK
    GROUPS: tl.constexpr = D // GROUP
    is_row = rows < O
    x_at = x + tokens.to(tl.int64)[:, None] * D
    weight_at = weight + rows.to(tl.int64)[:, None] * (D // PACK)
    sums = tl.zeros((BN, BM), tl.float32)
    for step in range(split * STEPS, tl.minimum(split * STEPS + STEPS, A_GROUP * GROUPS)):
        group = step // A_GROUP
        columns = step % A_GROUP * BK + tl.arange(0, BK)
        places = step % A_GROUP * (BK // PACK) + tl.arange(0, BK // PACK)
        # Weights' mask too: adjacent columns belong to one group.
        mask = tl.full((BM, BK), True, tl.int1)
        if T is not None:
            mask = mask & (tokens < T)[:, None]
        if GROUP % BK != 0:
            mask = mask & (columns < GROUP)[None, :]
        part = tl.load(x_at + group * GROUP + columns[None, :], mask=mask, other=0.0)
        is_there = tl.full((BN, BK // PACK), True, tl.int1)
        if O % BN != 0:
            is_there = is_there & is_row[:, None]
        if GROUP % BK != 0:
            is_there = is_there & (places < GROUP // PACK)[None, :]
        raw = tl.load(weight_at + group * (GROUP // PACK) + places[None, :], mask=is_there, other=0.0)
        zero = None
        if zeros is not None:
            zero = tl.load(zeros + group * O + rows, mask=is_row, other=0).to(tl.float32)
        own = sums if GROUPS == 1 else tl.zeros((BN, BM), tl.float32)
        if PACK == 2:
            # Split in registers instead of merging numbers.
            even, odd = tl.split(tl.reshape(part, (BM, BK // 2, 2)))
            own = _product(raw & 15, zero, even, own, KIND)
            own = _product(raw >> 4, zero, odd, own, KIND)
        else:
            own = _product(raw, zero, part, own, KIND)
        if GROUPS == 1:
            sums = own
        else:
            sums += own * tl.load(scales + group * O + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    if GROUPS == 1:
        sums *= tl.load(scales + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    out_at = out + (tokens.to(tl.int64)[:, None] * SPLITS + split) * O + rows[None, :]
    is_stored = is_row[None, :]
    if T is not None:
        is_stored = is_stored & (tokens < T)[:, None]
    tl.store(out_at, tl.trans(sums), mask=is_stored)


def linear(
    x: Array,
    weight: Array,
    scales: Array,
    zeros: Array | None,
    *,
    kind: Kind,
    rounds_rows: bool,
    capability: int | None,
) -> Array:
    """Compute `pallas_kernels.linear` with a quantized weight.

    Without 8-bit float support, a weight's NaN becomes 480.
    """
    if kind == "float" or rounds_rows:
        raise ValueError(f"{refusal('linear', Site('', kind=kind, rounds_rows=rounds_rows))}")
    (num_tokens, columns), rows = x.shape, weight.shape[0]
    group = columns // scales.shape[0]
    if kind in PACKED and group % 2:
        raise ValueError(f"groups of {group} columns do not fit: two columns share a byte")
    if kind == "float8" and (triton_bridge.is_interpreted() or (capability or 0) < _NATIVE):
        weight = lax.bitcast_convert_type(weight, jnp.uint8)
    chosen = tuning.of_linear(capability, num_tokens, rows, columns, kind, str(x.dtype))
    step = min(chosen.columns, max(_SMALLEST * (2 if kind in PACKED else 1), triton.next_power_of_2(group)))
    steps = triton.cdiv(group, step) * scales.shape[0]
    each = triton.cdiv(steps, chosen.splits)
    splits = triton.cdiv(steps, each)
    (parts,) = call(
        multiply,
        (x, weight, scales, zeros),
        [jax.ShapeDtypeStruct((num_tokens, splits, rows), jnp.float32)],
        (triton.cdiv(num_tokens, chosen.tokens), triton.cdiv(rows, chosen.rows), splits),
        chosen.tuning,
        capability,
        T=None if num_tokens % chosen.tokens == 0 else num_tokens,
        O=rows,
        D=columns,
        GROUP=group,
        KIND=kind,
        BM=chosen.tokens,
        BN=chosen.rows,
        BK=step,
        SPLITS=splits,
        STEPS=each,
    )
    return functools.reduce(operator.add, (parts[:, split] for split in range(splits)))
