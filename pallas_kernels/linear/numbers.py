"""Formats of quantized weights, and dequantization. O rows, D columns, G groups of columns."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

Kind = Literal["float", "int8", "float8", "int4", "float4"]
PACKED = ("int4", "float4")  # even column in the low half
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1 by lower three bits; then the sign (OCP MX 1.0)
_LEAST = 1e-30  # lower bound of a row's maximum


def by_row(x: Any, numpy: Any = jnp) -> tuple[Any, Any]:
    """Quantize rows of float32 `x` [T, D] to int8; return also step sizes, float32 [T, 1].

    numpy gives the same bits. Non-finite rows get non-finite scales.
    """
    largest = numpy.max(numpy.abs(x), axis=-1, keepdims=True)
    scales = numpy.maximum(largest, np.float32(_LEAST)) * np.float32(1 / 127)  # as XLA divides by constants
    return numpy.rint(x / scales).astype(np.int8), scales


def dequantized(weight: Any, scales: Any, zeros: Any, kind: Kind, dtype: Any, numpy: Any = jnp) -> Any:
    """Dequantize a weight to [O, D] of `dtype`: exact in float32, rounded once; numpy gives the same bits."""
    numbers = unpacked(weight, kind, numpy)
    groups, rows = scales.shape
    grouped = numbers.reshape(rows, groups, -1)
    if zeros is not None:
        grouped = grouped - zeros.T[:, :, None].astype(np.float32)
    return (grouped * scales.T[:, :, None].astype(np.float32)).reshape(rows, -1).astype(dtype)


def unpacked(weight: Any, kind: Kind, numpy: Any = jnp) -> Any:
    """Return a weight's numbers as float32 [O, D]."""
    if kind not in PACKED:
        return weight.astype(np.float32)
    pairs = numpy.stack([weight & 15, weight >> 4], axis=-1).reshape(len(weight), -1)
    if kind == "int4":
        return pairs.astype(np.float32) - np.float32(8)
    return numpy.asarray([*FLOAT4, *(-value for value in FLOAT4)], np.float32)[pairs]


def packed(numbers: Any, numpy: Any = jnp) -> Any:
    pairs = numbers.astype(np.uint8).reshape(len(numbers), -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << np.uint8(4))
