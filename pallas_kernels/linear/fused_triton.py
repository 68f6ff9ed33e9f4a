"""Products of few tokens for NVIDIA GPUs in Triton, fused with adjacent operations, which need complete sums.

Few programs get more loads in flight: faster on an H100 than splitting columns.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import replace

import jax
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import triton_bridge, tuning
from pallas_kernels.activations import Activation
from pallas_kernels.choice import Site
from pallas_kernels.linear import fused_xla
from pallas_kernels.triton_activations import gated
from pallas_kernels.triton_bridge import call


def refusal(operation: str, site: Site) -> str | None:
    if site.kind != "float":
        return "quantized weights are for `linear` to multiply"
    if site.is_deterministic:
        return "deterministic mode has products of its own"
    if site.platform == "gpu" and site.dtype != "bfloat16":
        # The gain multiplies before the norm: float16 may overflow.
        return f"it is for bfloat16, not {site.dtype}"
    return triton_bridge.refusal(replace(site, cache_dtype=site.dtype))


@triton.jit
def multiply_fused(
    x,
    weight,
    bias,
    gain,
    residual,
    out,
    T: tl.constexpr,
    O: tl.constexpr,  # noqa: E741
    D: tl.constexpr,
    EPS: tl.constexpr,
    IS_PLUS_ONE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Multiply BM tokens with BN rows of one or two matrices, BK columns at a time.

    Grid (row blocks, token blocks), `out` [T, O]. T is None if BM divides it.
    """
    MATRICES: tl.constexpr = 1 if ACTIVATION is None else 2
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    tokens = tl.program_id(1) * BM + tl.arange(0, BM)
    both = tl.arange(0, MATRICES * BN)
    is_stored_row = tl.program_id(0) * BN + both % BN < O
    stored_row = tl.program_id(0) * BN + both % BN + both // BN * O
    x_at = x + tokens.to(tl.int64)[:, None] * D
    weight_at = weight + stored_row.to(tl.int64)[:, None] * D
    sums = tl.zeros((MATRICES * BN, BM), tl.float32)
    squares = tl.zeros((BM,), tl.float32)
    for start in range(0, D, BK):
        columns = start + tl.arange(0, BK)
        mask = tl.full((BM, BK), True, tl.int1)
        is_stored = tl.full((MATRICES * BN, BK), True, tl.int1)
        if T is not None:
            mask = mask & (tokens < T)[:, None]
        if O % BN != 0:
            is_stored = is_stored & is_stored_row[:, None]
        if D % BK != 0:
            mask = mask & (columns < D)[None, :]
            is_stored = is_stored & (columns < D)[None, :]
        part = tl.load(x_at + columns[None, :], mask=mask, other=0.0)
        numbers = tl.load(weight_at + columns[None, :], mask=is_stored, other=0.0)
        if gain is not None:
            factor = tl.load(gain + columns, mask=columns < D, other=0.0).to(tl.float32)
            wide = part.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            part = (wide * (1.0 + factor if IS_PLUS_ONE else factor)[None, :]).to(part.dtype)
        sums = tl.dot(numbers, tl.trans(part), sums, input_precision="ieee")
    if gain is not None:
        sums *= tl.rsqrt(squares / D + EPS)[None, :]
    if bias is not None:
        sums += tl.load(bias + stored_row, mask=is_stored_row, other=0.0).to(tl.float32)[:, None]
    if ACTIVATION is not None:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (2, BN, BM)), (1, 2, 0)))
        sums = gated(gate, up, ACTIVATION, None, 0.0)
    places = tokens.to(tl.int64)[:, None] * O + rows[None, :]
    is_result = (rows < O)[None, :]
    if T is not None:
        is_result = is_result & (tokens < T)[:, None]
    result = tl.trans(sums)
    if residual is not None:
        result += tl.load(residual + places, mask=is_result, other=0.0).to(tl.float32)
    tl.store(out + places, result.to(out.dtype.element_ty), mask=is_result)


def fused_linear(
    x: Array,
    weight: Array,
    bias: Array | None,
    gain: Array | None,
    residual: Array | None,
    *,
    eps: float,
    is_plus_one: bool,
    activation: Activation | None,
    capability: int | None,
) -> Array:
    (num_tokens, columns), is_gated = x.shape, activation is not None
    rows = weight.shape[0] // 2 if is_gated else weight.shape[0]
    chosen = tuning.of_fused_linear(capability, num_tokens, rows, columns, is_gated, gain is not None)
    if gain is not None and num_tokens > tuning.NORMED_INSIDE:
        x, gain = fused_xla.normed(x, gain, eps, is_plus_one), None
    (out,) = call(
        multiply_fused,
        (x, weight, bias, gain, residual),
        [jax.ShapeDtypeStruct((num_tokens, rows), x.dtype)],
        (triton.cdiv(rows, chosen.rows), triton.cdiv(num_tokens, chosen.tokens)),
        chosen.tuning,
        capability,
        T=None if num_tokens % chosen.tokens == 0 else num_tokens,
        O=rows,
        D=columns,
        EPS=eps,
        IS_PLUS_ONE=is_plus_one,
        ACTIVATION=activation,
        BM=chosen.tokens,
        BN=chosen.rows,
        BK=chosen.columns,
    )
    return out
