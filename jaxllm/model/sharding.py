"""Sharding: a mesh, and rules from logical axes to mesh axes."""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar, cast

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxllm.errors import UserError

Function = TypeVar("Function", bound=Callable[..., Any])
Axis = str | tuple[str, ...] | None  # of a mesh, or several, the first the slowest
PIPELINE = "pp"
RANKS = "dp"

# Megatron's division (Shoeybi et al. 2019): two all-reduces per layer. Expert parallelism divides "experts", otherwise
# each expert's width is split. "ranks" are batches of separate requests with separate states, see `ranked`.
RULES: Mapping[str, Axis] = {
    **dict.fromkeys(("heads", "kv_heads", "feed_forward", "vocab"), "tp"),
    "experts": None,
    "ranks": None,
}
_WHOLE = frozenset({"width", "head", "position", "routes", "blocks", "slots"})


class Division(NamedTuple):
    """The layers of pipeline stages, see stages.py."""

    bounds: tuple[int, ...] = ()  # the first layer of each stage, then the number of layers; (): no stages
    leading: int = 0  # layers of the first stage without counterpart in others


NO_STAGES = Division()


@dataclass(frozen=True)
class Layout:
    """A mesh, and the mesh axis of each logical axis; None: replicated.

    `division` gives each place of the mesh axis `PIPELINE` some of the layers. Collectives require `shard_map`; those
    of a single shard are omitted, since XLA would keep them and split fusions.
    """

    mesh: Mesh | AbstractMesh
    rules: Mapping[str, Axis] = field(hash=False)
    division: Division = NO_STAGES

    def __post_init__(self) -> None:
        if self.rules.keys() != RULES.keys():
            raise ValueError(f"rules are for {', '.join(RULES)}, not for {', '.join(self.rules)}")
        if self.rules["heads"] != self.rules["kv_heads"]:
            raise ValueError("heads and kv_heads must be divided by the same mesh axis")
        over = (*_names(self.rules["ranks"]), *_names(self.rules["feed_forward"]))
        if self.rules["experts"] is not None and _names(self.rules["experts"]) != over:
            raise ValueError("experts must be divided by the mesh axis of feed_forward, after that of ranks")
        if unknown := {name for axis in self.rules.values() for name in _names(axis)} - {*self.mesh.axis_names}:
            raise ValueError(f"the mesh has the axes {self.mesh.axis_names}, not {unknown}")

    @property
    def devices(self) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
        assert isinstance(self.mesh, Mesh)
        return list(self.mesh.devices.flat)

    @property
    def spans_processes(self) -> bool:
        """Whether other processes hold parts of divided arrays."""
        return isinstance(self.mesh, Mesh) and len({device.process_index for device in self.devices}) > 1

    @property
    def bounds(self) -> tuple[int, ...]:
        return self.division.bounds

    @property
    def stages(self) -> int:
        return max(1, len(self.bounds) - 1)

    @property
    def ranks(self) -> int:
        return self.shards("ranks")

    @property
    def unstaged(self) -> Layout:
        """Return the layout with all layers on every device, as of a draft model."""
        return replace(self, division=NO_STAGES)

    def of_layer(self, layer: int | None) -> Layout:
        """Return the layout of the devices that hold a layer; None: the weights outside of layers."""
        if layer is None or not self.bounds:
            return self
        assert isinstance(self.mesh, Mesh)
        at, stage = self.mesh.axis_names.index(PIPELINE), bisect_right(self.bounds, layer) - 1
        mesh = Mesh(self.mesh.devices.take([stage], axis=at), self.mesh.axis_names)
        return replace(self, mesh=mesh, division=NO_STAGES)

    @property
    def is_here(self) -> bool:
        return any(device.process_index == jax.process_index() for device in self.devices)

    def axis(self, name: str | None) -> Axis:
        """Return the mesh axis of a logical axis, None if replicated; raise KeyError for unknown names."""
        if name == "expert_width":
            return self.rules["feed_forward"] if self.rules["experts"] is None else None
        return None if name is None or name in _WHOLE else self.rules[name]

    def shards(self, name: str | None) -> int:
        return math.prod(self.mesh.shape[axis] for axis in _names(self.axis(name)))

    def padded(self, name: str, size: int) -> int:
        return -(-size // self.shards(name)) * self.shards(name)

    def spec(self, *names: str | None) -> PartitionSpec:
        return PartitionSpec(*map(self.axis, names))

    def sharding(self, *names: str | None) -> NamedSharding:
        return _sharding(self, names)

    def shard_map(self, run: Function, in_specs: Any, out_specs: Any) -> Function:
        # Kernels inside declare no varying axes.
        return jax.shard_map(run, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def index(self, name: str) -> Array | int:
        axis = self.axis(name)
        return 0 if axis is None else lax.axis_index(axis)

    def total(self, x: Array, name: str) -> Array:
        return x if self.shards(name) == 1 else lax.psum(x, self.axis(name))

    def mean(self, x: Array, name: str) -> Array:
        return x if self.shards(name) == 1 else lax.pmean(x, self.axis(name))

    def gathered(self, x: Array, name: str, dimension: int) -> Array:
        if self.shards(name) == 1:
            return x
        return lax.all_gather(x, self.axis(name), axis=dimension, tiled=True)

    def scattered(self, x: Array, name: str, dimension: int) -> Array:
        """Return this shard's piece of a sum."""
        if self.shards(name) == 1:
            return x
        return lax.psum_scatter(x, self.axis(name), scatter_dimension=dimension, tiled=True)

    def ranked(self, tree: Any) -> Any:
        """Describe the arrays of all ranks, joined along the first axis, from descriptions of those of one."""
        return tree if self.ranks == 1 else jax.tree.map(self._ranked, tree)

    def _ranked(self, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        assert isinstance(leaf.sharding, NamedSharding)
        axes = PartitionSpec(self.axis("ranks"), *leaf.sharding.spec[1:])
        shape = (self.ranks * leaf.shape[0], *leaf.shape[1:])
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(self.mesh, axes))

    def on_each_rank(self, run: Function) -> Function:
        """Apply a function of one rank's arrays, which have a first axis, to those of all."""
        if self.ranks == 1:
            return run
        mapped = self.shard_map(run, self.spec("ranks"), self.spec("ranks"))
        return cast("Function", functools.wraps(run)(mapped))

    def with_copies(self, name: str | None, copies: int) -> Layout:
        """Return a layout in which `copies` adjacent shards of an axis hold the same piece."""
        if copies == 1:
            return self
        assert isinstance(self.mesh, Mesh)
        axis = self.axis(name)
        assert isinstance(axis, str)
        at, shape = self.mesh.axis_names.index(axis), self.mesh.devices.shape
        devices = self.mesh.devices.reshape(*shape[:at], -1, copies, *shape[at + 1 :])
        names = (*self.mesh.axis_names[: at + 1], "copies", *self.mesh.axis_names[at + 1 :])
        return replace(self, mesh=Mesh(devices, names))

    def of_shard(self, name: str | None, number: int) -> Layout:
        """Return the layout of the devices that hold piece `number` of a logical axis."""
        if self.shards(name) == 1:
            return self
        assert isinstance(self.mesh, Mesh)
        axes, devices = _names(self.axis(name)), self.mesh.devices
        places = np.unravel_index(number, [self.mesh.shape[axis] for axis in axes])
        for axis, place in zip(axes, places, strict=True):
            devices = devices.take([place], axis=self.mesh.axis_names.index(axis))
        return replace(self, mesh=Mesh(devices, self.mesh.axis_names))


def _names(axis: Axis) -> tuple[str, ...]:
    return () if axis is None else (axis,) if isinstance(axis, str) else axis


UNDIVIDED = Layout(AbstractMesh((), ()), dict.fromkeys(RULES))  # without `shard_map`


@functools.cache
def _sharding(layout: Layout, names: tuple[str | None, ...]) -> NamedSharding:
    return NamedSharding(layout.mesh, layout.spec(*names))


def make_layout(
    devices: Sequence[jax.Device],  # pyright: ignore[reportInvalidTypeForm]
    tensor_parallel_size: int,
    divides_experts: bool = False,
    division: Division = NO_STAGES,
    num_ranks: int = 1,
) -> Layout:
    """Return a layout that divides axes over the first devices; raise UserError if too few exist.

    With a `division` each stage has adjacent devices, and the vocabulary is divided among all devices, so that none
    idles while logits are computed. Several ranks divide the experts, of which all devices have a part.
    """
    bounds = division.bounds
    count = tensor_parallel_size * max(1, len(bounds) - 1) * num_ranks
    if count > len(devices):
        more = f", or set XLA_FLAGS=--xla_force_host_platform_device_count={count} to split the CPU"
        parameter, asked = "tensor_parallel_size", f"tensor_parallel_size is {tensor_parallel_size}"
        if bounds:
            parameter, stages = "pipeline_parallel_size", len(bounds) - 1
            asked = (
                f"pipeline_parallel_size {stages} and tensor_parallel_size {tensor_parallel_size} take {count} devices,"
            )
        if num_ranks > 1:
            parameter = "data_parallel_size"
            asked = (
                f"data_parallel_size {num_ranks} and tensor_parallel_size {tensor_parallel_size} take {count} devices,"
            )
        raise UserError(
            f"{asked} but JAX sees {len(devices)} device(s); "
            f"use at most {len(devices)}{more if devices[0].platform == 'cpu' else ''}.",
            parameter,
        )
    if num_ranks > 1:
        mesh = Mesh(np.asarray(devices[:count]).reshape(num_ranks, -1), (RANKS, "tp"))
        return Layout(mesh, {**RULES, "experts": (RANKS, "tp"), "ranks": RANKS})
    rules = {**RULES, "experts": "tp"} if divides_experts else RULES
    if not bounds:
        return Layout(Mesh(np.asarray(devices[:count]), ("tp",)), rules)
    mesh = Mesh(np.asarray(devices[:count]).reshape(-1, tensor_parallel_size), (PIPELINE, "tp"))
    return Layout(mesh, {**rules, "vocab": (PIPELINE, "tp")}, division)
