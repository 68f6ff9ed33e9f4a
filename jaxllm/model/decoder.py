"""The decoder: the weights of a Spec (`declare`) and their computation, for one shard of a `Layout`.

Call inside the layout's `shard_map`. Hx, Kx and Vx (with padding) are sizes on one shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array, lax, named_scope
from jaxtyping import Float, Int

import pallas_kernels
from jaxllm.errors import UserError
from jaxllm.model import fused, layers, mla, moe
from jaxllm.model.head import Head
from jaxllm.model.parameters import Part, Scheme, Weight
from jaxllm.model.quantized import Quantized, fitted
from jaxllm.model.sharding import UNDIVIDED, Layout
from jaxllm.model.spec import Latent, Rope, Spec, heads_per_shard
from pallas_kernels import Choice
from pallas_kernels.activations import activate, gated

Leaf = TypeVar("Leaf")
Arrays = dict[str, Any]  # Array or Quantized, by name
_SUMMED = {"out": "heads", "cross_out": "heads", "down": "feed_forward"}  # products, and the sharded axis of each sum


class Heads(NamedTuple):
    """A layer's heads before rotation, which a kernel may include."""

    qkv: Array  # [T, Hx + 2 Kx, C]; no values with latent attention
    turn: tuple[Array, Array] | None  # cosine and sine, [T, size / 2]; None: no rotation
    is_interleaved: bool  # pairs are adjacent coordinates


@runtime_checkable
class Attend(Protocol):
    """Called in each layer: rotate, store keys and values, attend over the cache."""

    def __call__(self, layer: int, heads: Heads, window: int | None, sinks: Array | None) -> Array:
        """Take a layer's heads and sinks [Hx]; return [T, Hx, C].

        With latent attention the values, and each head's result, are the first `rank` coordinates of the keys.
        """
        ...


@runtime_checkable
class Cross(Protocol):
    """Called in each layer: attend to the encoder's output."""

    def __call__(self, layer: int, q: Array) -> Array:
        """Take a layer's queries [T, Hx, C]; return [T, Hx, C]."""
        ...


@runtime_checkable
class Linear(Protocol):
    """A product with a layer's weight, which adapters and other quantizations replace."""

    def __call__(self, layer: int, name: str, *product: Any) -> Array:
        """Multiply x [T, in] with the weight `name` [out, in], optionally add a bias [out]: float32 [T, out]."""
        ...


@runtime_checkable
class RowWeights(Protocol):
    """Sets of weights, selected per token and passed as arguments, for example adapters."""

    @property
    def described(self) -> Any:
        """The shapes and types of one set."""
        ...

    def linear(self, sets: Sequence[Any], token_set: Array) -> Linear:
        """Return the products of tokens; `token_set`, int32[T], indexes `sets`."""
        ...


def plain_linear(layer: int, name: str, *product: Any) -> Array:
    return layers.linear(*product)


@dataclass(frozen=True)
class Context:
    """Inputs that a step's layers share."""

    positions: Array  # int32[T]
    attend: Attend
    linear: Linear = plain_linear
    layout: Layout = UNDIVIDED
    token_types: Array | None = None  # int32[T]; None: all 0
    fused: Choice | None = None  # fuses norms, residuals and activations; only with `plain_linear`
    rounds_inner: bool = False  # only with `plain_linear`
    cross: Cross | None = None
    # Embeddings [·, D (1 + n)], and each token's row or one beyond, int32[T]. A row has an embedding, and n vectors
    # that are added after the first n layers (Meng et al. 2024, "DeepStack").
    media: tuple[Array, Array] | None = None
    turned: Array | None = None  # rotary positions, int32[dimensions or 1, T]; None: `positions`


@flax.struct.dataclass
class Params(Generic[Leaf]):
    """Leaves by weight name: outside the layers, and per layer."""

    top: dict[str, Leaf]
    layers: tuple[dict[str, Leaf], ...]
    draft: Any = None  # of the draft model


