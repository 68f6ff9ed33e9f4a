"""Vision transformers with a projector to the decoder's width: CLIP (Radford et al. 2021), SigLIP (Zhai et al. 2023).

Replicated over devices. N patches of an image (and its class token), D width of the tower.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, named_scope
from jaxtyping import Float

from jaxllm.media.processor import Prepared
from jaxllm.model import layers
from jaxllm.model.decoder import Params
from jaxllm.model.parameters import Part, Weight
from jaxllm.model.tower import Arranged
from pallas_kernels.activations import activate

MOST_SCORES = 1 << 26  # of attention at once, in numbers: 256 MB
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu", "relu"]


class LayerSpec(Protocol):
    """The settings of a tower's layers."""

    @property
    def num_heads(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def activation(self) -> Activation: ...


@dataclass(frozen=True)
class VisionSpec:
    """A tower and its projector."""

    side: int  # pixels of the square input
    patch: int  # pixels of a square patch
    width: int
    num_heads: int
    ffn_width: int
    features: tuple[int, ...]  # numbers of layers after which states are taken, concatenated
    norm_eps: float
    activation: Activation
    has_class: bool
    drops_class: bool
    pre_norm: bool
    patch_bias: bool
    out_width: int  # of the decoder
    projector_activation: Activation = "gelu"
    projector_bias: bool = True

    @property
    def num_layers(self) -> int:
        """Layers that are computed: later ones are not loaded."""
        return max(self.features)

    @property
    def num_patches(self) -> int:
        return (self.side // self.patch) ** 2

    @property
    def num_tokens(self) -> int:
        return self.num_patches + (self.has_class and not self.drops_class)

    @property
    def row_width(self) -> int:
        return self.out_width

    def declare(self) -> Params[Weight]:
        return declare(self)

    def sizes(self, most: int) -> tuple[int, ...]:
        del most  # images have one size
        return (self.num_tokens,)

    def inputs(self, size: int) -> tuple[tuple[tuple[int, ...], type], ...]:
        return (((3, self.side, self.side), np.float32),)

    def arrange(self, image: Prepared, size: int) -> Arranged:
        return Arranged((image.pixels,), None)

    def encode(self, params: Params[Array], *arrays: Array) -> Array:
        return encode(self, params, *arrays)


def declare(spec: VisionSpec) -> Params[Weight]:
    """Return the weights; matrices are [out, in]."""
    declared, top = declare_tower(spec), dict[str, Weight]()
    for name, columns in (("project_1", len(spec.features) * spec.width), ("project_2", spec.out_width)):
        top |= matrix_weights(name, spec.out_width, columns, spec.projector_bias)
    return Params(declared.top | top, declared.layers)


def declare_tower(spec: VisionSpec) -> Params[Weight]:
    """Return the weights without the projector's."""
    width, tokens = spec.width, spec.num_patches + spec.has_class
    top = {
        "patches": Weight((width, 3, spec.patch, spec.patch), (None,) * 4, (Part("patches", width),)),
        "positions": Weight((tokens, width), (None, None), (Part("positions", tokens),)),
    }
    if spec.patch_bias:
        top["patches_bias"] = vector_weight("patches_bias", width, "zeros")
    if spec.has_class:
        top["class"] = vector_weight("class", width, "normal")
    if spec.pre_norm:
        top |= norm_weights("pre_norm", width)
    each: dict[str, Weight] = norm_weights("attn_norm", width) | norm_weights("mlp_norm", width)
    for name in ("q", "k", "v", "out"):
        each |= matrix_weights(name, width, width)
    each |= matrix_weights("up", spec.ffn_width, width) | matrix_weights("down", width, spec.ffn_width)
    return Params(top, (each,) * spec.num_layers)


def vector_weight(name: str, size: int, initial: Literal["normal", "zeros", "ones"]) -> Weight:
    return Weight((size,), (None,), (Part(name, size),), initial)


def norm_weights(name: str, width: int, bias: bool = True) -> dict[str, Weight]:
    weight = {name: vector_weight(name, width, "ones")}
    return weight | ({f"{name}_bias": vector_weight(f"{name}_bias", width, "zeros")} if bias else {})


def matrix_weights(name: str, rows: int, columns: int, bias: bool = True) -> dict[str, Weight]:
    weight = {name: Weight((rows, columns), (None, None), (Part(name, rows),))}
    return weight | ({f"{name}_bias": vector_weight(f"{name}_bias", rows, "zeros")} if bias else {})


def encode(spec: VisionSpec, params: Params[Array], pixels: Float[Array, "3 S S"]) -> Float[Array, "N E"]:
    with named_scope("vision_tower"):
        states = tower(spec, params, pixels)
        if spec.drops_class:
            states = states[1:]
    with named_scope("projector"):
        top = params.top
        inner = linear(top, "project_1", states)
        return linear(top, "project_2", activated(inner, spec.projector_activation))


def tower(spec: VisionSpec, params: Params[Array], pixels: Float[Array, "3 S S"]) -> Float[Array, "N F"]:
    """Return the states after the layers of `features`, concatenated."""
    top, count, size = params.top, spec.side // spec.patch, spec.patch
    dtype = top["positions"].dtype
    patches = pixels[:, : count * size, : count * size].reshape(3, count, size, count, size)
    patches = patches.transpose(1, 3, 0, 2, 4).reshape(count * count, -1).astype(dtype)
    x = layers.linear(patches, top["patches"].reshape(spec.width, -1), top.get("patches_bias")).astype(dtype)
    if spec.has_class:
        x = jnp.concatenate([top["class"][None], x])
    x = x + top["positions"]
    if spec.pre_norm:
        x = _normed(spec, top, "pre_norm", x)
    states = [x]
    for weights in params.layers:
        states.append(tower_layer(spec, weights, states[-1]))
    return jnp.concatenate([states[number] for number in spec.features], axis=-1)


@partial(jax.jit, static_argnames=("spec",))
def tower_layer(spec: LayerSpec, weights: dict[str, Array], x: Array, count: Array | None = None) -> Array:
    """Compute a layer; keys from `count` on are not attended.

    Queries attend in parts if all scores would exceed MOST_SCORES.
    """
    normed = _normed(spec, weights, "attn_norm", x)
    q, k, v = (linear(weights, name, normed).reshape(len(x), spec.num_heads, -1) for name in ("q", "k", "v"))

    def attend(q: Array) -> Array:
        scores = jnp.einsum("qhc,khc->hqk", q, k, preferred_element_type=jnp.float32)
        if count is not None:
            scores = jnp.where(jnp.arange(len(x)) < count, scores, -jnp.inf)
        shares = jax.nn.softmax(scores * q.shape[-1] ** -0.5, axis=-1).astype(x.dtype)
        return jnp.einsum("hqk,khc->qhc", shares, v, preferred_element_type=jnp.float32).astype(x.dtype)

    most = max(1, MOST_SCORES // (spec.num_heads * len(x)))
    step = next(each for each in range(min(most, len(x)), 0, -1) if len(x) % each == 0)
    mixed = attend(q) if step == len(x) else lax.map(attend, q.reshape(-1, step, *q.shape[1:]))
    x = x + linear(weights, "out", mixed.reshape(x.shape))
    inner = linear(weights, "up", _normed(spec, weights, "mlp_norm", x))
    return x + linear(weights, "down", activated(inner, spec.activation))


def linear(weights: dict[str, Any], name: str, x: Array) -> Array:
    return layers.linear(x, weights[name], weights.get(f"{name}_bias")).astype(x.dtype)


def _normed(spec: LayerSpec, weights: dict[str, Any], name: str, x: Array) -> Array:
    return layers.norm(x, weights[name], weights[f"{name}_bias"], "layer", spec.norm_eps)


def activated(x: Array, kind: Activation) -> Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.nn.sigmoid(1.702 * wide) if kind == "quick_gelu" else activate(wide, kind)).astype(x.dtype)
