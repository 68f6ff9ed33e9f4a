"""Encoders of sound with a projector to the decoder's width, for Qwen2-Audio (Chu et al. 2024) and Voxtral (Liu et al.
2025): Whisper's encoder, with adjacent states averaged or joined.

Replicated over devices. M mel bands, F frames of 10 ms, two of a state, N tokens, E width of the decoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, named_scope
from jaxtyping import Float

from jaxllm.media.processor import Prepared
from jaxllm.model import layers, spectrogram, vision
from jaxllm.model.decoder import Params
from jaxllm.model.parameters import Part, Weight
from jaxllm.model.tower import Arranged
from jaxllm.model.vision import Activation

SMALLEST = 128  # states of the smallest program: 2.56 s


@dataclass(frozen=True)
class SoundSpec:
    """A tower and its projector."""

    num_mels: int
    num_states: int  # of the longest input
    width: int
    num_heads: int
    num_layers: int
    ffn_width: int
    activation: Activation
    out_width: int  # of the decoder
    joined: int  # states of a token
    averages: bool  # else a token's states are concatenated
    reads_silence: bool  # after the sound, up to the longest input
    projector_activation: Activation | None  # None: one matrix, with a bias
    norm_eps: float = 1e-5

    @property
    def row_width(self) -> int:
        return self.out_width

    def states(self, size: int) -> int:
        """Return the states of a program: those of its tokens, and of one more, which may be incomplete."""
        return min(self.joined * (size + 1), self.num_states)

    def sizes(self, most: int) -> tuple[int, ...]:
        """Return sizes of 128, 256, 384, 512, 768, … states, and the largest."""
        if self.reads_silence:
            return (most,)
        doubled = [SMALLEST << power for power in range(self.num_states.bit_length())]
        states = [count + extra for count in doubled for extra in (0, count // 2 if count > SMALLEST else 0)]
        found = {count // self.joined - 1 for count in states if count < self.num_states}
        return tuple(sorted({size for size in found if 0 < size < most} | {most}))

    def inputs(self, size: int) -> tuple[tuple[tuple[int, ...], type], ...]:
        bands = (self.num_mels, 2 * self.states(size) + 1), np.float32
        return (bands,) if self.reads_silence else (bands, ((), np.int32))

    def arrange(self, image: Prepared, size: int) -> Arranged:
        ((shape, _), *_) = self.inputs(size)
        bands, given = np.zeros(shape, np.float32), image.pixels.shape[1]
        bands[:, :given] = image.pixels
        return Arranged((bands,) if self.reads_silence else (bands, np.array(given // 2, np.int32)), None)

    def declare(self) -> Params[Weight]:
        """Return the weights; matrices are [out, in], kernels [out, in, taps]."""
        width, positions = self.width, Part("positions", self.num_states)
        top = spectrogram.declare(width, self.num_mels)
        top["positions"] = Weight((self.num_states, width), (None, None), (positions,))
        top |= vision.norm_weights("post_norm", width)
        inner = width if self.averages else width * self.joined
        if self.projector_activation is None:
            top |= vision.matrix_weights("project", self.out_width, inner)
        else:
            for name, columns in (("project_1", inner), ("project_2", self.out_width)):
                top |= vision.matrix_weights(name, self.out_width, columns, bias=False)
        each = vision.norm_weights("attn_norm", width) | vision.norm_weights("mlp_norm", width)
        for name in ("q", "k", "v", "out"):
            each |= vision.matrix_weights(name, width, width, bias=name != "k")
        each |= vision.matrix_weights("up", self.ffn_width, width) | vision.matrix_weights(
            "down", width, self.ffn_width
        )
        return Params(top, (each,) * self.num_layers)

    def encode(self, params: Params[Array], *arrays: Array) -> Array:
        return encode(self, params, *arrays)


def encode(
    spec: SoundSpec, params: Params[Array], bands: Float[Array, "M F"], count: Array | None = None
) -> Float[Array, "N E"]:
    """Return a sound's embeddings for the decoder.

    `bands` are the frames of all states and the next one; states from `count` on are not attended.
    """
    top = params.top
    with named_scope("sound_tower"):
        x = spectrogram.embed(top, bands)
        for weights in params.layers:
            x = vision.tower_layer(spec, weights, x, count)
        size = len(x) // spec.joined - (len(x) < spec.num_states)
        x = x[: size * spec.joined]
        if spec.averages:
            groups = x.astype(jnp.float32).reshape(-1, spec.joined, spec.width)
            x = _normed(spec, top, jnp.mean(groups, axis=1).astype(x.dtype))
        else:
            x = _normed(spec, top, x).reshape(-1, spec.joined * spec.width)
    with named_scope("projector"):
        if spec.projector_activation is None:
            return vision.linear(top, "project", x)
        inner = vision.activated(vision.linear(top, "project_1", x), spec.projector_activation)
        return vision.linear(top, "project_2", inner)


def _normed(spec: SoundSpec, top: dict[str, Any], x: Array) -> Array:
    return layers.norm(x, top["post_norm"], top["post_norm_bias"], "layer", spec.norm_eps)