def declare(
    spec: Spec, layout: Layout = UNDIVIDED, scheme: Scheme | None = None, head: Head | None = None
) -> Params[Weight]:
    """Return the decoder's weights; matrices are [out, in].

    A `head` replaces the logits. A `scheme` applies to products, and to an embedding that computes logits.
    """
    vocabulary = layout.padded("vocab", spec.vocab_size)  # padding rows are zero and never sampled
    of_logits = None if head else "embed" if spec.tie_embeddings else "head"
    top = {
        name: Weight(
            (vocabulary, spec.width), ("vocab", "width"), (Part(name, spec.vocab_size),), is_product=name == of_logits
        )
        for name in dict.fromkeys(("embed", of_logits))
        if name is not None
    }
    rows = spec.max_position + spec.position_offset
    for name, size in (("positions", spec.learned_positions * rows), ("token_types", spec.token_types)):
        if size:
            top[name] = Weight((size, spec.width), ("position", "width"), (Part(name, size),))
    if spec.relative_buckets:
        part = Part("relative_bias", spec.relative_buckets)
        top["relative_bias"] = Weight((spec.relative_buckets, spec.num_heads), (None, "heads"), (part,))
    for name, is_there in (("embed_norm", spec.embed_norm), ("final_norm", spec.final_norm)):
        top |= _norm_weights(spec, name) if is_there else {}
    top |= head.declare(spec.width) if head else {}
    attention = _attention_weights(spec, layout) if spec.latent is None else _latent_weights(spec, spec.latent)
    if spec.cross:
        attention |= _cross_weights(spec)
    plain, routed = attention | _mlp_weights(spec), attention | _expert_weights(spec)
    has_experts = spec.experts.layers if spec.experts else (False,) * spec.num_layers
    each = [routed if is_routed else plain for is_routed in has_experts]
    if spec.embed_norm and not spec.keeps_first_norm:
        each[0] = {name: weight for name, weight in each[0].items() if not name.startswith("attn_norm")}
    declared = Params(top, tuple(each))
    if scheme is None:
        return declared
    return with_schemes(declared, lambda layer, weight: scheme if weight.is_product else None, layout)


def with_schemes(
    declared: Params[Weight], choose: Callable[[int | None, Weight], Scheme | None], layout: Layout
) -> Params[Weight]:
    def of(layer: int | None, weights: dict[str, Weight]) -> dict[str, Weight]:
        chosen = {name: choose(layer, weight) for name, weight in weights.items()}
        return {
            name: weight if (own := chosen[name]) is None else replace(weight, scheme=fitted(own, weight, layout))
            for name, weight in weights.items()
        }

    layers_of = tuple(of(layer, weights) for layer, weights in enumerate(declared.layers))
    return Params(of(None, declared.top), layers_of)


