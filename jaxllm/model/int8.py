"""Matrices as 8-bit integers with a float32 scale for each output channel, and how they are made.

Symmetric: a row's largest magnitude becomes 127, zero stays zero. Where the input axis is divided among devices, each
has scales of its own for its columns, made from these alone. Knows no model and no checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxllm.model.parameters import Weight
from jaxllm.model.sharding import SPLIT_AXES, named, partition

Leaf = TypeVar("Leaf")

_LEAST = 1e-30  # magnitude that a row's largest is taken for at least, so that rows of zeros divide by something


@flax.struct.dataclass
class Int8(Generic[Leaf]):
    """A matrix [out, in]: `values` [out, in] int8, to be multiplied row by row with `scales` [X, out] float32.

    X are the devices that the input axis is divided among, 1 where it is whole; each holds one row of the scales.
    """

    values: Leaf
    scales: Leaf


def by_row(x: Any, numpy: Any = jnp) -> tuple[Any, Any]:
    """Round the rows of `x` [T, in] float32 to 255 steps each: int8 [T, in], and the size of a step, float32 [T, 1].

    With either namespace, jax.numpy or numpy, the same bits. A row with a value that is not finite gets a scale that is
    not, so that its products are not finite either.
    """
    largest = numpy.max(numpy.abs(x), axis=-1, keepdims=True)
    scales = numpy.maximum(largest, np.float32(_LEAST)) * np.float32(1 / 127)  # XLA divides by constants so as well
    return numpy.rint(x / scales).astype(np.int8), scales


def describe(weight: Weight, mesh: Mesh, dtype: DTypeLike) -> Any:
    """Describe the array of a weight in a model of type `dtype`, or the two of an `Int8`, with nothing allocated."""
    if not weight.is_int8:
        return _describe(weight.shape, weight.type_of(jnp.dtype(dtype)), weight.axes, mesh)
    pieces = mesh.size if weight.axes[1] in SPLIT_AXES else 1
    return Int8(
        _describe(weight.shape, jnp.int8, weight.axes, mesh),
        _describe((pieces, weight.shape[0]), jnp.float32, weight.axes[::-1], mesh),
    )


def _describe(shape: tuple[int, ...], dtype: Any, axes: tuple[str | None, ...], mesh: Mesh) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=named(mesh, axes))


def quantize(array: Array, weight: Weight, mesh: Mesh) -> Int8[Array]:
    """Make an `Int8` of a weight's array, each device from its own piece."""
    return _quantizer(weight.axes, mesh)(array)


@functools.cache
def _quantizer(axes: tuple[str | None, ...], mesh: Mesh) -> Callable[[Array], Int8[Array]]:
    def on_shard(piece: Array) -> Int8[Array]:
        values, scales = by_row(piece.astype(jnp.float32))
        return Int8(values, scales.T)

    specs = Int8(partition(axes), partition(axes[::-1]))
    made = jax.shard_map(on_shard, mesh=mesh, in_specs=specs.values, out_specs=specs)
    return jax.jit(made, out_shardings=Int8(named(mesh, axes), named(mesh, axes[::-1])))
