"""Sampling on NVIDIA GPUs in Triton, without sorting: two kernels, six with filters (`triton_filters.py`).

Integers are exact, as in the reference; logarithms are CUDA's, exponentials the hardware's: last bits decide only
near-ties.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import Array

from pallas_kernels import triton_bridge, tuning
from pallas_kernels.choice import Site
from pallas_kernels.sampling import triton_filters
from pallas_kernels.sampling.triton_noise import gumbel
from pallas_kernels.triton_bridge import call

_IMPOSSIBLE = tl.constexpr(float("-inf"))
_MOST_INT = tl.constexpr(2**31 - 1)


def refusal(operation: str, site: Site) -> str | None:
    if site.shards > 1:
        return f"the vocabulary is divided among {site.shards} devices"
    return triton_bridge.refusal(site)


@triton.jit
def survey(logits, temperature, keys, positions, best, ids, is_finite, V: tl.constexpr, BN: tl.constexpr):
    """Reduce BN columns of a row: best score, its id, all finite; grid (rows, pieces)."""
    row = tl.program_id(0)
    piece = tl.program_id(1)
    part = row * tl.num_programs(1) + piece
    columns = piece * BN + tl.arange(0, BN)
    is_token = columns < V
    x = tl.load(logits + row.to(tl.int64) * V + columns, mask=is_token, other=0.0)
    tl.store(is_finite + part, tl.min((tl.abs(x) < float("inf")).to(tl.int32), 0))
    scores = tl.where(is_token & (x == x), x, _IMPOSSIBLE)
    if temperature is not None:
        warmth = tl.load(temperature + row)
        if warmth > 0.0:
            scores = tl.div_rn(scores, warmth) + gumbel(keys, positions, row, columns)
    highest = tl.max(scores, 0)
    tl.store(best + part, highest)
    tl.store(ids + part, tl.min(tl.where(scores == highest, columns, _MOST_INT), 0))


@triton.jit
def finish(best, ids, are_finite, tokens, is_finite, PIECES: tl.constexpr, PP: tl.constexpr):
    """Reduce a row's pieces; grid (rows). PP is padded PIECES."""
    row = tl.program_id(0)
    pieces = tl.arange(0, PP)
    is_there = pieces < PIECES
    part = row * PIECES + pieces
    tl.store(is_finite + row, tl.min(tl.load(are_finite + part, mask=is_there, other=1), 0))
    scores = tl.load(best + part, mask=is_there, other=_IMPOSSIBLE)
    found = tl.load(ids + part, mask=is_there, other=_MOST_INT)
    token = tl.min(tl.where(scores == tl.max(scores, 0), found, _MOST_INT), 0)
    tl.store(tokens + row, token)


def sample(
    logits: Array,
    temperature: Array | None,
    keys: Array | None,
    positions: Array | None,
    top_k: Array | None,
    top_p: Array | None,
    min_p: Array | None,
    *,
    capability: int | None,
) -> tuple[Array, Array]:
    rows, size = logits.shape
    if any(one is not None for one in (top_k, top_p, min_p)):
        assert temperature is not None and keys is not None and positions is not None
        top_k = jnp.zeros(rows, jnp.int32) if top_k is None else top_k
        top_p = jnp.ones(rows, jnp.float32) if top_p is None else top_p
        min_p = jnp.zeros(rows, jnp.float32) if min_p is None else min_p
        tokens, is_finite = triton_filters.choose(logits, temperature, keys, positions, top_k, top_p, min_p, capability)
        return tokens, is_finite != 0
    pieces = -(-size // tuning.SURVEYED)
    outputs = [jax.ShapeDtypeStruct((rows, pieces), dtype) for dtype in (jnp.float32, jnp.int32, jnp.int32)]
    best, ids, are_finite = call(
        survey,
        (logits, temperature, keys, positions),
        outputs,
        (rows, pieces),
        tuning.SURVEY,
        capability,
        V=size,
        BN=tuning.SURVEYED,
    )
    tokens, is_finite = call(
        finish,
        (best, ids, are_finite),
        [jax.ShapeDtypeStruct((rows,), jnp.int32)] * 2,
        (rows,),
        tuning.FINISH,
        capability,
        PIECES=pieces,
        PP=triton.next_power_of_2(pieces),
    )
    return tokens, is_finite != 0
