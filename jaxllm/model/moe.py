"""Mixture of experts on one shard: weights, routing, and products.

Every shard holds a slice of every expert, or with expert parallelism whole experts. No token is dropped. With several
ranks (`Layout`) all their shards divide the experts, and each computes the terms of its experts for all ranks' tokens.

E experts (after routing: on this shard), F an expert's width on this shard, n experts per token, N = T · n assignments.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import pallas_kernels
from jaxllm.model import layers
from jaxllm.model.parameters import Part, Weight
from jaxllm.model.quantized import Quantized, floats
from jaxllm.model.sharding import Layout
from jaxllm.model.spec import Experts, Spec
from pallas_kernels.activations import gated

Arrays = dict[str, Any]  # Arrays or Quantized by name

# Maximal assignments per product; more would save few weight reads and add padding.
_TILE = 128

# Tokens up to which a GPU multiplies all with every expert: below about 200 the product is bound by reading weights.
_DENSE_TOKENS = 256


def declare(spec: Spec, experts: Experts) -> dict[str, Weight]:
    count, inner, width = experts.count, experts.ffn_width, spec.width
    weights = {
        "router": Weight((count, width), ("routes", "width"), (Part("router", count),)),
        "expert_up": Weight(
            (count, 2 * inner, width),
            ("experts", "expert_width", "width"),
            (Part("expert_gate", inner), Part("expert_up", inner)),
            stack=count,
            is_product=True,
        ),
        "expert_down": Weight(
            (count, width, inner),
            ("experts", "width", "expert_width"),
            (Part("expert_down", width),),
            stack=count,
            is_product=True,
        ),
    }
    if experts.router_bias:
        weights["router_bias"] = Weight((count,), ("routes",), (Part("router_bias", count),), "zeros")
    if experts.choice_bias:
        weights["choice_bias"] = Weight((count,), ("routes",), (Part("choice_bias", count),), "zeros", is_wide=True)
    if experts.bias:
        parts = (Part("expert_gate_bias", inner), Part("expert_up_bias", inner))
        weights["expert_up_bias"] = Weight((count, 2 * inner), ("experts", "expert_width"), parts, "zeros", stack=count)
        parts = (Part("expert_down_bias", width),)
        weights["expert_down_bias"] = Weight((count, width), ("experts", "width"), parts, "zeros", stack=count)
    if experts.shared_width:
        shared = experts.shared_width
        parts = (Part("shared_gate", shared), Part("shared_up", shared))
        weights["shared_up"] = Weight((2 * shared, width), ("feed_forward", "width"), parts, is_product=True)
        down = (Part("shared_down", width),)
        weights["shared_down"] = Weight((width, shared), ("width", "feed_forward"), down, is_product=True)
    if experts.shared_gate:
        weights["shared_weight"] = Weight((1, width), (None, "width"), (Part("shared_weight", 1),))
    return weights


@partial(jax.jit, static_argnames=("spec", "experts", "layout"))
def mix(spec: Spec, experts: Experts, weights: Arrays, x: Array, layout: Layout) -> Array:
    """Return this shard's term of the experts' output, float32 [T, D], to be summed over the rank's shards."""
    own, x = x, layout.gathered(x, "ranks", 0)
    chosen, gates = route(experts, weights, x)
    routed = {name: weight for name, weight in weights.items() if name.startswith("expert_")}
    if is_divided := layout.shards("experts") > 1:
        chosen = _on_shard(chosen, _count(routed), layout)
    kernel = pallas_kernels.fused_experts_by.value
    if kernel is not None and not isinstance(weights["expert_up"], Quantized):
        total = by_kernel(spec, experts, routed, x, chosen, gates, layout, kernel)
    else:
        total = lax.platform_dependent(
            routed,
            x,
            chosen,
            gates,
            cpu=partial(by_tiles, spec, experts, skips=True),
            default=partial(_by_size, spec, experts),
        )
        if experts.bias:
            bias = spread(_count(routed), chosen, gates) @ weights["expert_down_bias"].astype(jnp.float32)
            # A replicated bias is added by one shard.
            total = total + (bias if is_divided else jnp.where(layout.index("feed_forward") == 0, bias, 0.0))
    if layout.ranks > 1:  # in the activations' type, as all sums over shards
        total = layout.scattered(total.astype(x.dtype), "ranks", 0).astype(jnp.float32)
    if experts.shared_width:
        inner = gated(layers.linear(own, weights["shared_up"]), spec.activation)
        shared = layers.linear(inner.astype(x.dtype), weights["shared_down"])  # [T, D]
        if experts.shared_gate:
            shared = shared * jax.nn.sigmoid(layers.linear(own, weights["shared_weight"]))
        total = total + shared
    return total


