"""The paged key-value cache on the device: the sizes of its blocks, and the arrays of each layer.

Letters: N blocks in the pool, K key-value heads, P tokens per block, C head size, S slots, M blocks per slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxllm.model.sharding import Layout
from jaxllm.model.spec import Spec, heads_per_shard
from pallas_kernels import SCALED

Leaf = TypeVar("Leaf")
KV_AXES = ("blocks", "kv_heads", None, "head")


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes that every program and the state share."""

    num_slots: int  # S
    num_blocks: int  # N
    block_size: int  # P
    max_model_len: int  # tokens
    float8: str | None = None  # where the cache holds bytes: the type of 8-bit floats that they are

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence, M."""
        return -(-self.max_model_len // self.block_size)


class KvLayer(NamedTuple, Generic[Leaf]):
    """The cache of one layer: keys and values of all blocks, and scales where it holds 8-bit numbers."""

    keys: Leaf  # [N, K, P, C]
    values: Leaf | None  # [N, K, P, C]; None in latent attention, where they are part of the keys
    k_scales: Leaf | None = None  # float32[N, K, P]: factors of the vectors
    v_scales: Leaf | None = None


def block_bytes(spec: Spec, block_size: int, dtype: jnp.dtype, shards: int) -> int:
    """Return the bytes that one block takes on one device in a cache of `dtype`, all layers and scales together.

    Latent attention keeps no values: they are part of the keys, the same on every device.
    """
    arrays = 2 if spec.latent is None else 1
    vector = spec.head_size * dtype.itemsize + (4 if dtype.name in SCALED else 0)
    return arrays * spec.num_layers * heads_per_shard(spec, shards)[1] * block_size * vector


def abstract_kv(
    spec: Spec, geometry: Geometry, layout: Layout, dtype: jnp.dtype
) -> tuple[KvLayer[jax.ShapeDtypeStruct], ...]:
    """Describe the KV blocks of each layer, with scales where 8-bit numbers need them."""
    heads = heads_per_shard(spec, layout.shards("kv_heads"))[1] * layout.shards("kv_heads")
    shape = geometry.num_blocks, heads, geometry.block_size, spec.head_size
    block = jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(*KV_AXES))
    scales = None
    if dtype.name in SCALED:
        scales = jax.ShapeDtypeStruct(shape[:3], jnp.float32, sharding=layout.sharding(*KV_AXES[:3]))
    if spec.latent is not None:
        return (KvLayer(block, None, scales),) * spec.num_layers
    return (KvLayer(block, block, scales, scales),) * spec.num_layers
