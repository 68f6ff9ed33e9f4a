"""Cache writes in Pallas, for reading and experiments. H: query heads, F: rotated pairs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels import pallas_bridge
from pallas_kernels.choice import Site
from pallas_kernels.kv_cache.xla import quantize


def refusal(operation: str, site: Site) -> str | None:
    return pallas_bridge.refusal(site, {"the size of a head": site.head_size})


def rotate_and_store(
    qkv: jax.Ref,
    blocks: jax.Ref,
    offsets: jax.Ref,
    cosine: jax.Ref | None,
    sine: jax.Ref | None,
    k_cache: jax.Ref,
    v_cache: jax.Ref | None,
    k_scales: jax.Ref | None,
    v_scales: jax.Ref | None,
    q: jax.Ref,
    *,
    is_interleaved: bool,
) -> None:
    """Rotate and store one head of one token; grid (T, query, key and value heads)."""
    token, head = pl.program_id(0), pl.program_id(1)
    heads = q.shape[1]
    num_blocks, kv_heads = k_cache.shape[:2]
    is_query = head < heads
    is_value = head >= heads + kv_heads
    is_kept = blocks[token] < num_blocks

    vector = qkv[token, head]
    if cosine is not None and sine is not None:
        vector = jnp.where(is_value, vector, _rotated(qkv, cosine, sine, is_interleaved))

    @pl.when(is_query)
    def _put_query() -> None:
        q[token, head] = vector

    @pl.when(~is_query & ~is_value & is_kept)
    def _store_key() -> None:
        _store(vector, k_cache, k_scales, (blocks[token], head - heads, offsets[token]))

    if v_cache is not None:

        @pl.when(is_value & is_kept)
        def _store_value() -> None:
            _store(vector, v_cache, v_scales, (blocks[token], head - heads - kv_heads, offsets[token]))


def _rotated(qkv: jax.Ref, cosine: jax.Ref, sine: jax.Ref, is_interleaved: bool) -> Array:
    """Return the vector [C], its first 2 F coordinates rotated in float32 and rounded once; kernels cannot slice."""
    token, head = pl.program_id(0), pl.program_id(1)
    pairs = cosine.shape[1]
    at = jnp.arange(qkv.shape[2], dtype=jnp.int32)  # [C]
    pair = at % pairs
    first_at, second_at = (2 * pair, 2 * pair + 1) if is_interleaved else (pair, pairs + pair)
    first, second = qkv[token, head, first_at].astype(jnp.float32), qkv[token, head, second_at].astype(jnp.float32)
    c, s = cosine[token, pair], sine[token, pair]
    turned = jnp.where(at < pairs, first * c - second * s, second * c + first * s).astype(qkv.dtype)
    return jnp.where(at < 2 * pairs, turned, qkv[token, head])


def _store(vector: Array, cache: jax.Ref, scales: jax.Ref | None, place: tuple[Array, Array, Array]) -> None:
    if scales is None:
        cache[place] = vector.astype(cache.dtype)
    else:
        cache[place], scales[place] = quantize(vector, cache.dtype)


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
) -> tuple[Array, Array, Array | None, Array | None, Array | None]:
    tokens, every, size = qkv.shape
    heads = every - k_cache.shape[1] * (1 if v_cache is None else 2)
    changed = {5 + place: one for place, one in enumerate((k_cache, v_cache, k_scales, v_scales)) if one is not None}
    outputs = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in changed.values()]
    outputs.append(jax.ShapeDtypeStruct((tokens, heads, size), qkv.dtype))
    *written, q = pallas_bridge.call(
        functools.partial(rotate_and_store, is_interleaved=is_interleaved),
        (qkv, blocks, offsets, cosine, sine, k_cache, v_cache, k_scales, v_scales),
        outputs,
        grid=(tokens, every),
        aliases={place: output for output, place in enumerate(changed)},
    )
    found = dict(zip(changed, written, strict=True))
    return q, found[5], found.get(6), found.get(7), found.get(8)
