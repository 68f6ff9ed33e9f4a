"""Matrices of quantized numbers with scales."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jaxllm.errors import UserError
from jaxllm.model.parameters import Scheme, Weight
from jaxllm.model.sharding import Layout
from pallas_kernels import Kind, by_row
from pallas_kernels.linear.numbers import FLOAT4, PACKED, dequantized, packed

Leaf = TypeVar("Leaf")

_LEAST = 1e-30
_BETWEEN = tuple((low + high) / 2 for low, high in itertools.pairwise(FLOAT4))
_VALUES: dict[Kind, Any] = {
    **{"int8": jnp.int8, "float8": jnp.float8_e4m3fn},
    **{"int4": jnp.uint8, "float4": jnp.uint8},
}


@flax.struct.dataclass
class Quantized(Generic[Leaf]):
    """A quantized matrix [out, in] for `pallas_kernels.linear`: values [out, in], or [out, in / 2] with two per byte.

    `scales` [G, out] for G groups of columns (G devices, if each has one). `zeros` [G, out] are subtracted before
    scaling. Experts add a leading axis E.
    """

    values: Leaf
    scales: Leaf
    zeros: Leaf | None = None
    scheme: Scheme = flax.struct.field(pytree_node=False, default=Scheme())


def fitted(scheme: Scheme, weight: Weight, layout: Layout) -> Scheme:
    """Return the scheme with groups that divide a device's columns, stored ones split into groups of equal scale."""
    columns = weight.shape[-1] // layout.shards(weight.axes[-1])
    if columns % 2 and scheme.kind in PACKED:
        raise UserError(
            f"quantization: two numbers of {scheme.kind} do not fill a byte in rows of {columns} columns on a device; "
            "choose another tensor_parallel_size.",
            "tensor_parallel_size",
        )
    return scheme if scheme.group is None else replace(scheme, group=math.gcd(scheme.group, columns))


def describe(weight: Weight, layout: Layout, dtype: DTypeLike) -> Any:
    scheme = weight.scheme
    if scheme is None:
        return _describe(weight.shape, weight.type_of(jnp.dtype(dtype)), weight.axes, layout)
    *stack, rows, columns = weight.shape
    groups = layout.shards(weight.axes[-1]) if scheme.group is None else columns // scheme.group
    width = columns // 2 if scheme.kind in PACKED else columns
    axes, of_groups = turned(weight.axes), (*stack, groups, rows)
    return Quantized(
        _describe((*stack, rows, width), _VALUES[scheme.kind], weight.axes, layout),
        _describe(of_groups, jnp.float32, axes, layout),
        _describe(of_groups, _zeros_type(scheme), axes, layout) if scheme.has_zeros else None,
        scheme=scheme,
    )


def turned(axes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Exchange the last two axes."""
    return (*axes[:-2], axes[-1], axes[-2])


def _zeros_type(scheme: Scheme) -> Any:
    return jnp.int8 if scheme.kind == "int4" else jnp.int16  # unsigned zeros reach 128


def _describe(shape: tuple[int, ...], dtype: Any, axes: tuple[str | None, ...], layout: Layout) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(*axes))


def rounded(x: Any, scheme: Scheme, numpy: Any = jnp) -> tuple[Any, Any]:
    """Quantize rows `x` [O, D] float32 without zeros; return values (4-bit ones packed) and scales [O, G]."""
    rows = len(x)
    x = x if scheme.group is None else x.reshape(-1, scheme.group)
    if scheme.kind == "int8":
        values, scales = by_row(x, numpy)
    else:
        largest = numpy.maximum(numpy.max(numpy.abs(x), axis=-1, keepdims=True), np.float32(_LEAST))
        if scheme.kind == "float8":
            scales = largest * np.float32(1 / 448)
            values = numpy.clip(x / scales, -448, 448).astype(jnp.float8_e4m3fn)
        elif scheme.kind == "int4":
            scales = largest * np.float32(1 / 7)
            values = numpy.clip(numpy.rint(x / scales), -7, 7) + 8
        else:  # a power of two; float4's maximum is 6
            _, exponent = numpy.frexp(largest)
            scales = numpy.ldexp(np.float32(1), numpy.clip(exponent - 3, -126, 127)).astype(np.float32)
            values = numpy.sum(numpy.abs(x / scales)[..., None] > np.asarray(_BETWEEN, np.float32), axis=-1) + 8 * (
                x < 0
            )
    values = values.reshape(rows, -1)
    return packed(values, numpy) if scheme.kind in PACKED else values, scales.reshape(rows, -1)


def quantize(array: Array, weight: Weight, layout: Layout) -> Quantized[Array]:
    assert weight.scheme is not None
    return _quantizer(weight.scheme, weight.axes, layout)(array)


@functools.cache
def _quantizer(scheme: Scheme, axes: tuple[str | None, ...], layout: Layout) -> Callable[[Array], Quantized[Array]]:
    def of_one(piece: Array) -> Quantized[Array]:
        values, scales = rounded(piece.astype(jnp.float32), scheme)
        zeros = jnp.zeros(scales.T.shape, _zeros_type(scheme)) if scheme.has_zeros else None
        return Quantized(values, scales.T, zeros, scheme=scheme)

    def on_shard(piece: Array) -> Quantized[Array]:
        return of_one(piece) if piece.ndim == 2 else jax.vmap(of_one)(piece)

    def laid_out(lay: Callable[..., Any]) -> Quantized[Any]:
        of_groups = lay(*turned(axes))
        return Quantized(lay(*axes), of_groups, of_groups if scheme.has_zeros else None, scheme=scheme)

    made = layout.shard_map(on_shard, layout.spec(*axes), laid_out(layout.spec))
    return jax.jit(made, out_shardings=laid_out(layout.sharding))


def floats(weight: Any, dtype: Any) -> Array:
    """Dequantize a `Quantized`, or a stack of them; return arrays unchanged."""
    if not isinstance(weight, Quantized):
        return weight
    one = partial(dequantized, kind=weight.scheme.kind, dtype=dtype)
    make = one if weight.values.ndim == 2 else jax.vmap(one)
    return make(weight.values, weight.scales, weight.zeros)
