"""Pipeline stages: each has some of the layers, on other devices (`Layout.division`).

The arrays of layers with the same place in their stages are stacked along their first axis, which the mesh axis
`PIPELINE` divides, so each device sees the arrays of a model with fewer layers. Places without a layer have zeros.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.errors import UserError
from jaxllm.model.sharding import NO_STAGES, PIPELINE, Division, Layout
from jaxllm.model.spec import Spec


def divide(spec: Spec, count: int) -> Division:
    """Divide the layers among `count` stages; raise UserError if that is impossible.

    All devices run the same program, so layers with the same place have the same kind: window, rotation, experts.
    Layers that repeat are divided in whole periods. First layers that differ, such as DeepSeek's dense ones, have
    places that only the first stage fills.
    """
    if count == 1:
        return NO_STAGES
    experts = spec.experts.layers if spec.experts else (False,) * spec.num_layers
    kinds = [*zip(spec.windows, spec.ropes, experts, strict=True)]
    for leading in range(1 + spec.num_layers // (count + 1)):
        others = kinds[leading:]
        period = _period(others)
        units = -(-len(others) // period)
        if count <= units:
            sizes = [period * (units // count + (stage < units % count)) for stage in range(count - 1)]
            firsts = accumulate(sizes, initial=leading)
            return Division((0, *list(firsts)[1:], spec.num_layers), leading)
    most = -(-spec.num_layers // _period(kinds))
    why = f"it has {spec.num_layers} layers" + (f", which repeat after {_period(kinds)}" if _period(kinds) > 1 else "")
    remedy = f"Use at most {most}" if most > 1 else "Use tensor_parallel_size instead"
    raise UserError(
        f"pipeline_parallel_size {count} does not suit the model: {why}. {remedy}.", "pipeline_parallel_size"
    )


def _period(kinds: Sequence[Any]) -> int:
    return next(size for size in range(1, len(kinds) + 1) if kinds[size:] == kinds[:-size])


def ends(layout: Layout) -> list[int]:
    """Return the place after each stage's last layer; the first is the largest."""
    leading = layout.division.leading
    return [end - first + leading * (first > 0) for first, end in pairwise(layout.bounds)]


def place_of(layer: int, layout: Layout) -> tuple[int, int]:
    """Return a layer's stage, and its place there; the number of layers: the place after the last one's."""
    stage = min(bisect_right(layout.bounds, layer), layout.stages) - 1
    return stage, layer - layout.bounds[stage] + layout.division.leading * (stage > 0)


def of_one(spec: Spec, layout: Layout) -> Spec:
    """Return the model that each stage computes."""
    if not layout.bounds:
        return spec
    count = ends(layout)[0]
    experts = spec.experts and replace(spec.experts, layers=spec.experts.layers[:count])
    return replace(spec, num_layers=count, windows=spec.windows[:count], ropes=spec.ropes[:count], experts=experts)


def stack(tree: Any, layout: Layout) -> Any:
    """Describe the arrays of all stages, from descriptions of those of one."""
    return jax.tree.map(partial(_stacked, layout), tree) if layout.bounds else tree


def describe(layers: Sequence[Any], layout: Layout) -> tuple[Any, ...]:
    """Describe the arrays of all layers by place; raise UserError if those of a place differ."""
    if not layout.bounds:
        return tuple(layers)
    places = tuple(layers[: ends(layout)[0]])
    for number, layer in enumerate(layers):
        place = place_of(number, layout)[1]
        if jax.tree.structure(layer) != jax.tree.structure(places[place]) or any(
            (one.shape, one.dtype) != (other.shape, other.dtype)
            for one, other in zip(jax.tree.leaves(layer), jax.tree.leaves(places[place]), strict=True)
        ):
            raise UserError(
                f"pipeline_parallel_size {layout.stages} does not suit the model: the weights of layers {place} and "
                f"{number} differ. Use tensor_parallel_size instead.",
                "pipeline_parallel_size",
            )
    return tuple(stack(each, layout) for each in places)


def join(layers: Sequence[Any], layout: Layout) -> tuple[Any, ...]:
    """Join the arrays of layers, each on the devices of its stage, without copying. Other processes' are
    descriptions.
    """
    if not layout.bounds:
        return tuple(layers)
    return tuple(
        jax.tree.map(partial(_joined, layout), *(layers[layer] for layer in numbers)) for numbers in _layers(layout)
    )


def each_layer(places: Sequence[Any], layout: Layout) -> tuple[Any, ...]:
    """Return the element of `places` for each layer."""
    if not layout.bounds:
        return tuple(places)
    return tuple(places[place_of(layer, layout)[1]] for layer in range(layout.bounds[-1]))


def on_others(array: Array | None, here: Layout) -> dict[Any, Array]:
    """Return an array's pieces by device, without those of one stage's devices."""
    if array is None:
        return {}
    own = set(here.devices)
    return {shard.device: shard.data for shard in array.addressable_shards if shard.device not in own}


def with_others(array: Array, others: dict[Any, Array], layout: Layout) -> Array:
    """Join a stage's array with the others' pieces, which may be in the host's memory."""
    held = {device: jax.device_put(piece, device) for device, piece in others.items()}
    return _of_pieces(layout, array, held | {shard.device: shard.data for shard in array.addressable_shards})


def join_on_host(layers: Sequence[Any], layout: Layout) -> tuple[Any, ...]:
    if not layout.bounds:
        return tuple(layers)

    def joined(*arrays: np.ndarray) -> np.ndarray:
        return np.concatenate([*arrays, *[np.zeros_like(arrays[0])] * (layout.stages - len(arrays))])

    return tuple(jax.tree.map(joined, *(layers[layer] for layer in numbers)) for numbers in _layers(layout))


def _layers(layout: Layout) -> list[list[int]]:
    """Return the layers of each place: of all stages, or of the first ones."""
    found: list[list[int]] = [[] for _ in range(ends(layout)[0])]
    for layer in range(layout.bounds[-1]):
        found[place_of(layer, layout)[1]].append(layer)
    return found


def _stacked(layout: Layout, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    assert isinstance(leaf.sharding, NamedSharding)
    shape = (layout.stages * leaf.shape[0], *leaf.shape[1:])
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(layout.mesh, _axes(leaf.sharding.spec)))


def _axes(of_one: PartitionSpec) -> PartitionSpec:
    first, *others = of_one or (None,)
    if first is None:
        return PartitionSpec(PIPELINE, *others)
    return PartitionSpec((PIPELINE, *((first,) if isinstance(first, str) else first)), *others)


def _joined(layout: Layout, *arrays: Array | jax.ShapeDtypeStruct) -> Array:
    held = {shard.device: shard.data for each in arrays if isinstance(each, Array) for shard in each.addressable_shards}
    return _of_pieces(layout, arrays[0], held)


def _of_pieces(layout: Layout, one: Array | jax.ShapeDtypeStruct, held: dict[Any, Array]) -> Array:
    """Join pieces by device, and zeros, into the array of all stages; `one` is a stage's."""
    assert isinstance(layout.mesh, Mesh) and isinstance(one.sharding, NamedSharding)
    piece = one.sharding.shard_shape(one.shape)
    for device in layout.devices:
        if device not in held and device.process_index == jax.process_index():
            held[device] = jax.device_put(np.zeros(piece, one.dtype), device)
    pieces = [held[device] for device in layout.devices if device in held]
    sharding = NamedSharding(layout.mesh, _axes(one.sharding.spec))
    return jax.make_array_from_single_device_arrays((layout.stages * one.shape[0], *one.shape[1:]), sharding, pieces)