def route(experts: Experts, weights: Arrays, x: Array) -> tuple[Array, Array]:
    """Return each token's experts and their weights (float32), both [T, n]."""
    scores = layers.linear(x, weights["router"], weights.get("router_bias"))  # [T, E]
    kernel = pallas_kernels.fused_topk_by.value
    if kernel is not None and experts.groups == 1:
        return pallas_kernels.fused_topk(
            scores,
            weights.get("choice_bias"),
            per_token=experts.per_token,
            kind=experts.scores,
            is_normalised=experts.is_normalised,
            scale=experts.scale,
            implementation=kernel,
        )
    scores = jax.nn.sigmoid(scores) if experts.scores == "sigmoid" else jax.nn.softmax(scores, axis=-1)
    candidates = scores + weights["choice_bias"] if experts.choice_bias else scores
    if experts.groups > 1:
        grouped = candidates.reshape(len(x), experts.groups, -1)  # [T, groups, experts per group]
        worth = jnp.sum(lax.top_k(grouped, experts.group_best)[0], axis=-1)
        best = lax.top_k(worth, experts.groups_per_token)[1]  # [T, groups per token]
        is_open = jnp.any(best[:, :, None] == jnp.arange(experts.groups), axis=1)  # [T, groups]
        candidates = jnp.where(is_open[:, :, None], grouped, -jnp.inf).reshape(scores.shape)
    chosen = lax.top_k(candidates, experts.per_token)[1]
    gates = jnp.take_along_axis(scores, chosen, axis=1)
    if experts.is_normalised:
        gates = gates / (jnp.sum(gates, axis=-1, keepdims=True) + 1e-20)
    return chosen, gates * experts.scale


def _on_shard(chosen: Array, count: int, layout: Layout) -> Array:
    """Convert experts to numbers on this shard, `count` for those of other shards."""
    own = chosen - layout.index("experts") * count
    return jnp.where((own >= 0) & (own < count), own, count)


def _count(weights: Arrays) -> int:
    return jax.tree.leaves(weights["expert_down"])[0].shape[0]


def _is_here(experts: Experts, weights: Arrays, chosen: Array) -> Array | None:
    """Return which assignments have an expert on this shard; None: all."""
    count = _count(weights)
    return None if count == experts.count else chosen < count


def by_kernel(
    spec: Spec,
    experts: Experts,
    weights: Arrays,
    x: Array,
    chosen: Array,
    gates: Array,
    layout: Layout,
    implementation: pallas_kernels.Choice,
) -> Array:
    up_bias, down_bias = weights.get("expert_up_bias"), weights.get("expert_down_bias")
    is_divided = layout.shards("experts") > 1
    if down_bias is not None and not is_divided:
        down_bias = jnp.where(layout.index("feed_forward") == 0, down_bias, jnp.zeros_like(down_bias))
    return pallas_kernels.fused_experts(
        x,
        weights["expert_up"],
        weights["expert_down"],
        chosen,
        gates,
        up_bias,
        down_bias,
        activation=spec.activation,
        clamp=experts.clamp,
        clamp_slope=experts.clamp_slope,
        num_experts=experts.count if is_divided else None,
        implementation=implementation,
    )


