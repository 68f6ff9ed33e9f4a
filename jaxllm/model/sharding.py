"""The layout of arrays over devices: a mesh, and rules from logical axes to the mesh axes that divide them.

Weights, caches and programs name logical axes only. A `Layout` makes specs, shardings, numbers of shards and
collectives from them, so the mesh may have any further axes. Independent of weights and models.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxllm.errors import UserError

Function = TypeVar("Function", bound=Callable[..., Any])

# Megatron's division (Shoeybi et al. 2019): heads, the feed-forward's inner axis and the vocabulary are split, the
# residual stream is whole on every device. Two all-reduces a layer.
RULES: Mapping[str, str | None] = dict.fromkeys(("heads", "kv_heads", "feed_forward", "vocab"), "tp")
_WHOLE = frozenset({"width", "head", "position", "experts", "blocks", "slots"})  # axes that no rule can divide


@dataclass(frozen=True)
class Layout:
    """A mesh, and the mesh axis that divides each logical axis; None: the axis is whole.

    Along other axes of the mesh everything is replicated. Collectives are called inside `shard_map`; those of one
    shard are left out, because XLA keeps them, and they split the fusions around them.
    """

    mesh: Mesh | AbstractMesh
    rules: Mapping[str, str | None] = field(hash=False)

    def __post_init__(self) -> None:
        if self.rules.keys() != RULES.keys():
            raise ValueError(f"rules are for {', '.join(RULES)}, not for {', '.join(self.rules)}")
        if self.rules["heads"] != self.rules["kv_heads"]:
            raise ValueError("heads and kv_heads must be divided by the same mesh axis")
        if unknown := set(self.rules.values()) - {*self.mesh.axis_names, None}:
            raise ValueError(f"the mesh has the axes {self.mesh.axis_names}, not {unknown}")

    @property
    def devices(self) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
        """The devices of a mesh that is not abstract."""
        assert isinstance(self.mesh, Mesh)
        return list(self.mesh.devices.flat)

    def axis(self, name: str | None) -> str | None:
        """Return the mesh axis that divides a logical axis, None if it is whole; an unknown name is a KeyError."""
        return None if name is None or name in _WHOLE else self.rules[name]

    def shards(self, name: str | None) -> int:
        """Return the number of shards of a logical axis."""
        axis = self.axis(name)
        return 1 if axis is None else self.mesh.shape[axis]

    def padded(self, name: str, size: int) -> int:
        """Return `size`, rounded up so that all shards of a logical axis have the same length."""
        return -(-size // self.shards(name)) * self.shards(name)

    def spec(self, *names: str | None) -> PartitionSpec:
        """Translate logical axes, one per dimension, into mesh axes; none: an array that is whole on every device."""
        return PartitionSpec(*map(self.axis, names))

    def sharding(self, *names: str | None) -> NamedSharding:
        """Return the sharding of an array with these logical axes, one per dimension; built once."""
        return _sharding(self, names)

    def shard_map(self, run: Function, in_specs: Any, out_specs: Any) -> Function:
        """Return a function of whole arrays that calls `run` with each device's shards."""
        # Kernels inside of shard_map declare no varying axes.
        return jax.shard_map(run, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def index(self, name: str) -> Array | int:
        """Return the number of this device's shard of a logical axis."""
        axis = self.axis(name)
        return 0 if axis is None else lax.axis_index(axis)

    def total(self, x: Array, name: str) -> Array:
        """Return the sum of `x` over the shards of a logical axis; one all-reduce."""
        return x if self.shards(name) == 1 else lax.psum(x, self.axis(name))

    def mean(self, x: Array, name: str) -> Array:
        """Return the mean of `x` over the shards of a logical axis; one all-reduce."""
        return x if self.shards(name) == 1 else lax.pmean(x, self.axis(name))

    def gathered(self, x: Array, name: str, dimension: int) -> Array:
        """Join the shards of a logical axis along a dimension; one all-gather."""
        if self.shards(name) == 1:
            return x
        return lax.all_gather(x, self.axis(name), axis=dimension, tiled=True)

    def with_copies(self, name: str | None, copies: int) -> Layout:
        """Return a layout with groups of `copies` neighbouring shards of a logical axis that hold the same piece."""
        if copies == 1:
            return self
        assert isinstance(self.mesh, Mesh)
        at, shape = self.mesh.axis_names.index(self.axis(name)), self.mesh.devices.shape
        devices = self.mesh.devices.reshape(*shape[:at], -1, copies, *shape[at + 1 :])
        names = (*self.mesh.axis_names[: at + 1], "copies", *self.mesh.axis_names[at + 1 :])
        return replace(self, mesh=Mesh(devices, names))


UNDIVIDED = Layout(AbstractMesh((), ()), dict.fromkeys(RULES))  # of one device; needs no `shard_map`


@functools.cache
def _sharding(layout: Layout, names: tuple[str | None, ...]) -> NamedSharding:
    return NamedSharding(layout.mesh, layout.spec(*names))


def make_layout(devices: Sequence[jax.Device], tensor_parallel_size: int) -> Layout:  # pyright: ignore[reportInvalidTypeForm]
    """Lay the first `tensor_parallel_size` devices along one axis; fewer devices than that is a UserError."""
    if tensor_parallel_size > len(devices):
        more = f", or set XLA_FLAGS=--xla_force_host_platform_device_count={tensor_parallel_size} to split the CPU"
        raise UserError(
            f"tensor_parallel_size is {tensor_parallel_size} but JAX sees {len(devices)} device(s); "
            f"use at most {len(devices)}{more if devices[0].platform == 'cpu' else ''}.",
            "tensor_parallel_size",
        )
    return Layout(Mesh(np.asarray(devices[:tensor_parallel_size]), ("tp",)), RULES)
