"""What the numbers of a quantized weight are, and how floats are made of them.

Letters: O rows, D columns, G groups of columns.
"""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

Kind = Literal["float", "int8", "float8", "int4", "float4"]
PACKED = ("int4", "float4")  # kinds of which a byte holds two numbers, that of the even column in its lower half
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1, by the lower three bits; the fourth is the sign (OCP MX 1.0)
_LEAST = 1e-30  # magnitude that a row's largest is taken for at least, so that rows of zeros divide by something


def by_row(x: Any, numpy: Any = jnp) -> tuple[Any, Any]:
    """Round the rows of `x` [T, D] float32 to 255 steps each: int8 [T, D], and the size of a step, float32 [T, 1].

    With either namespace, jax.numpy or numpy, the same bits. A row with a value that is not finite gets a scale that is
    not, so that its products are not finite either.
    """
    largest = numpy.max(numpy.abs(x), axis=-1, keepdims=True)
    scales = numpy.maximum(largest, np.float32(_LEAST)) * np.float32(1 / 127)  # XLA divides by constants so as well
    return numpy.rint(x / scales).astype(np.int8), scales


def dequantized(weight: Any, scales: Any, zeros: Any, kind: Kind, dtype: Any, numpy: Any = jnp) -> Any:
    """Make floats of `dtype` of a weight: [O, D]. Computed in float32, where each number is exact, and rounded once.

    With either namespace, jax.numpy or numpy, the same bits.
    """
    numbers = unpacked(weight, kind, numpy)
    groups, rows = scales.shape
    grouped = numbers.reshape(rows, groups, -1)
    if zeros is not None:
        grouped = grouped - zeros.T[:, :, None].astype(np.float32)
    return (grouped * scales.T[:, :, None].astype(np.float32)).reshape(rows, -1).astype(dtype)


def unpacked(weight: Any, kind: Kind, numpy: Any = jnp) -> Any:
    """Read a weight's numbers as float32: [O, D]. Those of int4 lie between -8 and 7."""
    if kind not in PACKED:
        return weight.astype(np.float32)
    pairs = numpy.stack([weight & 15, weight >> 4], axis=-1).reshape(len(weight), -1)
    if kind == "int4":
        return pairs.astype(np.float32) - np.float32(8)
    return numpy.asarray([*FLOAT4, *(-value for value in FLOAT4)], np.float32)[pairs]


def packed(numbers: Any, numpy: Any = jnp) -> Any:
    """Put two numbers of 0 to 15 [O, D] into each byte: uint8 [O, D / 2]."""
    pairs = numbers.astype(np.uint8).reshape(len(numbers), -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << np.uint8(4))
