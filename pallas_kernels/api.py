"""The public operations; each dispatches to one of its implementations.

A layer's cache is two arrays [N, K, P, C]: N blocks, K KV heads, P tokens per block, C head size (V for values); in
latent attention, values are prefixes of keys in one array. Scores, softmax and sums are float32. Caches of int8 or
8-bit floats have float32 scales [N, K, P]; those of uint8 hold the bits of `float8`, since XLA:CPU would convert a
whole 8-bit float array per access. Other letters: R rows, V vocabulary in `sample`; T tokens, E experts of width F, n
per token.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int, Num, UInt

from pallas_kernels import choice
from pallas_kernels.activations import ACTIVATIONS, Activation
from pallas_kernels.attention.arguments import AttentionArgs, Tiles
from pallas_kernels.choice import Choice, Site, capability_of
from pallas_kernels.experts.xla import Scores
from pallas_kernels.kv_cache import xla as kv_cache
from pallas_kernels.linear.numbers import PACKED, Kind
from pallas_kernels.sampling.xla import MOST_TOKENS

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
SCALED = ("int8", *FLOAT8, "uint8")  # with scales


# `with linear_by(choice):` selects the implementation of products traced inside that it supports. Part of JAX's trace
# cache key.
linear_by = jax.make_user_context(default_value=None)

fused_topk_by, fused_experts_by = (jax.make_user_context(default_value=None) for _ in range(2))


class Norm(NamedTuple):
    """RMS norm."""

    gain: Float[Array, " D"]
    eps: float  # added to the mean square
    is_plus_one: bool = False  # `gain` is stored minus one


class Written(NamedTuple):
    """Rotated queries and updated caches."""

    q: Float[Array, "T H C"]
    k_cache: Num[Array, "N K P C"]
    v_cache: Num[Array, "N K P C"] | None
    k_scales: Float[Array, "N K P"] | None
    v_scales: Float[Array, "N K P"] | None


def write_kv(
    qkv: Float[Array, "T A C"],
    k_cache: Num[Array, "N K P C"],
    v_cache: Num[Array, "N K P C"] | None,
    blocks: Int[Array, " T"],
    offsets: Int[Array, " T"],
    *,
    turn: tuple[Float[Array, "T F"], Float[Array, "T F"]] | None = None,
    is_interleaved: bool = False,
    k_scales: Float[Array, "N K P"] | None = None,
    v_scales: Float[Array, "N K P"] | None = None,
    float8: str | None = None,
    implementation: str | Choice | None = None,
) -> Written:
    """Rotate queries and keys, and store keys and values at (`blocks`, `offsets`), in place if donated.

    `qkv` holds each token's query heads, K key heads, and K value heads (none without `v_cache`). `turn` is float32
    cosine and sine of F pairs' angles: coordinates i and F + i of the first 2 F, or 2 i and 2 i + 1 if
    `is_interleaved`, which moves first coordinates before second ones. Rotated in float32, rounded to the type of
    `qkv`, then to the cache's. With scales, vectors with NaN are stored as unspecified values.

    Tokens with a block >= N are not stored. Blocks and offsets must not be negative; positions must be unique, even
    those not stored.
    """
    _check_scales(k_cache, v_cache, k_scales, v_scales, float8)
    heads = qkv.shape[1] - k_cache.shape[1] * (1 if v_cache is None else 2)
    if heads < 0 or qkv.shape[2] != k_cache.shape[3] or (v_cache is not None and v_cache.shape != k_cache.shape):
        caches = [cache.shape for cache in (k_cache, v_cache) if cache is not None]
        raise ValueError(f"heads {qkv.shape[1:]} do not fit caches {caches}")
    if turn is not None and 2 * turn[0].shape[1] > qkv.shape[2]:
        raise ValueError(f"{turn[0].shape[1]} pairs do not fit heads of {qkv.shape[2]}")
    cosine, sine = turn or (None, None)
    arrays = (qkv, k_cache, v_cache, blocks, offsets, cosine, sine, k_scales, v_scales)
    site = _site(qkv, k_cache, heads, None)
    static = {"is_interleaved": is_interleaved} | ({} if float8 is None else {"float8": float8})
    return Written(*_dispatch("write_kv", implementation, site, static, arrays))


def copy_blocks(
    k_cache: Num[Array, "N ..."],
    v_cache: Num[Array, "N ..."] | None,
    sources: Int[Array, " X"],
    targets: Int[Array, " X"],
) -> tuple[Num[Array, "N ..."], Num[Array, "N ..."] | None]:
    """Copy blocks `sources` of the caches to `targets`, in place if donated.

    Scales need a separate call. Targets >= N are not written. Targets must be unique, and no other copy's source.
    """
    return kv_cache.copy_blocks(k_cache, v_cache, sources, targets)


def paged_decode(
    q: Float[Array, "B H C"],
    k_cache: Num[Array, "N K P C"],
    v_cache: Num[Array, "N K P V"] | None,
    tables: Int[Array, "B M"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    value_size: int | None = None,
    k_scales: Float[Array, "N K P"] | None = None,
    v_scales: Float[Array, "N K P"] | None = None,
    float8: str | None = None,
    bias: Float[Array, "H L"] | None = None,
    batch_invariant: bool = False,
    implementation: str | Choice | None = None,
) -> Float[Array, "B H V"]:
    """Attend with one query per sequence.

    Row b is at position `lengths[b] - 1` and attends up to it (the last `window`, itself included); position p is in
    block `tables[b, p // P]` at offset `p % P`. Rows of length 0 return zeros. Table entries beyond the length, and
    their contents, even NaN, are ignored.

    `scale` multiplies scores, then `softcap` bounds them; `sinks` are logits in the softmax without values (gpt-oss).
    `bias` is added to each head's scores, by the key's distance before the query; the last is for all farther ones
    (T5). Without `v_cache`, values are the first `value_size` coordinates of keys. `batch_invariant`: a row's bits do
    not depend on other rows. Raises `ValueError` for an unsupported `implementation`.
    """
    _check_heads(q, k_cache, v_cache, value_size)
    _check_scales(k_cache, v_cache, k_scales, v_scales, float8)
    args = AttentionArgs(
        k_cache=k_cache,
        v_cache=v_cache,
        tables=tables,
        sinks=sinks,
        k_scales=k_scales,
        v_scales=v_scales,
        scale=scale,
        window=window,
        softcap=softcap,
        value_size=value_size,
        float8=float8,
        bias=bias,
        batch_invariant=batch_invariant,
    )
    site = _site(q, k_cache, q.shape[1], value_size, softcap, bias is not None)
    return _dispatch("paged_decode", implementation, site, {}, (q, lengths, args))


def paged_prefill(
    q: Float[Array, "T H C"],
    k_cache: Num[Array, "N K P C"],
    v_cache: Num[Array, "N K P V"] | None,
    tables: Int[Array, "Y M"],
    tile_start: Int[Array, " Y"],
    tile_length: Int[Array, " Y"],
    tile_position: Int[Array, " Y"],
    *,
    tile: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    value_size: int | None = None,
    k_scales: Float[Array, "N K P"] | None = None,
    v_scales: Float[Array, "N K P"] | None = None,
    float8: str | None = None,
    bias: Float[Array, "H L"] | None = None,
    last_seen: Int[Array, " T"] | None = None,
    implementation: str | Choice | None = None,
) -> Float[Array, "T H V"]:
    """Attend causally with ragged queries over cached keys.

    Tile y is `tile_length[y]` (at most `tile`) consecutive queries of a sequence from `tile_start[y]`, the first at
    position `tile_position[y]`; their keys are already stored in blocks `tables[y]`. Tiles must not overlap; length 0
    is padding; queries outside tiles return zeros. `last_seen`, at least a query's position, is that of the last key
    that it sees, for tokens of an image that attend to all of it; windows begin before the query. Otherwise as
    `paged_decode`.
    """
    _check_heads(q, k_cache, v_cache, value_size)
    _check_scales(k_cache, v_cache, k_scales, v_scales, float8)
    args = AttentionArgs(
        k_cache=k_cache,
        v_cache=v_cache,
        tables=tables,
        sinks=sinks,
        k_scales=k_scales,
        v_scales=v_scales,
        scale=scale,
        window=window,
        softcap=softcap,
        value_size=value_size,
        float8=float8,
        bias=bias,
        last_seen=last_seen,
    )
    tiles = Tiles(tile_start, tile_length, tile_position)
    site = _site(q, k_cache, q.shape[1], value_size, softcap, bias is not None, last_seen is not None)
    return _dispatch("paged_prefill", implementation, site, {"tile": tile}, (q, tiles, args))


def sample(
    logits: Float[Array, "R V"],
    temperature: Float[Array, " R"] | None = None,
    keys: UInt[Array, "R 2"] | None = None,
    positions: Int[Array, " R"] | None = None,
    top_k: Int[Array, " R"] | None = None,
    top_p: Float[Array, " R"] | None = None,
    min_p: Float[Array, " R"] | None = None,
    *,
    implementation: str | Choice | None = None,
) -> tuple[Int[Array, " R"], Bool[Array, " R"]]:
    """Sample a token per row of float32 `logits`; also return whether each row is free of inf and NaN.

    At temperature 0 or without temperatures: the argmax, lowest id on ties. Otherwise the argmax of logit / temperature
    plus Gumbel noise of the row's key (threefry2x32), its position and the token id.

    Filters, in order: `min_p` keeps tokens with at least that share of the largest probability (0: off); `top_k` the
    largest (0 or >= V: off); `top_p` the largest of the rest with that share of their total (1: off), each with ties.

    Banned tokens have -inf. With NaN or inf, any token may be returned. Implementations may differ in the last bits of
    sums.
    """
    if logits.dtype != jnp.float32:
        raise ValueError(f"logits must be float32, not {logits.dtype}")
    if logits.shape[1] > MOST_TOKENS:
        raise ValueError(f"a vocabulary has at most {MOST_TOKENS} tokens, not {logits.shape[1]}")
    filters = (top_k, top_p, min_p)
    is_random = temperature is not None
    if (keys is not None, positions is not None) != (is_random, is_random):
        raise ValueError("give temperature, keys and positions together")
    if not is_random and any(one is not None for one in filters):
        raise ValueError("filters change nothing without a temperature")
    return _dispatch("sample", implementation, Site(""), {}, (logits, temperature, keys, positions, *filters))


def linear(
    x: Num[Array, "T D"],
    weight: Num[Array, "O E"],
    scales: Float[Array, "G O"] | None = None,
    zeros: Num[Array, "G O"] | None = None,
    *,
    kind: Kind = "float",
    rounds_rows: bool = False,
    rounds: bool = False,
    implementation: str | Choice | None = None,
) -> Float[Array, "T O"]:
    """Return `x` times a weight of O rows and D columns, float32.

    `kind` is the weight's number type: "float" [O, D]; others are multiplied with `scales`, after subtraction of
    `zeros` if given: "int8" and "float8" (e4m3) [O, D]; "int4" (-8 to 7, stored plus 8) and "float4" (e2m1) [O, D / 2],
    two per byte, even column in the low half. Each of G groups of adjacent columns has a scale per row. Dequantized
    numbers may be rounded to the type of `x`.

    `rounds_rows` ("int8", one group, no zeros) rounds rows of `x` to 8 bits too: integer sums, exact up to 133,000
    columns, times both scales. `rounds` ("float") rounds each sum once, to the type of `x`. `implementation` None:
    `linear_by` if it supports this, else XLA.
    """
    columns = weight.shape[1] * (2 if kind in PACKED else 1)
    if x.shape[1] != columns:
        raise ValueError(f"rows of {x.shape[1]} do not fit a weight of {columns} columns")
    if (scales is None) != (kind == "float") or (zeros is not None and scales is None):
        raise ValueError(f"a weight of kind {kind} has {'no' if kind == 'float' else 'its'} scales")
    if scales is not None and (columns % scales.shape[0] or scales.shape[1] != len(weight)):
        raise ValueError(f"scales {scales.shape} do not fit a weight {weight.shape}")
    if rounds_rows and (kind != "int8" or zeros is not None or scales is None or scales.shape[0] != 1):
        raise ValueError("rows are rounded for int8 with one scale for each of its rows, and no zeros")
    if rounds and kind != "float":
        raise ValueError(f"sums are rounded for weights that are floats, and this one is {kind}")
    static: dict[str, Any] = {"kind": kind, "rounds_rows": rounds_rows}
    site = Site("", dtype=str(x.dtype), **static)
    if rounds:
        return _dispatch("linear", "xla", site, static | {"rounds": True}, (x, weight, scales, zeros))
    chosen = implementation or _product_by(site)
    return _dispatch("linear", chosen, site, static, (x, weight, scales, zeros))


def fused_linear(
    x: Float[Array, "T D"],
    weight: Float[Array, "E D"],
    bias: Float[Array, " E"] | None = None,
    *,
    norm: Norm | None = None,
    residual: Float[Array, "T O"] | None = None,
    activation: Activation | None = None,
    implementation: str | Choice | None = None,
) -> Float[Array, "T O"]:
    """Multiply `x`, normalized if `norm` is given, with a float weight; return the type of `x`.

    Then add `bias`. With an `activation` the weight stacks two matrices of O rows: activation(first product) times
    second product. `residual` is added last. Sums are float32; other roundings may differ.
    """
    outputs = len(weight) // (1 if activation is None else 2)
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"rows of {x.shape[1]} do not fit a weight of {weight.shape[1]} columns")
    if activation not in (None, *ACTIVATIONS) or (activation is not None and len(weight) % 2):
        known = ", ".join(ACTIVATIONS)
        raise ValueError(
            f"activation {activation!r}, one of {known}, does not go with {len(weight)} rows of two weights"
        )
    for name, array, shape in (
        ("bias", bias, weight.shape[:1]),
        ("gain", norm and norm.gain, x.shape[1:]),
        ("residual", residual, (len(x), outputs)),
    ):
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} {array.shape} does not fit, it should be {shape}")
    gain, eps, is_plus_one = norm or (None, 0.0, False)
    static = {"eps": eps, "is_plus_one": is_plus_one, "activation": activation}
    arrays = (x, weight, bias, gain, residual)
    return _dispatch("fused_linear", implementation, Site("", dtype=str(x.dtype)), static, arrays)


def fused_topk(
    scores: Float[Array, "T E"],
    bias: Float[Array, " E"] | None = None,
    *,
    per_token: int,
    kind: Scores = "softmax",
    is_normalised: bool = False,
    scale: float = 1.0,
    implementation: str | Choice | None = None,
) -> tuple[Int[Array, "T n"], Float[Array, "T n"]]:
    """Return the `per_token` best-scored experts of each token, and their weights.

    Weights are float32 softmax or sigmoid of `scores`, normalized over the chosen if `is_normalised`, times `scale`.
    `bias`, float32, affects the choice only. Ties: lowest first; NaN is largest.
    """
    if not 1 <= per_token <= scores.shape[1]:
        raise ValueError(f"{per_token} of {scores.shape[1]} experts cannot be chosen")
    static = {"per_token": per_token, "kind": kind, "is_normalised": is_normalised, "scale": scale}
    return _dispatch("fused_topk", implementation, Site(""), static, (scores, bias))


def fused_experts(
    x: Float[Array, "T D"],
    up: Float[Array, "E O D"],
    down: Float[Array, "E D F"],
    chosen: Int[Array, "T n"],
    gates: Float[Array, "T n"],
    up_bias: Float[Array, "E O"] | None = None,
    down_bias: Float[Array, "E D"] | None = None,
    *,
    activation: Activation = "silu",
    clamp: float | None = None,
    clamp_slope: float = 1.702,
    num_experts: int | None = None,
    implementation: str | Choice | None = None,
) -> Float[Array, "T D"]:
    """Return the weighted sum of each token's experts for `x`, float32.

    `chosen` are indices below E, `gates` weights. With `num_experts`, those of all devices, `chosen` may also be E: an
    expert of another device, which adds zero. `up` has 2 F rows: activation(first F products) times the others; `down`
    has D. `clamp` and `clamp_slope` give gpt-oss's gate (`activations.gated`). Intermediates, and possibly weighted
    results, are rounded to the type of `x`.
    """
    if up.shape[0] != down.shape[0] or up.shape[1] != 2 * down.shape[2]:
        raise ValueError(f"experts {up.shape} and {down.shape} do not fit: 2 F rows of D, and D rows of F")
    if not x.dtype == up.dtype == down.dtype:
        raise ValueError(f"tokens of {x.dtype} do not go with experts of {up.dtype} and {down.dtype}")
    if num_experts is not None and num_experts < len(up):
        raise ValueError(f"{num_experts} experts of all devices are fewer than the {len(up)} of this one")
    static = {"activation": activation, "clamp": clamp, "clamp_slope": clamp_slope, "num_experts": num_experts}
    arrays = (x, up, down, chosen, gates, up_bias, down_bias)
    return _dispatch("fused_experts", implementation, Site("", dtype=str(x.dtype)), static, arrays)


def _product_by(site: Site) -> str | Choice:
    """Return the choice of `linear_by` if it supports `site`, else "xla"."""
    chosen: Choice | None = linear_by.value
    if chosen is None:
        return "xla"
    there = _on(site, "cpu" if chosen.capability is None else "gpu", chosen.capability)
    return chosen if choice.refusal("linear", chosen.name, there) is None else "xla"


def _dispatch(
    operation: str,
    implementation: str | Choice | None,
    site: Site,
    static: dict[str, Any],
    arrays: tuple[Any, ...],
) -> Any:
    arrays = jax.tree.map(jnp.asarray, arrays)
    if implementation is not None:
        chosen = implementation
        if isinstance(chosen, str):
            chosen = choice.resolve(operation, _here(site), chosen)
        return _run(operation, chosen, static, arrays)
    # The program may run on another backend; lowering keeps one branch.
    return lax.platform_dependent(
        *arrays,
        cpu=lambda *operands: _run(operation, choice.resolve(operation, _on(site, "cpu")), static, operands),
        default=lambda *operands: _run(operation, choice.resolve(operation, _here(site)), static, operands),
    )


def _run(operation: str, chosen: Choice, static: dict[str, Any], arrays: tuple[Any, ...]) -> Any:
    own = getattr(choice.module(operation, chosen.name), operation)
    there: dict[str, Any] = {"capability": chosen.capability} if chosen.name in choice.COMPILED else {}
    if there and operation == "fused_experts":
        there["is_deterministic"] = chosen.is_deterministic
    return own(*arrays, **static, **there)


def _check_heads(q: Array, k_cache: Array, v_cache: Array | None, value_size: int | None) -> None:
    if (v_cache is None) == (value_size is None):
        raise ValueError("give either v_cache or value_size")
    if value_size is not None and not 1 <= value_size <= k_cache.shape[3]:
        raise ValueError(f"keys of {k_cache.shape[3]} do not begin with values of {value_size}")
    if q.shape[1] % k_cache.shape[1] != 0 or q.shape[2] != k_cache.shape[3]:
        raise ValueError(
            f"queries of {q.shape[1]} heads of {q.shape[2]} do not fit a cache of {k_cache.shape[1]} heads "
            f"of {k_cache.shape[3]}"
        )


def _check_scales(
    k_cache: Array, v_cache: Array | None, k_scales: Array | None, v_scales: Array | None, float8: str | None
) -> None:
    is_scaled = str(k_cache.dtype) in SCALED
    if (float8 in FLOAT8) != (k_cache.dtype == jnp.uint8) or float8 not in (None, *FLOAT8):
        raise ValueError(f"float8 is one of {', '.join(FLOAT8)} where the cache holds bytes; got {float8!r}")
    if not is_scaled and not jnp.issubdtype(k_cache.dtype, jnp.floating):
        raise ValueError(f"the cache must hold floats or be one of {', '.join(SCALED)}, not {k_cache.dtype}")
    if (k_scales is not None) != is_scaled or (v_scales is not None) != (is_scaled and v_cache is not None):
        raise ValueError(f"a cache has scales where it is one of {', '.join(SCALED)}; this is {k_cache.dtype}")


def _site(
    q: Array,
    k_cache: Array,
    heads: int,
    value_size: int | None,
    softcap: float | None = None,
    has_bias: bool = False,
    looks_ahead: bool = False,
) -> Site:
    return Site(
        platform="",
        dtype=str(q.dtype),
        cache_dtype=str(k_cache.dtype),
        heads=heads,
        kv_heads=k_cache.shape[1],
        head_size=k_cache.shape[3],
        value_size=value_size,
        block_tokens=k_cache.shape[2],
        has_softcap=softcap is not None,
        has_bias=has_bias,
        looks_ahead=looks_ahead,
    )


def _here(site: Site) -> Site:
    device = jax.devices()[0]
    return _on(site, device.platform, capability_of(device))


def _on(site: Site, platform: str, capability: int | None = None) -> Site:
    return dataclasses.replace(site, platform=platform, capability=capability)
