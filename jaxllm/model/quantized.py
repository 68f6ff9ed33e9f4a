"""Matrices of numbers with few bits, and scales for groups of them: what one is, and how it is made on the devices.

Where the input axis is divided among devices, each has scales of its own for its columns. Knows no model and no
checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxllm.model.parameters import Scheme, Weight
from jaxllm.model.sharding import SPLIT_AXES, named, partition
from pallas_kernels import by_row

Leaf = TypeVar("Leaf")


@flax.struct.dataclass
class Quantized(Generic[Leaf]):
    """A matrix [out, in] as `pallas_kernels.linear` takes it: values [out, in], or [out, in / 2] of two in a byte.

    `scales` [G, out], one for each of G groups of columns; where each device has one of its own, G are the devices.
    `zeros` [G, out], or None, are subtracted from the values before a scale multiplies them.
    """

    values: Leaf
    scales: Leaf
    zeros: Leaf | None = None
    scheme: Scheme = flax.struct.field(pytree_node=False, default=Scheme())


def describe(weight: Weight, mesh: Mesh, dtype: DTypeLike) -> Any:
    """Describe the array of a weight in a model of type `dtype`, or those of a `Quantized`, with nothing allocated."""
    scheme = weight.scheme
    if scheme is None:
        return _describe(weight.shape, weight.type_of(jnp.dtype(dtype)), weight.axes, mesh)
    pieces = mesh.size if weight.axes[1] in SPLIT_AXES else 1
    return Quantized(
        _describe(weight.shape, jnp.int8, weight.axes, mesh),
        _describe((pieces, weight.shape[0]), jnp.float32, weight.axes[::-1], mesh),
        scheme=scheme,
    )


def _describe(shape: tuple[int, ...], dtype: Any, axes: tuple[str | None, ...], mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=named(mesh, axes))


def quantize(array: Array, weight: Weight, mesh: Mesh) -> Quantized[Array]:
    """Make a `Quantized` of a weight's array, each device from its own piece."""
    assert weight.scheme is not None
    return _quantizer(weight.scheme, weight.axes, mesh)(array)


@functools.cache
def _quantizer(scheme: Scheme, axes: tuple[str | None, ...], mesh: Mesh) -> Callable[[Array], Quantized[Array]]:
    def on_shard(piece: Array) -> Quantized[Array]:
        values, scales = by_row(piece.astype(jnp.float32))
        return Quantized(values, scales.T, scheme=scheme)

    specs = Quantized(partition(axes), partition(axes[::-1]), scheme=scheme)
    made = jax.shard_map(on_shard, mesh=mesh, in_specs=specs.values, out_specs=specs)
    return jax.jit(made, out_shardings=Quantized(named(mesh, axes), named(mesh, axes[::-1]), scheme=scheme))