def _attention_weights(spec: Spec, layout: Layout) -> dict[str, Weight]:
    copies = max(1, layout.shards("kv_heads") // spec.num_kv_heads)
    queries, keys = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    rows = queries + 2 * keys * copies
    parts = (("q", queries, 1), ("k", keys, copies), ("v", keys, copies))
    block = spec.head_size
    weights = {} if spec.norm_place in ("post", "after") else _norm_weights(spec, "attn_norm")
    pieces = tuple(Part(name, size, number, block) for name, size, number in parts)
    weights["qkv"] = Weight((rows, spec.width), ("heads", "width"), pieces, is_product=True)
    if spec.qkv_bias:
        biased = parts if spec.key_bias else (parts[0], parts[2])
        biases = tuple(Part(f"{name}_bias", size, number, block) for name, size, number in biased)
        weights["qkv_bias"] = Weight((sum(part.rows * part.copies for part in biases),), ("heads",), biases, "zeros")
    if spec.qk_norm is not None:
        weights |= {f"{name}_norm": _qk_norm_weight(spec, f"{name}_norm", size, n) for name, size, n in parts[:2]}
    if spec.sinks:
        weights["sinks"] = Weight((spec.num_heads,), ("heads",), (Part("sinks", spec.num_heads),), "zeros")
    weights["out"] = Weight((spec.width, queries), ("width", "heads"), (Part("out", spec.width),), is_product=True)
    if spec.out_bias:
        weights["out_bias"] = Weight((spec.width,), ("width",), (Part("out_bias", spec.width),), "zeros")
    if spec.norm_place != "pre":
        weights |= _norm_weights(spec, "attn_post_norm")
    return weights


def _cross_weights(spec: Spec) -> dict[str, Weight]:
    size, block = spec.num_heads * spec.head_size, spec.head_size
    weights = _norm_weights(spec, "cross_norm" if spec.norm_place == "pre" else "cross_post_norm")
    for name, parts in (("cross_q", ("cross_q",)), ("cross_kv", ("cross_k", "cross_v"))):
        pieces, rows = tuple(Part(part, size, 1, block) for part in parts), len(parts) * size
        weights[name] = Weight((rows, spec.width), ("heads", "width"), pieces, is_product=True)
        if spec.qkv_bias:
            biased = [part for part in parts if spec.key_bias or part != "cross_k"]
            biases = tuple(Part(f"{part}_bias", size, 1, block) for part in biased)
            weights[f"{name}_bias"] = Weight((len(biases) * size,), ("heads",), biases, "zeros")
    out = Part("cross_out", spec.width)
    weights["cross_out"] = Weight((spec.width, size), ("width", "heads"), (out,), is_product=True)
    if spec.out_bias:
        weights["cross_out_bias"] = Weight((spec.width,), ("width",), (Part("cross_out_bias", spec.width),), "zeros")
    return weights


def _qk_norm_weight(spec: Spec, name: str, rows: int, copies: int) -> Weight:
    initial = "zeros" if spec.norm == "rms+1" else "ones"
    if spec.qk_norm == "all heads":
        return Weight((rows * copies,), ("heads",), (Part(name, rows, copies),), initial)
    part = Part(name, spec.head_size)
    if spec.qk_norm == "each head":
        return Weight((spec.head_size,), ("head",), (part,), initial)
    heads = rows // spec.head_size  # whole on every shard: some checkpoints have one tensor per head
    return Weight((heads, spec.head_size), (None, "head"), (part,), initial, stack=heads)


def _latent_weights(spec: Spec, own: Latent) -> dict[str, Weight]:
    weights = _norm_weights(spec, "attn_norm") | mla.declare(spec, own)
    mixed = spec.num_heads * own.value_size
    return weights | {
        "out": Weight((spec.width, mixed), ("width", "heads"), (Part("out", spec.width),), is_product=True)
    }


def _expert_weights(spec: Spec) -> dict[str, Weight]:
    return _norm_weights(spec, "mlp_norm") | (moe.declare(spec, spec.experts) if spec.experts else {})


def _mlp_weights(spec: Spec) -> dict[str, Weight]:
    names = ("gate", "up") if spec.mlp_gated else ("up",)
    rows = len(names) * spec.ffn_width
    has_norm = spec.norm_place not in ("post", "after") and spec.residual != "parallel, one norm"
    weights = _norm_weights(spec, "mlp_norm") if has_norm else {}
    pieces = tuple(Part(name, spec.ffn_width) for name in names)
    weights["up"] = Weight((rows, spec.width), ("feed_forward", "width"), pieces, is_product=True)
    down = Part("down", spec.width)
    weights["down"] = Weight((spec.width, spec.ffn_width), ("width", "feed_forward"), (down,), is_product=True)
    if spec.mlp_bias:
        biases = tuple(Part(f"{name}_bias", spec.ffn_width) for name in names)
        weights["up_bias"] = Weight((rows,), ("feed_forward",), biases, "zeros")
        weights["down_bias"] = Weight((spec.width,), ("width",), (Part("down_bias", spec.width),), "zeros")
    if spec.norm_place != "pre":
        weights |= _norm_weights(spec, "mlp_post_norm")
    return weights


def _norm_weights(spec: Spec, name: str) -> dict[str, Weight]:
    initial = "zeros" if spec.norm == "rms+1" else "ones"
    weights = {name: Weight((spec.width,), ("width",), (Part(name, spec.width),), initial)}
    if spec.norm_bias:
        bias = f"{name}_bias"
        weights[bias] = Weight((spec.width,), ("width",), (Part(bias, spec.width),), "zeros")
    return weights


def forward(spec: Spec, params: Params[Array], tokens: Int[Array, " T"], context: Context) -> Float[Array, "T D"]:
    return final_norm(spec, params, run_layers(spec, params, embed(spec, params, tokens, context), context))


def forward_with_aux(
    spec: Spec, params: Params[Array], tokens: Int[Array, " T"], context: Context, aux_layers: tuple[int, ...]
) -> tuple[Float[Array, "T D"], tuple[Array, ...]]:
    """Return the normed hidden states, and the residual stream at the input of each of `aux_layers`, ascending.

    The number of layers selects the stream after the last.
    """
    x, done, aux = embed(spec, params, tokens, context), 0, []
    for layer in aux_layers:
        x, done = run_layers(spec, params, x, context, done, layer), layer
        aux.append(x)
    return final_norm(spec, params, run_layers(spec, params, x, context, done)), tuple(aux)


def embed(spec: Spec, params: Params[Array], tokens: Int[Array, " T"], context: Context) -> Float[Array, "T D"]:
    with named_scope("embedding"):
        dtype = params.top["final_norm" if spec.final_norm else "embed_norm"].dtype  # never quantized
        x = look_up(params.top["embed"], tokens, spec.vocab_size, dtype, context.layout)
        if spec.embed_scale != 1.0:
            x = x * jnp.asarray(spec.embed_scale, x.dtype)  # rounded as in training
        if context.media is not None:
            rows, chosen = context.media
            is_media = (chosen < len(rows))[:, None]
            x = jnp.where(is_media, _columns(rows, chosen, spec.width, 0).astype(x.dtype), x)
        if spec.learned_positions:
            x = x + params.top["positions"].at[context.positions + spec.position_offset].get(mode="clip")
        if spec.token_types:
            types = 0 if context.token_types is None else context.token_types
            x = x + params.top["token_types"].at[types].get(mode="clip")
        return norm(spec, params.top, "embed_norm", x)


def look_up(table: Any, tokens: Int[Array, " T"], vocab_size: int, dtype: Any, layout: Layout) -> Float[Array, "T D"]:
    """Return rows of a table sharded by rows, each shard's [Vx, D], as `dtype`."""
    size = layout.padded("vocab", vocab_size) // layout.shards("vocab")  # Vx
    row = tokens - layout.index("vocab") * size
    is_here = (row >= 0) & (row < size)
    found = layers.lookup(table, row, dtype)
    return layout.total(jnp.where(is_here[:, None], found, 0), "vocab")


def run_layers(
    spec: Spec,
    params: Params[Array],
    x: Float[Array, "T D"],
    context: Context,
    start: int = 0,
    stop: int | None = None,
) -> Float[Array, "T D"]:
    """Run the layers from `start` to before `stop`.

    Unrolled: a scan over stacked weights is 2.4 to 3.8 times slower on a CPU and copies weights on a GPU.
    """
    turns = rotations(spec, context)
    mlp_norm = "attn_norm" if spec.residual == "parallel, one norm" else "mlp_norm"
    for layer in range(spec.num_layers)[start:stop]:
        weights = params.layers[layer]
        is_fused = fused.halves(spec, weights, layer, context.fused, len(x)) if context.fused else (False, False)
        with named_scope(f"layer_{layer:02}/attention"):
            if is_fused[0]:
                attended = _fused_attention(spec, weights, layer, x, turns, context)
            else:
                mixed = _mixer(spec, weights, layer, norm(spec, weights, "attn_norm", x), turns, context)
                attended = _added(spec, weights, "attn_post_norm", x, mixed)
        x = attended if spec.residual == "serial" else x
        if spec.cross:
            with named_scope(f"layer_{layer:02}/cross"):
                mixed = _cross_attention(spec, weights, layer, norm(spec, weights, "cross_norm", x), context)
                x = attended = _added(spec, weights, "cross_post_norm", x, mixed)
        with named_scope(f"layer_{layer:02}/mlp"):
            if is_fused[1]:
                x = _fused_mlp(spec, weights, layer, x, context)
            else:
                mixed = feed_forward(spec, weights, layer, norm(spec, weights, mlp_norm, x), context)
                x = _added(spec, weights, "mlp_post_norm", attended, mixed)
            if context.media is not None and (layer + 2) * spec.width <= context.media[0].shape[1]:
                rows, chosen = context.media
                added = _columns(rows, chosen, spec.width, layer + 1).astype(x.dtype)
                x = x + jnp.where((chosen < len(rows))[:, None], added, 0)
    return x


def _columns(rows: Array, chosen: Array, width: int, number: int) -> Array:
    """Return tokens' embeddings, [T, D]: the rows `chosen`, or part `number` of rows that join several."""
    found = rows.at[chosen].get(mode="clip")
    return found if found.shape[1] == width else found[:, number * width : (number + 1) * width]


def _fused_attention(
    spec: Spec, weights: Arrays, layer: int, x: Array, turns: dict[Rope, tuple[Array, Array]], context: Context
) -> Array:
    assert context.fused is not None
    qkv = fused.product(spec, weights, context.fused, "qkv", x, norm="attn_norm")
    return _fused_sum(spec, weights, layer, "out", x, _attend(spec, weights, layer, qkv, turns, context), context)


def _fused_mlp(spec: Spec, weights: Arrays, layer: int, x: Array, context: Context) -> Array:
    assert context.fused is not None
    inner = fused.product(spec, weights, context.fused, "up", x, norm="mlp_norm", activation=spec.activation)
    return _fused_sum(spec, weights, layer, "down", x, inner, context)


def _fused_sum(spec: Spec, weights: Arrays, layer: int, name: str, x: Array, inner: Array, context: Context) -> Array:
    assert context.fused is not None
    if context.layout.shards(_SUMMED[name]) == 1:
        return fused.product(spec, weights, context.fused, name, inner, residual=x)
    # Partial sums on each device; `x` is added once.
    return x + _row_parallel(inner, weights, name, partial(context.linear, layer), context.layout)


def rotations(spec: Spec, context: Context) -> dict[Rope, tuple[Array, Array]]:
    with named_scope("embedding"):
        positions = context.positions if context.turned is None else context.turned
        return {rope: layers.rotation(rope, positions) for rope in spec.ropes if rope is not None}


def final_norm(spec: Spec, params: Params[Array], x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    with named_scope("final_norm"):
        return norm(spec, params.top, "final_norm", x)


def head(spec: Spec, params: Params[Array], hidden: Float[Array, "R D"]) -> Float[Array, "R Vx"]:
    """Return logits of this shard's vocabulary piece for normed `hidden`; columns beyond the vocabulary are padding."""
    weight = params.top["embed" if spec.tie_embeddings else "head"]  # [Vx, D]
    with named_scope("logits"):
        return layers.softcap(scaled(layers.linear(hidden, weight), spec.logit_scale), spec.logit_softcap)


def _added(spec: Spec, weights: Arrays, name: str, x: Array, mixed: Array) -> Array:
    if spec.norm_place == "after":
        return norm(spec, weights, name, x + scaled(mixed, spec.residual_scale))
    return x + scaled(norm(spec, weights, name, mixed), spec.residual_scale)


def scaled(x: Array, factor: float) -> Array:
    return x if factor == 1.0 else (x.astype(jnp.float32) * factor).astype(x.dtype)


def norm(spec: Spec, weights: Arrays, name: str, x: Array) -> Array:
    if name not in weights:
        return x
    return layers.norm(x, weights[name], weights.get(f"{name}_bias"), spec.norm, spec.norm_eps)


def _mixer(
    spec: Spec, weights: Arrays, layer: int, x: Array, turns: dict[Rope, tuple[Array, Array]], context: Context
) -> Array:
    if spec.latent is None:
        return attention(spec, weights, layer, x, turns, context)
    rope, linear = spec.ropes[layer], partial(context.linear, layer)
    assert rope is not None
    q, k = mla.project(spec.latent, weights, x, turns[rope], rope, linear)
    heads = Heads(jnp.concatenate([q, k], axis=1), None, False)
    mixed = context.attend(layer, heads, spec.windows[layer], None).astype(x.dtype)
    return _row_parallel(mla.expand(spec.latent, weights, mixed), weights, "out", linear, context.layout)


def attention(
    spec: Spec, weights: Arrays, layer: int, x: Array, turns: dict[Rope, tuple[Array, Array]], context: Context
) -> Array:
    linear, bias = partial(context.linear, layer), weights.get("qkv_bias")
    if bias is not None and not spec.key_bias:
        heads, kv_heads = (count * spec.head_size for count in heads_per_shard(spec, context.layout.shards("heads")))
        bias = jnp.concatenate([bias[:heads], jnp.zeros(kv_heads, bias.dtype), bias[heads:]])
    qkv = linear("qkv", x, weights["qkv"], bias).astype(x.dtype)
    return _row_parallel(_attend(spec, weights, layer, qkv, turns, context), weights, "out", linear, context.layout)


def _attend(
    spec: Spec, weights: Arrays, layer: int, qkv: Array, turns: dict[Rope, tuple[Array, Array]], context: Context
) -> Array:
    heads, kv_heads = heads_per_shard(spec, context.layout.shards("heads"))
    qkv = qkv.reshape(len(qkv), heads + 2 * kv_heads, spec.head_size)  # [T, Hx + 2 Kx, C]
    if spec.qk_norm is not None:
        q, k, v = jnp.split(qkv, (heads, heads + kv_heads), axis=1)
        qkv = jnp.concatenate([*_qk_norm(spec, weights, q, k, context.layout), v], axis=1)
    rope = spec.ropes[layer]
    own = Heads(qkv, None, False) if rope is None else Heads(qkv, turns[rope], rope.is_interleaved)
    mixed = context.attend(layer, own, spec.windows[layer], weights.get("sinks")).astype(qkv.dtype)  # [T, Hx, C]
    return mixed.reshape(len(qkv), heads * spec.head_size)


def _qk_norm(spec: Spec, weights: Arrays, q: Array, k: Array, layout: Layout) -> tuple[Array, Array]:
    powers: tuple[Array | None, Array | None] = (None, None)
    if spec.qk_norm == "all heads":  # equally many on every shard, so means can be averaged
        squares = jnp.stack([jnp.mean(jnp.square(heads.astype(jnp.float32)), axis=(1, 2)) for heads in (q, k)])
        both = layout.mean(squares, "heads")  # [2, T]
        powers = (both[0, :, None, None], both[1, :, None, None])

    def normed(name: str, heads: Array, power: Array | None) -> Array:
        scale = weights[name].reshape(-1, spec.head_size)  # [1 or H or Hx, C]
        if spec.qk_norm == "own per head":
            first = layout.index("heads") * len(scale) // layout.shards("heads")
            scale = lax.dynamic_slice_in_dim(scale, first, heads.shape[1])  # [Hx, C]
        return layers.norm(heads, scale, None, spec.norm, spec.norm_eps, power)

    return normed("q_norm", q, powers[0]), normed("k_norm", k, powers[1])


def _cross_attention(spec: Spec, weights: Arrays, layer: int, x: Array, context: Context) -> Array:
    assert context.cross is not None
    linear, heads = partial(context.linear, layer), heads_per_shard(spec, context.layout.shards("heads"))[0]
    q = linear("cross_q", x, weights["cross_q"], weights.get("cross_q_bias")).astype(x.dtype)
    mixed = context.cross(layer, q.reshape(len(x), heads, spec.head_size)).astype(x.dtype)
    return _row_parallel(mixed.reshape(len(x), -1), weights, "cross_out", linear, context.layout)


def cross_heads(spec: Spec, weights: Arrays, encoded: Float[Array, "T D"], layout: Layout) -> Float[Array, "T A C"]:
    """Return the keys, then the values, of an encoder's output for a layer's cross-attention, A = 2 Hx."""
    heads = heads_per_shard(spec, layout.shards("heads"))[0]
    bias = weights.get("cross_kv_bias")
    if bias is not None and not spec.key_bias:
        bias = jnp.concatenate([jnp.zeros_like(bias), bias])
    both = layers.linear(encoded, weights["cross_kv"], bias).astype(encoded.dtype)
    return both.reshape(len(encoded), 2 * heads, spec.head_size)


def feed_forward(spec: Spec, weights: Arrays, layer: int, x: Array, context: Context) -> Array:
    if spec.experts is not None and spec.experts.layers[layer]:
        mixed = moe.mix(spec, spec.experts, weights, x, context.layout).astype(x.dtype)
        return context.layout.total(mixed, "feed_forward")
    if context.linear is plain_linear:
        return _mlp(spec, weights, x, context.layout, context.rounds_inner and spec.mlp_gated)
    return _run_mlp(spec, weights, x, partial(context.linear, layer), context.layout)


@partial(jax.jit, static_argnames=("spec", "layout", "rounds"))
def _mlp(spec: Spec, weights: Arrays, x: Array, layout: Layout, rounds: bool) -> Array:
    """Run a layer's feed-forward, traced once for all layers: `linear` must not refer to a layer's arrays.

    `rounds`: gate and up products are rounded to the type of `x`.
    """

    def linear(name: str, x: Array, weight: Array | Quantized[Array], bias: Array | None = None) -> Array:
        if rounds and name == "up" and bias is None and not isinstance(weight, Quantized):
            return pallas_kernels.linear(x, weight, rounds=True).astype(jnp.float32)
        return layers.linear(x, weight, bias)

    return _run_mlp(spec, weights, x, linear, layout)


def _run_mlp(spec: Spec, weights: Arrays, x: Array, linear: Callable[..., Array], layout: Layout) -> Array:
    inner = linear("up", x, weights["up"], weights.get("up_bias"))  # [T, (2) F / X], float32
    inner = gated(inner, spec.activation) if spec.mlp_gated else activate(inner, spec.activation)
    return _row_parallel(inner.astype(x.dtype), weights, "down", linear, layout)


def _row_parallel(x: Array, weights: Arrays, name: str, linear: Callable[..., Array], layout: Layout) -> Array:
    # In the activations' type: half the bytes of float32.
    total = layout.total(linear(name, x, weights[name]).astype(x.dtype), _SUMMED[name])
    bias = weights.get(f"{name}_bias")
    return total if bias is None else total + bias


def check_shards(spec: Spec, layout: Layout) -> None:
    experts = spec.experts
    divided = [("attention heads", "heads", spec.num_heads), ("key-value heads", "kv_heads", spec.num_kv_heads)]
    if experts is None or not all(experts.layers):
        divided.append(("feed-forward columns", "feed_forward", spec.ffn_width))
    if experts is not None:
        divided.append(("feed-forward columns", "expert_width", experts.ffn_width))
        divided.append(("feed-forward columns", "feed_forward", experts.shared_width))
        divided.append(("experts", "experts", experts.count))
    for name, axis, count in divided:
        shards = layout.shards(axis)
        if count % shards and (axis != "kv_heads" or shards % count):
            raise UserError(
                f"tensor_parallel_size {shards} does not divide the model's {count} {name}.", "tensor_parallel_size"
            )