def by_tiles(
    spec: Spec,
    experts: Experts,
    weights: Arrays,
    x: Array,
    chosen: Array,
    gates: Array,
    *,
    skips: bool,
) -> Array:
    """Sort assignments by expert and multiply tiles of one expert each: float32 [T, D].

    Other shards' are in no tile. `skips` ends the loop after the last tile; otherwise it runs for the worst case, so
    that a GPU need not synchronize.
    """
    tokens, width = x.shape
    total, count = chosen.size, _count(weights)  # N, E
    tile = _tile_size(tokens, experts)
    flat = chosen.reshape(total)
    order = jnp.argsort(flat).astype(jnp.int32)
    counts = jnp.zeros(count, jnp.int32).at[flat].add(1)  # drops index E
    starts = jnp.cumsum(counts) - counts
    tiles = -(-counts // tile)
    ends = jnp.cumsum(tiles)
    source = jnp.pad(order // experts.per_token, (0, tile))  # [N + tile], of x

    def multiply(number: Array, out: Array) -> Array:
        expert = jnp.minimum(jnp.sum(ends <= number), count - 1)
        start = starts[expert] + (number - (ends[expert] - tiles[expert])) * tile
        start = jnp.where(number < ends[-1], start, total)
        own = jax.tree.map(lambda weight: lax.dynamic_index_in_dim(weight, expert, keepdims=False), weights)
        rows = x.at[lax.dynamic_slice(source, (start,), (tile,))].get(mode="clip")  # [tile, D]
        inner = layers.linear(rows, own["expert_up"], own.get("expert_up_bias"))
        result = layers.linear(_gated(spec, experts, inner).astype(x.dtype), own["expert_down"])
        # Rows beyond the expert's last are overwritten by the next tile.
        return lax.dynamic_update_slice(out, result.astype(out.dtype), (start, 0))

    worst = min(total, total // tile + count)
    out = jnp.zeros((total + tile, width), x.dtype)
    out = lax.fori_loop(0, ends[-1] if skips else worst, multiply, out)
    place = jnp.zeros(total, jnp.int32).at[order].set(jnp.arange(total, dtype=jnp.int32), unique_indices=True)
    return _weighted(out[place], gates, _is_here(experts, weights, chosen))


def by_gathering(spec: Spec, experts: Experts, weights: Arrays, x: Array, chosen: Array, gates: Array) -> Array:
    """Multiply each assignment with a copy of its expert: float32 [T, D]."""
    gathered = jax.tree.map(lambda weight: weight[chosen.reshape(-1)], weights)
    factors = {name: floats(weight, x.dtype) for name, weight in gathered.items()}
    rows = jnp.repeat(x, experts.per_token, axis=0)  # [N, D]
    inner = jnp.einsum("nd,nfd->nf", rows, factors["expert_up"], preferred_element_type=jnp.float32)
    if experts.bias:
        inner = inner + factors["expert_up_bias"].astype(jnp.float32)
    inner = _gated(spec, experts, inner).astype(x.dtype)
    result = jnp.einsum("nf,ndf->nd", inner, factors["expert_down"], preferred_element_type=jnp.float32)
    return _weighted(result, gates, _is_here(experts, weights, chosen))


def by_all(spec: Spec, experts: Experts, weights: Arrays, x: Array, chosen: Array, gates: Array) -> Array:
    """Multiply every token with every expert, weighted by zero if not chosen: float32 [T, D]."""
    up, down = floats(weights["expert_up"], x.dtype), floats(weights["expert_down"], x.dtype)  # [E, 2 F, D], [E, D, F]
    bias = weights["expert_up_bias"].reshape(-1) if experts.bias else None
    inner = layers.linear(x, up.reshape(-1, x.shape[1]), bias).reshape(len(x), *up.shape[:2])  # [T, E, 2 F]
    inner = _gated(spec, experts, inner) * spread(up.shape[0], chosen, gates)[:, :, None]
    # Separate products: contracting E and F together would transpose all weights.
    inner = inner.astype(x.dtype).swapaxes(0, 1)  # [E, T, F]
    result = jnp.einsum("etf,edf->etd", inner, down, preferred_element_type=jnp.float32)
    return jnp.sum(result, axis=0)


def _by_size(spec: Spec, experts: Experts, weights: Arrays, x: Array, chosen: Array, gates: Array) -> Array:
    count = _count(weights)
    # Gathering reads an expert twice and writes it: worthwhile for up to a third of the experts.
    if 3 * chosen.size <= count:
        return by_gathering(spec, experts, weights, x, chosen, gates)
    if len(x) <= _DENSE_TOKENS:
        return by_all(spec, experts, weights, x, chosen, gates)
    # One shard could have all assignments: a loop for the worst case would be X times the average.
    return by_tiles(spec, experts, weights, x, chosen, gates, skips=count < experts.count)


def _tile_size(tokens: int, experts: Experts) -> int:
    average = -(-tokens * experts.per_token // experts.count)
    return min(tokens, max(8, 1 << (average - 1).bit_length()), _TILE)


def _gated(spec: Spec, experts: Experts, inner: Array) -> Array:
    return gated(inner, spec.activation, experts.clamp, experts.clamp_slope)


def spread(count: int, chosen: Array, gates: Array) -> Array:
    """Return weights over `count` experts, [T, E], zero if not chosen."""
    is_chosen = chosen[:, :, None] == jnp.arange(count)  # [T, n, E]
    return jnp.sum(jnp.where(is_chosen, gates[:, :, None], 0.0), axis=1)


def _weighted(results: Array, gates: Array, is_here: Array | None) -> Array:
    results = results.reshape(*gates.shape, -1).astype(jnp.float32) * gates[:, :, None]  # [T, n, D]
    return jnp.sum(results if is_here is None else jnp.where(is_here[:, :, None], results, 0.0), axis=1)
