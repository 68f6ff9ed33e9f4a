"""The paged KV cache on the device: sizes of blocks, and arrays of each layer.

Layers form one or two groups, each with a pool of blocks. The second has the windowed layers of a model with both kinds
(scheduler/windowed.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxllm.errors import UserError
from jaxllm.model.sharding import Layout
from jaxllm.model.spec import Spec, heads_per_shard
from pallas_kernels import SCALED

Leaf = TypeVar("Leaf")
MOST_LOADED = 128  # from the host's tier that wait on the device
KV_AXES = ("blocks", "kv_heads", None, "head")


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes that every program and the state share."""

    num_slots: int  # S
    num_blocks: int  # N
    block_size: int  # P
    max_model_len: int  # tokens
    float8: str | None = None  # type of 8-bit floats in a cache of bytes
    window: int = 0  # most tokens that layers of the second group attend to; 0: one group
    num_window_blocks: int = 0

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)

    @property
    def num_groups(self) -> int:
        return 2 if self.window else 1

    def array_blocks(self, group: int) -> int:
        """Return N of a group's arrays; the last block of windowed layers always holds zeros."""
        return self.num_window_blocks + 1 if group else self.num_blocks

    def group_of(self, window: int | None) -> int:
        return int(self.window > 0 and window is not None)

    def of_group(self, group: int) -> Geometry:
        """Return the sizes for a model with only this group's layers."""
        return replace(self, num_blocks=self.array_blocks(group), window=0, num_window_blocks=0)


class KvLayer(NamedTuple, Generic[Leaf]):
    """One layer's cache, with scales for 8-bit numbers."""

    keys: Leaf  # [N, K, P, C]
    values: Leaf | None  # [N, K, P, C]; None in latent attention, where they are part of the keys
    k_scales: Leaf | None = None  # float32[N, K, P]: factors of the vectors
    v_scales: Leaf | None = None


def most_stores(max_step_tokens: int, block_size: int) -> int:
    """Return the most blocks of a group that wait on the device to be copied to the host's tier.

    A prompt evicts all its blocks at once. Those of two full steps are copied while one of them runs.
    """
    return max(256, 2 * max_step_tokens // block_size)


def window_of(spec: Spec, max_model_len: int) -> int:
    """Return the most tokens that layers of the second group attend to; 0 for one group.

    A window of `max_model_len` or more frees no block. A model with windowed layers only has one group.
    """
    windows = [window for window in spec.windows if window is not None]
    is_mixed = 0 < len(windows) < spec.num_layers
    return max(windows) if spec.is_causal and is_mixed and max(windows) < max_model_len else 0


def leaves_by_group(spec: Spec, geometry: Geometry, kv: Sequence[KvLayer[Any]]) -> list[list[int]]:
    groups = [
        geometry.group_of(window)
        for window, layer in zip(spec.windows, kv, strict=True)
        for _ in jax.tree.leaves(layer)
    ]
    return [[at for at, own in enumerate(groups) if own == group] for group in range(geometry.num_groups)]


def block_bytes(spec: Spec, num_layers: int, block_size: int, dtype: jnp.dtype, shards: int) -> int:
    """Return the bytes of a block of `num_layers` layers on one device, including scales.

    Latent attention stores no values, and keys whole on every device.
    """
    arrays = 2 if spec.latent is None else 1
    vector = spec.head_size * dtype.itemsize + (4 if dtype.name in SCALED else 0)
    return arrays * num_layers * heads_per_shard(spec, shards)[1] * block_size * vector


def abstract_kv(
    spec: Spec, geometry: Geometry, layout: Layout, dtype: jnp.dtype
) -> tuple[KvLayer[jax.ShapeDtypeStruct], ...]:
    heads = heads_per_shard(spec, layout.shards("kv_heads"))[1] * layout.shards("kv_heads")

    def described(group: int) -> KvLayer[jax.ShapeDtypeStruct]:
        shape = geometry.array_blocks(group), heads, geometry.block_size, spec.head_size
        block = jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(*KV_AXES))
        scales = None
        if dtype.name in SCALED:
            scales = jax.ShapeDtypeStruct(shape[:3], jnp.float32, sharding=layout.sharding(*KV_AXES[:3]))
        return KvLayer(block, None, scales) if spec.latent is not None else KvLayer(block, block, scales, scales)

    layers = [described(group) for group in range(geometry.num_groups)]
    return tuple(layers[geometry.group_of(window)] for window in spec.windows)


def host_memory_kind(device: jax.Device) -> str:  # pyright: ignore[reportInvalidTypeForm]
    """Return the kind of host memory for copies, pinned if possible; raise UserError without any."""
    reachable = {memory.kind for memory in device.addressable_memories()}
    for kind in ("pinned_host", "unpinned_host"):
        if kind in reachable:
            return kind
    raise UserError(f"JAX has no host memory for {device}; leave kv_offloading_size out.", "kv_offloading_size")
