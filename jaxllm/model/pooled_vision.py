"""A vision transformer that averages patches to fewer tokens: Gemma 3's tower and projector (Gemma Team 2025).

SigLIP's last states are normed, averaged over squares of patches, normed again and multiplied with one matrix. Letters:
N tokens of an image, S pixels of its side, D width of the tower, E width of the decoder.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array, named_scope
from jaxtyping import Float

from jaxllm.media.processor import Prepared
from jaxllm.model import layers, vision
from jaxllm.model.decoder import Params
from jaxllm.model.parameters import Weight
from jaxllm.model.tower import Arranged
from jaxllm.model.vision import VisionSpec


@dataclass(frozen=True)
class PooledVisionSpec:
    """A tower and its projector."""

    tower: VisionSpec  # without a projector
    tokens: int  # of a side; each is the average of a square of patches

    @property
    def num_tokens(self) -> int:
        """Embeddings of an image."""
        return self.tokens**2

    @property
    def row_width(self) -> int:
        return self.tower.out_width

    def declare(self) -> Params[Weight]:
        """Return the weights; matrices are [out, in]."""
        width, declared = self.tower.width, vision.declare_tower(self.tower)
        top = vision.norm_weights("post_norm", width) | vision.norm_weights("soft_norm", width, bias=False)
        top |= vision.matrix_weights("project", self.tower.out_width, width, bias=False)
        return Params(declared.top | top, declared.layers)

    def sizes(self, most: int) -> tuple[int, ...]:
        del most  # images have one size
        return (self.num_tokens,)

    def inputs(self, size: int) -> tuple[tuple[tuple[int, ...], type], ...]:
        return self.tower.inputs(size)

    def arrange(self, image: Prepared, size: int) -> Arranged:
        return self.tower.arrange(image, size)

    def encode(self, params: Params[Array], *arrays: Array) -> Array:
        return encode(self, params, *arrays)


def encode(spec: PooledVisionSpec, params: Params[Array], pixels: Float[Array, "3 S S"]) -> Float[Array, "N E"]:
    """Return an image's embeddings for the decoder."""
    top, eps, side = params.top, spec.tower.norm_eps, spec.tokens
    with named_scope("vision_tower"):
        states = vision.tower(spec.tower, params, pixels)
        states = layers.norm(states, top["post_norm"], top["post_norm_bias"], "layer", eps)
    with named_scope("projector"):
        patches = spec.tower.side // spec.tower.patch // side  # of a token's side
        squares = states.astype(jnp.float32).reshape(side, patches, side, patches, -1)
        pooled = jnp.mean(squares, axis=(1, 3)).reshape(side * side, -1).astype(states.dtype)
        return vision.linear(top, "project", layers.norm(pooled, top["soft_norm"], None, "rms+1", eps))
