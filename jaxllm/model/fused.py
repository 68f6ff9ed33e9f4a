"""Fuse norm, residual and activation into a layer's products: three or four kernels less per layer of a decode step."""

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

_LEAST_ROUNDED = 512  # tokens; smaller products are still in a GPU's cache


def chosen(kernels: Mapping[str, Choice]) -> Choice | None:
    own = kernels["fused_linear"]
    return None if {own.name, *(name for _, name in own.sizes)} == {"xla"} else own


def rounds_inner(kernels: Mapping[str, Choice], tokens: int) -> bool:
    """Return whether gate and up outputs are written in the activations' type: on a GPU, for prompts.

    The activation of 8,192 tokens of Llama 3 8B took 409 us in float32 on an H100, 241 in bfloat16.
    """
    return kernels["linear"].capability is not None and tokens >= _LEAST_ROUNDED


def halves(spec: Spec, weights: dict[str, Any], layer: int, choice: Choice, tokens: int) -> tuple[bool, bool]:
    """Return whether a layer's attention and its feed-forward use fused products."""
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
    """Multiply normalized `x` [T, in] with weight `name`, add its bias, in the type of `x`.

    With an activation the weight is gate and up; `residual` [T, out] is added last.
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
    norm = None if gain is None else Norm(gain, eps, is_plus_one)
    own = {"norm": norm, "residual": residual, "activation": activation}
    return pallas_kernels.fused_linear(x, weight, bias, **own, implementation=choice)
