"""Products in XLA. Weights are dequantized first, unless rows are rounded too."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.linear.numbers import Kind, by_row, dequantized

# Most rows for transposed float32 products: 1.2 to 2.2 times as fast with 2 to 64 rows and matrices of 512 × 1,376 to
# 16,384 × 2,048 on two Zen 5 cores, equal from 96 on (jax 0.11.2).
_FEW_ROWS = 64


def linear(
    x: Array,
    weight: Array,
    scales: Array | None,
    zeros: Array | None,
    *,
    kind: Kind,
    rounds_rows: bool,
    rounds: bool = False,
) -> Array:
    if rounds:
        return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=x.dtype)
    if scales is None:
        return _sums(x, weight)
    if rounds_rows:
        rows, steps = by_row(x.astype(jnp.float32))
        return _sums(rows, weight).astype(jnp.float32) * (steps * scales)
    return _sums(x, dequantized(weight, scales, zeros, kind, x.dtype))


def is_turned_on_a_cpu(x: Array) -> bool:
    """Return whether a CPU multiplies transposed, to [O, T] in memory."""
    return 2 <= x.shape[0] <= _FEW_ROWS and x.dtype == jnp.float32


def _sums(x: Array, weight: Array) -> Array:
    if x.shape[0] == 1 and x.dtype != jnp.float32:
        # XLA:CPU converts the whole 8 or 16-bit weight for one row: 6 to 12 times slower than two rows.
        return lax.platform_dependent(x, weight, cpu=_first_of_two_rows, default=_product)
    if is_turned_on_a_cpu(x):
        return lax.platform_dependent(x, weight, cpu=_turned, default=_product)
    return _product(x, weight)


def _product(x: Array, weight: Array) -> Array:
    kind = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=kind)


def _turned(x: Array, weight: Array) -> Array:
    """Multiply transposed: XLA:CPU copies the second factor in every call, here the small one.

    The barrier prevents swapping back.
    """
    return lax.optimization_barrier(_product(weight, x)).T


def _first_of_two_rows(x: Array, weight: Array) -> Array:
    return _product(jnp.concatenate([x, x]), weight)[:1]
