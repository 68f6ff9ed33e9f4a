"""Reference of `fused_linear`: operations in sequence, with a decoder's intermediate roundings."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.activations import Activation, gated
from pallas_kernels.linear.xla import linear


def fused_linear(
    x: Array,
    weight: Array,
    bias: Array | None,
    gain: Array | None,
    residual: Array | None,
    *,
    eps: float,
    is_plus_one: bool,
    activation: Activation | None,
) -> Array:
    given = x if gain is None else normed(x, gain, eps, is_plus_one)
    product = linear(given, weight, None, None, kind="float", rounds_rows=False)
    if bias is not None:
        product = product + bias.astype(jnp.float32)
    if activation is not None:
        product = gated(product, activation)
    product = product.astype(x.dtype)
    return product if residual is None else residual + product


def normed(x: Array, gain: Array, eps: float, is_plus_one: bool) -> Array:
    wide, factor = x.astype(jnp.float32), gain.astype(jnp.float32)
    power = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * lax.rsqrt(power + eps) * (1.0 + factor if is_plus_one else factor)).astype(x.dtype)
