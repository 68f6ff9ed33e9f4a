"""Attention of a step over the paged cache; traced inside the step. Y tiles, M blocks per slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import named_scope

import pallas_kernels
from jaxllm.model import decoder
from jaxllm.model.decoder import Heads
from jaxllm.model.spec import Spec
from jaxllm.runner import batch
from jaxllm.runner.batch import Shape
from jaxllm.setup.kv_cache import Geometry, KvLayer
from pallas_kernels import Choice

# Jitted separately, so that JAX traces them once: two programs of 24 layers in 1.1 s, else 4.3 (DECISIONS, "A step is
# traced in shared pieces").
_write_kv = jax.jit(pallas_kernels.write_kv, static_argnames=("is_interleaved", "float8", "implementation"))
_SETTINGS = ("scale", "window", "softcap", "value_size", "float8", "implementation")
_paged_decode = jax.jit(pallas_kernels.paged_decode, static_argnames=(*_SETTINGS, "batch_invariant"))
_paged_prefill = jax.jit(pallas_kernels.paged_prefill, static_argnames=(*_SETTINGS, "tile"))


def attention(
    spec: Spec,
    geometry: Geometry,
    kernels: Mapping[str, Choice],
    shape: Shape,
    kv: list[KvLayer[jax.Array]],
    tables: jax.Array,
    field: Mapping[str, jax.Array],
    slots: jax.Array,
    positions: jax.Array,
    bias: jax.Array | None = None,
) -> decoder.Attend:
    """Return the function that writes a layer's keys and values to `kv`, then attends."""
    size, groups = geometry.block_size, geometry.num_groups
    # Distinct indices out of bounds: the scatter assumes unique ones.
    nowhere = [geometry.array_blocks(group) + jnp.arange(shape.tokens) for group in range(groups)]
    columns = [positions // size]
    if groups > 1:
        columns = [columns[0] * groups + group for group in range(groups)]
    blocks = [tables.at[slots, column].get(mode="clip") for column in columns]
    is_real = slots < geometry.num_slots
    stored_in = [jnp.where(is_real, own, other) for own, other in zip(blocks, nowhere, strict=True)]
    offsets = positions % size
    is_deterministic = not shape.tiles and not shape.is_decode  # only in deterministic mode
    # All tokens, or the first R, which include the decode rows.
    alone = slice(None) if not shape.tiles else slice(shape.rows)
    alone_tables = _by_group(tables.at[slots[alone]].get(mode="clip"), geometry)  # [T or R, M] each
    lengths = jnp.where(is_real, positions + 1, 0)
    if shape.tiles:
        lengths = jnp.where(jnp.arange(shape.rows) < field["num_decodes"], lengths[alone], 0)
        tile_tables = _by_group(tables.at[field["tile_slot"]].get(mode="clip"), geometry)  # [Y, M] each

    def attend(layer: int, heads: Heads, window: int | None, sinks: jax.Array | None) -> jax.Array:
        with named_scope("cache_write"):
            cache, group = kv[layer], geometry.group_of(spec.windows[layer])
            q, *written = _write_kv(
                heads.qkv,
                cache.keys,
                cache.values,
                stored_in[group],
                offsets,
                turn=heads.turn,
                is_interleaved=heads.is_interleaved,
                k_scales=cache.k_scales,
                v_scales=cache.v_scales,
                float8=geometry.float8,
                implementation=kernels["write_kv"],
            )
        kv[layer] = cache = KvLayer(*written)
        options: dict[str, Any] = {
            "scale": spec.attention_scale,
            "window": window,
            "softcap": spec.attention_softcap,
            "sinks": sinks,
            "value_size": spec.latent.rank if spec.latent else None,
            "k_scales": cache.k_scales,
            "v_scales": cache.v_scales,
            "float8": geometry.float8,
            **({} if bias is None else {"bias": bias}),
        }
        with named_scope("attend"):
            decoded = _paged_decode(
                q[alone],
                cache.keys,
                cache.values,
                alone_tables[group],
                lengths,
                batch_invariant=is_deterministic,
                implementation=kernels["paged_decode"],
                **options,
            )
            if not shape.tiles:
                return decoded
            chunks = _paged_prefill(
                q,
                cache.keys,
                cache.values,
                tile_tables[group],
                field["tile_start"],
                field["tile_length"],
                field["tile_position"],
                tile=batch.TILE,
                **({"last_seen": field["token_last_seen"]} if shape.looks_ahead else {}),
                implementation=kernels["paged_prefill"],
                **options,
            )
            return chunks.at[: shape.rows].add(decoded)  # each is zero in the other's rows

    return attend


def cross_attention(
    spec: Spec,
    geometry: Geometry,
    kernels: Mapping[str, Choice],
    shape: Shape,
    kv: Sequence[KvLayer[jax.Array]],
    sources: jax.Array,
    slots: jax.Array,
) -> decoder.Cross:
    """Return the function that attends to each token's source; `sources` as in `DeviceState`."""
    own = sources.at[slots].get(mode="clip")
    lengths, tables = jnp.where(slots < geometry.num_slots, own[:, 0], 0), own[:, 1:]

    def attend(layer: int, q: jax.Array) -> jax.Array:
        cache = kv[layer]
        with named_scope("attend"):
            return _paged_decode(
                q,
                cache.keys,
                cache.values,
                tables,
                lengths,
                scale=spec.attention_scale,
                k_scales=cache.k_scales,
                v_scales=cache.v_scales,
                float8=geometry.float8,
                batch_invariant=not shape.tiles and not shape.is_decode,
                implementation=kernels["paged_decode"],
            )

    return attend


def _by_group(tables: jax.Array, geometry: Geometry) -> list[jax.Array]:
    if geometry.num_groups == 1:
        return [tables]
    return [tables[:, group :: geometry.num_groups] for group in range(geometry.num_groups)]
