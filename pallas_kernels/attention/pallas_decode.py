"""Paged decode attention in Pallas, for reading and experiments. G: query heads per KV head."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pallas_triton

from pallas_kernels import pallas_bridge
from pallas_kernels.attention.arguments import AttentionArgs
from pallas_kernels.attention.xla import LOWEST
from pallas_kernels.choice import Site

LEAST_BLOCK = 16


def refusal(operation: str, site: Site) -> str | None:
    sizes = {
        "the size of a head": site.head_size,
        "the size of a value": site.value_size or site.head_size,
        "the number of tokens in a block": site.block_tokens,
        "the number of query heads per key-value head": site.heads // site.kv_heads,
    }
    if site.block_tokens < LEAST_BLOCK and site.cache_dtype in ("bfloat16", "float16"):
        return f"16-bit products of blocks of {site.block_tokens} are wrong on an H200: {LEAST_BLOCK} tokens are needed"
    return pallas_bridge.refusal(site, sizes)


def attend(
    q: jax.Ref,
    k_cache: jax.Ref,
    v_cache: jax.Ref | None,
    tables: jax.Ref,
    lengths: jax.Ref,
    sinks: jax.Ref | None,
    k_scales: jax.Ref | None,
    v_scales: jax.Ref | None,
    out: jax.Ref,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """Attend with the G query heads of one row and KV head; grid (B, K).

    q [B, K, G, C], sinks [K, G], out [B, K, G, V].
    """
    row, head = pl.program_id(0), pl.program_id(1)
    group, width = out.shape[2:]
    block_tokens = k_cache.shape[2]
    queries = q[row, head]  # [G, C]
    length = lengths[row]
    first_place = 0 if window is None else jnp.maximum(length - window, 0)

    def visit(number: Array, seen: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        values, highest, total = seen  # [G, V], [G], [G]
        block = tables[row, number]
        places = number * block_tokens + jnp.arange(block_tokens, dtype=jnp.int32)  # [P]
        is_seen = (places >= first_place) & (places < length)

        k = _scaled(k_cache[block, head], k_scales, block, head)  # [P, C]
        scores = _dot(queries, k, trans_b=True) * scale  # [G, P]
        if softcap is not None:
            scores = jnp.tanh(scores / softcap) * softcap
        scores = jnp.where(is_seen[None, :], scores, LOWEST)

        highest_now = jnp.maximum(highest, jnp.max(scores, axis=1))
        shrink = jnp.exp(highest - highest_now)
        weights = jnp.where(is_seen[None, :], jnp.exp(scores - highest_now[:, None]), 0.0)

        if v_cache is None:
            v = _scaled(k_cache[block, head, :, pl.ds(0, width)], k_scales, block, head)
        else:
            v = _scaled(v_cache[block, head], v_scales, block, head)  # [P, V]
        v = jnp.where(is_seen[:, None], v, 0)
        values = values * shrink[:, None] + _dot(weights.astype(v.dtype), v)
        return values, highest_now, total * shrink + jnp.sum(weights, axis=1)

    # A sink is a key without value.
    values = jnp.zeros((group, width), jnp.float32)
    if sinks is None:
        seen = values, jnp.full((group,), LOWEST, jnp.float32), jnp.zeros((group,), jnp.float32)
    else:
        seen = values, sinks[head].astype(jnp.float32), jnp.ones((group,), jnp.float32)
    # Table entries beyond the last key are not read.
    values, _, total = lax.fori_loop(first_place // block_tokens, pl.cdiv(length, block_tokens), visit, seen)
    total = jnp.where(total > 0, total, 1.0)  # rows of length 0 return zeros
    out[row, head] = (values / total[:, None]).astype(out.dtype)


def _scaled(stored: Array, scales: jax.Ref | None, block: Array, head: Array) -> Array:
    return stored if scales is None else stored.astype(jnp.float32) * scales[block, head][:, None]


def _dot(a: Array, b: Array, trans_b: bool = False) -> Array:
    """Multiply with float32 sums; mixed types become float32, without TF32."""
    if a.dtype != b.dtype:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return pallas_triton.dot(a, b, trans_b=trans_b, allow_tf32=False)


def paged_decode(q: Array, lengths: Array, args: AttentionArgs) -> Array:
    rows, heads, size = q.shape
    kv_heads, width, sinks = args.kv_heads, args.value_width, args.sinks
    group = heads // kv_heads
    grouped = q.reshape(rows, kv_heads, group, size)
    logits = None if sinks is None else sinks.reshape(kv_heads, group)
    (out,) = pallas_bridge.call(
        functools.partial(attend, scale=args.scale, window=args.window, softcap=args.softcap),
        (grouped, args.k_cache, args.v_cache, args.tables, lengths, logits, args.k_scales, args.v_scales),
        [jax.ShapeDtypeStruct((rows, kv_heads, group, width), q.dtype)],
        grid=(rows, kv_heads),
    )
    return out.reshape(rows, heads, width)
