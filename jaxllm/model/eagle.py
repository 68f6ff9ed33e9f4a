"""An EAGLE-3 head: one decoder layer that guesses a target's next tokens from what the target computed before.

A pass reads a token's embedding and a hidden state: of the target, whose residual stream in some layers is fused into
one vector (Li et al. 2025, "EAGLE-3"), or of the head's own pass before. Weights and what they compute, written for one
shard as in decoder.py. The head may name only a part of the target's vocabulary; its logits are those
of the target's tokens all the same. Knows no file, no cache and no drafting loop.

Letters: T flat tokens, R rows, D the head's width, V the target's vocabulary (Vx on one shard, with its padding).
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

UNNAMED = -1e30  # logit of a token that the head has no name for: finite, so that sums with it are


@dataclass(frozen=True)
class Head:
    """A head and what it must know of its target. `spec` is its one layer, of its own sizes."""

    spec: Spec
    width: int  # of the target
    vocab_size: int  # of the target, V
    draft_vocab_size: int  # tokens that the head can name
    aux_layers: tuple[int, ...]  # of the target, whose inputs are fused; ascending; see `decoder.forward_with_aux`
    norm_before_residual: bool = False  # the normed hidden state is the residual, not the one that came in
    has_embedding: bool = False  # of its own, else it reads the target's
    has_names: bool = False  # which tokens it can name is stored; else they are the vocabulary's first
    fusion_norm: Literal["whole", "each"] | None = None  # before the fusion: of all states in a row, or of each
    norm_output: bool = False  # the next pass reads the normed hidden state, not the one before the norm

    @property
    def is_mapped(self) -> bool:
        """Whether the head's tokens are numbered otherwise than the target's."""
        return self.has_names or self.draft_vocab_size != self.vocab_size


def declare(head: Head, layout: Layout = UNDIVIDED) -> Params[Weight]:
    """List the head's weights, all but the map of `map_shape`."""
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
    """Describe the map, int32[V with its padding]: of each of the target's tokens the number that the head gives it."""
    size = layout.padded("vocab", head.vocab_size)
    return jax.ShapeDtypeStruct((size,), jnp.int32, sharding=layout.sharding("vocab"))


def abstract(head: Head, layout: Layout, dtype: DTypeLike) -> Params[jax.ShapeDtypeStruct]:
    """Describe the head's parameters, shapes, type and shardings, with nothing allocated."""
    decoder.check_shards(head.spec, layout)
    described = jax.tree.map(lambda weight: quantized.describe(weight, layout, dtype), declare(head, layout))
    return with_map(head, described, map_shape(head, layout))


def with_map(head: Head, params: Params[decoder.Leaf], numbers: decoder.Leaf) -> Params[decoder.Leaf]:
    """Add the map to the parameters of a head that needs one."""
    return replace(params, top=params.top | {"draft_ids": numbers}) if head.is_mapped else params


def embed(
    head: Head, params: Params[Array], target: Params[Array], tokens: Int[Array, " T"], context: Context
) -> Float[Array, "T D"]:
    """Look up the embeddings of `tokens` [T], in the head's table or in the one of the target's parameters.

    The plain rows, to which the target itself may do more: the head norms them.
    """
    with named_scope("draft/embedding"):
        table = (params if head.has_embedding else target).top["embed"]
        return decoder.look_up(table, tokens, head.vocab_size, params.top["fc"].dtype, context.layout)


def fuse(head: Head, params: Params[Array], aux: tuple[Array, ...]) -> Float[Array, "T D"]:
    """Make one hidden state of the target's, each [T, D of the target], in the order of `aux_layers`."""
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
    """Run the layer: the hidden states that the next pass reads, and those that `logits` reads.

    `embedded` are the tokens that stand one place behind those of `hidden`; `context.attend` is asked for layer 0.
    """
    spec, own = head.spec, params.layers[0]
    with named_scope("draft"):
        turns = decoder.rotations(spec, context)
        with named_scope("attention"):
            normed = decoder.norm(spec, own, "hidden_norm", hidden)
            both = jnp.concatenate([decoder.norm(spec, own, "attn_norm", embedded), normed], axis=1)
            x = normed if head.norm_before_residual else hidden
            x = x + decoder.attention(spec, own, 0, both, turns, context)
        with named_scope("mlp"):
            x = x + decoder.feed_forward(spec, own, 0, decoder.norm(spec, own, "mlp_norm", x), context)
        normed = decoder.final_norm(spec, params, x)
    return normed if head.norm_output else x, normed


def logits(head: Head, params: Params[Array], hidden: Float[Array, "R D"], layout: Layout) -> Float[Array, "R Vx"]:
    """Score this shard's piece of the target's vocabulary, as `decoder.head` does; `UNNAMED` without a name."""
    with named_scope("draft/logits"):
        scores = decoder.scaled(layers.linear(hidden, params.top["head"]), head.spec.logit_scale)
        if not head.is_mapped:
            return scores
        # The rows of a shard are of tokens on any of them.
        scores = layout.gathered(scores, "vocab", 1)
        return scores.at[:, params.top["draft_ids"]].get(mode="fill", fill_value=UNNAMED)
