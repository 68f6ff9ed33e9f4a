"""Activations of feed-forwards, plain and gated, in JAX."""

from __future__ import annotations

from functools import partial
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


def activate(x: Array, kind: Activation) -> Array:
    functions = {
        "silu": jax.nn.silu,
        "gelu": partial(jax.nn.gelu, approximate=False),
        "gelu_tanh": partial(jax.nn.gelu, approximate=True),
        "relu": jax.nn.relu,
    }
    return functions[kind](x)


def gated(inner: Array, kind: Activation, clamp: float | None = None, slope: float = 1.702) -> Array:
    """Return activation(first half) times second half of the last axis.

    With a `clamp` c: g · σ(`slope` · g) · (u + 1), g at most c, u in [-c, c] (gpt-oss).
    """
    gate, up = jnp.split(inner, 2, axis=-1)
    if clamp is None:
        return activate(gate, kind) * up
    gate, up = jnp.minimum(gate, clamp), jnp.clip(up, -clamp, clamp)
    return gate * jax.nn.sigmoid(slope * gate) * (up + 1.0)
