"""EAGLE-3 heads: a decoder layer that drafts a target's next tokens (Li et al. 2025, "EAGLE-3").

A pass takes a token's embedding and a hidden state: the target's residual streams of some layers, fused, or the head's
previous state. D is the head's width, V the target's vocabulary (Vx on one shard, padded).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, named_scope
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jaxllm.model import decoder, layers, quantized
from jaxllm.model.decoder import Context, Params
from jaxllm.model.parameters import Part, Weight
from jaxllm.model.sharding import UNDIVIDED, Layout
from jaxllm.model.spec import Spec

UNNAMED = -1e30  # logit of tokens outside the draft vocabulary; finite, so that sums are


@dataclass(frozen=True)
class Head:
    """A head, and properties of its target. `spec` is the head's one layer."""

    spec: Spec
    width: int  # target's
    vocab_size: int  # target's, V
    draft_vocab_size: int
    aux_layers: tuple[int, ...]  # target layers whose inputs are fused, ascending
    norm_before_residual: bool = False
    has_embedding: bool = False  # otherwise the target's is used
    has_names: bool = False  # draft ids are stored; otherwise the vocabulary's first ids
    fusion_norm: Literal["whole", "each"] | None = None  # before the fusion: of all states concatenated, or of each
    norm_output: bool = False  # the next pass takes the normed hidden state

    @property
    def is_mapped(self) -> bool:
        return self.has_names or self.draft_vocab_size != self.vocab_size


def declare(head: Head, layout: Layout = UNDIVIDED) -> Params[Weight]:
    """Return the head's weights, without the id map."""
    spec, wide = head.spec, len(head.aux_layers) * head.width
    rows = layout.padded("vocab", head.draft_vocab_size)
    plain = decoder.declare(spec, layout)
    top = {
        "fc": Weight((spec.width, wide), ("width", "width"), (Part("fc", spec.width),)),
        "final_norm": plain.top["final_norm"],
        "head": Weight((rows, spec.width), ("vocab", "width"), (Part("head", head.draft_vocab_size),)),
    }
    if head.has_embedding:
        top["embed"] = plain.top["embed"]
    if head.fusion_norm is not None:
        parts = (Part("fusion_norm", wide),)
        if head.fusion_norm == "each":
            parts = tuple(Part(f"fusion_norm_{number}", head.width) for number in range(len(head.aux_layers)))
        top["fusion_norm"] = Weight((wide,), ("width",), parts, "ones")
    layer = dict(plain.layers[0])
    layer["qkv"] = replace(layer["qkv"], shape=(layer["qkv"].shape[0], 2 * spec.width))
    layer["hidden_norm"] = replace(layer["attn_norm"], parts=(Part("hidden_norm", spec.width),))
    return Params(top, (layer,))


def map_shape(head: Head, layout: Layout) -> jax.ShapeDtypeStruct:
    """Describe the map from target ids to draft ids, int32[V, padded]."""
    size = layout.padded("vocab", head.vocab_size)
    return jax.ShapeDtypeStruct((size,), jnp.int32, sharding=layout.sharding("vocab"))


def abstract(head: Head, layout: Layout, dtype: DTypeLike) -> Params[jax.ShapeDtypeStruct]:
    decoder.check_shards(head.spec, layout)
    described = jax.tree.map(lambda weight: quantized.describe(weight, layout, dtype), declare(head, layout))
    return with_map(head, described, map_shape(head, layout))


def with_map(head: Head, params: Params[decoder.Leaf], numbers: decoder.Leaf) -> Params[decoder.Leaf]:
    return replace(params, top=params.top | {"draft_ids": numbers}) if head.is_mapped else params


def embed(
    head: Head, params: Params[Array], target: Params[Array], tokens: Int[Array, " T"], context: Context
) -> Float[Array, "T D"]:
    """Return token embeddings without the target's scaling."""
    with named_scope("draft/embedding"):
        table = (params if head.has_embedding else target).top["embed"]
        return decoder.look_up(table, tokens, head.vocab_size, params.top["fc"].dtype, context.layout)


def fuse(head: Head, params: Params[Array], aux: tuple[Array, ...]) -> Float[Array, "T D"]:
    """Fuse the target's hidden states, each [T, target width]."""
    with named_scope("draft/fusion"):
        dtype, eps = params.top["fc"].dtype, head.spec.norm_eps
        if head.fusion_norm == "each":
            scales = jnp.split(params.top["fusion_norm"], len(aux))
            aux = tuple(layers.norm(x, scale, None, "rms", eps) for x, scale in zip(aux, scales, strict=True))
        x = jnp.concatenate(aux, axis=1).astype(dtype)
        if head.fusion_norm == "whole":
            x = layers.norm(x, params.top["fusion_norm"], None, "rms", eps)
        return layers.linear(x, params.top["fc"]).astype(dtype)


def forward(
    head: Head, params: Params[Array], embedded: Float[Array, "T D"], hidden: Float[Array, "T D"], context: Context
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Return the hidden states for the next pass, and for `logits`.

    `embedded` are the tokens one position after `hidden`; `context.attend` is called for layer 0.
    """
    spec, weights = head.spec, params.layers[0]
    with named_scope("draft"):
        turns = decoder.rotations(spec, context)
        with named_scope("attention"):
            normed = decoder.norm(spec, weights, "hidden_norm", hidden)
            both = jnp.concatenate([decoder.norm(spec, weights, "attn_norm", embedded), normed], axis=1)
            x = normed if head.norm_before_residual else hidden
            x = x + decoder.attention(spec, weights, 0, both, turns, context)
        with named_scope("mlp"):
            x = x + decoder.feed_forward(spec, weights, 0, decoder.norm(spec, weights, "mlp_norm", x), context)
        normed = decoder.final_norm(spec, params, x)
    return normed if head.norm_output else x, normed


def logits(head: Head, params: Params[Array], hidden: Float[Array, "R D"], layout: Layout) -> Float[Array, "R Vx"]:
    """Return logits of this shard's piece of the target's vocabulary, `UNNAMED` where not drafted."""
    with named_scope("draft/logits"):
        scores = decoder.scaled(layers.linear(hidden, params.top["head"]), head.spec.logit_scale)
        if not head.is_mapped:
            return scores
        # Draft ids of a shard's tokens may be on any shard.
        scores = layout.gathered(scores, "vocab", 1)
        return scores.at[:, params.top["draft_ids"]].get(mode="fill", fill_value=UNNAMED)
