"""Halves of a layer whose norm, residual and activation are part of their products, where these have few tokens.

A decode step on a GPU is many short kernels: so a layer is three or four fewer. Knows what such a product can take in,
and of which layers; which implementation does it, and for how many tokens, was chosen (`Context.fused`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
from jax import Array

import pallas_kernels
from jaxllm.model.quantized import Quantized
from jaxllm.model.spec import Activation, Spec
from pallas_kernels import Choice, Norm

_LEAST_ROUNDED = 512  # tokens; the products of fewer are still in a GPU's cache when the activation reads them


def chosen(kernels: Mapping[str, Choice]) -> Choice | None:
    """Return the choice for fused products; None if XLA's were chosen for every number of tokens."""
    own = kernels["fused_linear"]
    return None if {own.name, *(name for _, name in own.sizes)} == {"xla"} else own


def rounds_inner(kernels: Mapping[str, Choice], tokens: int) -> bool:
    """Return whether the product of a feed-forward's gate and up is written in the type of the activations.

    On a GPU, for prompts: 8,192 tokens of Llama 3 8B have 939 MB of it in float32, whose activation took 409 us of an
    H100; that of bfloat16 took 241.
    """
    return kernels["linear"].capability is not None and tokens >= _LEAST_ROUNDED


def halves(spec: Spec, weights: dict[str, Any], layer: int, choice: Choice, tokens: int) -> tuple[bool, bool]:
    """Return whether a layer's attention uses fused products, and whether its feed-forward does.

    Neither does if XLA's products were chosen for this number of tokens.
    """
    is_plain = (
        not (choice.sizes and choice.of(tokens).name == "xla")
        and (spec.norm_place, spec.residual, spec.residual_scale) == ("pre", "serial", 1.0)
        and spec.norm != "layer"
        and not spec.norm_bias
        and not any(isinstance(weight, Quantized) for weight in weights.values())
    )
    has_experts = spec.experts is not None and spec.experts.layers[layer]
    return is_plain and spec.latent is None and "attn_norm" in weights, is_plain and spec.mlp_gated and not has_experts


def product(
    spec: Spec,
    weights: dict[str, Any],
    choice: Choice,
    name: str,
    x: Array,
    norm: str | None = None,
    residual: Array | None = None,
    activation: Activation | None = None,
) -> Array:
    """Multiply `x` [T, in], normed by the norm of that name, with a layer's weight `name`, and its bias if it has one.

    With an activation the weight is that of a gate and another; a residual [T, out] is added last. In the type of `x`.
    """
    arrays = (x, weights[name], weights.get(f"{name}_bias"), norm and weights[norm], residual)
    own = {"eps": spec.norm_eps, "is_plus_one": spec.norm == "rms+1", "activation": activation}
    return _product(*arrays, **own, choice=choice.of(len(x)))


@partial(jax.jit, static_argnames=("eps", "is_plus_one", "activation", "choice"))
def _product(
    x: Array,
    weight: Array,
    bias: Array | None,
    gain: Array | None,
    residual: Array | None,
    *,
    eps: float,
    is_plus_one: bool,
    activation: Activation | None,
    choice: Choice,
) -> Array:
    """Traced once for all layers."""
    norm = None if gain is None else Norm(gain, eps, is_plus_one)
    own = {"norm": norm, "residual": residual, "activation": activation}
    return pallas_kernels.fused_linear(x, weight, bias, **own, implementation=choice)
