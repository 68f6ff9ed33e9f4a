"""The device's state, one donated pytree. M blocks per slot, F numbers of a slot's extras."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Generic

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxllm.model import stages
from jaxllm.model.sharding import Layout
from jaxllm.model.spec import Spec
from jaxllm.runner.drafting import Drafted
from jaxllm.sampling.sampler import ROW_WIDTH, Extras
from jaxllm.setup.draft_setup import Drafting
from jaxllm.setup.kv_cache import Geometry, KvLayer, Leaf, abstract_kv


@struct.dataclass
class DeviceState(Generic[Leaf]):
    """Arrays that a step reads and replaces."""

    kv: tuple[KvLayer[Leaf], ...]
    drafted: Drafted[Leaf] | None
    batch: Leaf | None  # int32[W], on a GPU: the latest packed batch, see `step.unpack`
    tables: Leaf  # int32[S, M · groups]: blocks, see `Plan.table`; arbitrary beyond a slot's length; [ticks · S, …]
    tokens: Leaf  # int32[S, M * P]
    sampling: Leaf  # int32[S, ROW_WIDTH]
    extras: Leaf  # int32[S, F] of `sampler.Extras`; the sampling row has the valid length
    hidden: Leaf  # [T, D] of the last widest-variant step, for `scoring`
    media: Leaf | None = None  # [rows, D + …]: see `Context.media`
    sources: Leaf | None = None  # int32[S, 1 + Ms]: number of a source's tokens, then its blocks
    passing: Leaf | None = None  # [T, D] of each stage: residual stream from the stage before, see ticks.py


def abstract(
    spec: Spec,
    geometry: Geometry,
    max_tokens: int,
    extras: Extras,
    layout: Layout,
    dtype: jnp.dtype,
    drafting: Drafting | None = None,
    cache_dtype: jnp.dtype | None = None,
    batch_size: int = 0,
    media: tuple[int, int] = (0, 0),
    source_blocks: int = 0,
    num_ticks: int = 1,
) -> DeviceState[jax.ShapeDtypeStruct]:
    """Describe the state (shapes, types, shardings) without allocating; `max_tokens` is T.

    `batch_size` is W; `media` the shape of images' embeddings; `source_blocks` is Ms. Sizes are of one rank.
    """

    def array(shape: tuple[int, ...], kind: jnp.dtype, *axes: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, kind, sharding=layout.sharding(*axes))

    def of_stages(described: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return stages.stack(described, layout) if num_ticks > 1 else described

    int32, cache_dtype = jnp.dtype(jnp.int32), cache_dtype or dtype
    drafted = None
    if drafting is not None:
        num_aux = 0 if drafting.head is None else len(drafting.head.aux_layers)
        drafted = Drafted(
            lengths=array((geometry.num_slots,), int32, "slots"),
            tokens=array((geometry.num_slots, drafting.most), int32, "slots"),
            kv=() if drafting.spec is None else abstract_kv(drafting.spec, geometry.of_group(0), layout, cache_dtype),
            aux=(array((max_tokens, spec.width), dtype),) * num_aux,
        )
    state = DeviceState(
        kv=stages.stack(abstract_kv(spec, geometry, layout, cache_dtype), layout),
        drafted=drafted,
        batch=array((batch_size,), int32) if batch_size else None,
        tables=of_stages(array((geometry.num_slots, geometry.max_blocks * geometry.num_groups), int32, "slots")),
        tokens=array((geometry.num_slots, geometry.max_blocks * geometry.block_size), int32, "slots"),
        sampling=array((geometry.num_slots, ROW_WIDTH), int32, "slots"),
        extras=array((geometry.num_slots, extras.width), int32, "slots"),
        hidden=array((max_tokens, spec.width), dtype),
        media=array(media, dtype) if media[0] else None,
        sources=array((geometry.num_slots, 1 + source_blocks), int32, "slots") if source_blocks else None,
        passing=of_stages(array((max_tokens, spec.width), dtype)) if num_ticks > 1 else None,
    )
    return layout.ranked(state)


def leaf_index(state: DeviceState[Any], name: str) -> int:
    names = [own.name for own in fields(state)]
    return len(jax.tree.leaves([getattr(state, before) for before in names[: names.index(name)]]))


def lower_allocation(state: Any) -> jax.stages.Lowered:
    """Return the traced allocation: each array is made in place on its devices, so the pool never exists twice."""
    leaves = jax.tree.leaves(state)

    def allocate() -> tuple[jax.Array, ...]:
        return tuple(jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves)

    return jax.jit(allocate, out_shardings=tuple(leaf.sharding for leaf in leaves)).lower()


def nbytes(state: DeviceState[jax.ShapeDtypeStruct]) -> int:
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
