"""Mixture of experts in XLA: reference and fallback.

Multiplies every token with every expert: E / n times the work, memory for one expert.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.activations import Activation, gated

Scores = Literal["softmax", "sigmoid"]


def fused_topk(
    scores: Array, bias: Array | None, *, per_token: int, kind: Scores, is_normalised: bool, scale: float
) -> tuple[Array, Array]:
    scores = jax.nn.sigmoid(scores) if kind == "sigmoid" else jax.nn.softmax(scores, axis=-1)
    chosen = lax.top_k(scores if bias is None else scores + bias, per_token)[1]
    gates = jnp.take_along_axis(scores, chosen, axis=1)
    if is_normalised:
        gates = gates / (jnp.sum(gates, axis=-1, keepdims=True) + 1e-20)
    return chosen, gates * scale


def fused_experts(
    x: Array,
    up: Array,
    down: Array,
    chosen: Array,
    gates: Array,
    up_bias: Array | None,
    down_bias: Array | None,
    *,
    activation: Activation,
    clamp: float | None,
    clamp_slope: float,
    num_experts: int | None,
) -> Array:
    del num_experts  # no expert has index E
    product = partial(jnp.einsum, "td,od->to", preferred_element_type=jnp.float32)

    def add(total: Array, own: tuple[Array, Array, Array, Array | None, Array | None]) -> tuple[Array, None]:
        expert, up, down, up_bias, down_bias = own
        inner = product(x, up) + (0.0 if up_bias is None else up_bias.astype(jnp.float32))
        inner = gated(inner, activation, clamp, clamp_slope).astype(x.dtype)
        result = product(inner, down) + (0.0 if down_bias is None else down_bias.astype(jnp.float32))
        weighted = [
            jnp.where(chosen[:, place, None] == expert, result * gates[:, place, None], 0.0)
            for place in range(chosen.shape[1])
        ]
        return total + sum(weighted), None

    experts = jnp.arange(len(up), dtype=chosen.dtype)
    total, _ = lax.scan(add, jnp.zeros(x.shape, jnp.float32), (experts, up, down, up_bias, down_bias))
    return total
