"""The public operations: what they mean, and which implementation runs.

A layer's cache is two arrays [N, K, P, C]: N blocks in the pool, K key-value heads, P tokens per block, C head size (V
that of the values). Where each value is the beginning of its key, as in latent attention, there is one array only.
Layout, writing and attention are owned together here. Scores, softmax and accumulation are float32.

A cache of int8 or of 8-bit floats has scales beside it, [N, K, P] float32: a stored vector stands for itself times its
scale. Others have none. A cache of bytes, uint8, holds the bits of 8-bit floats, whose type is then given as `float8`:
for XLA's CPU back end, which moves bytes, but converts a whole array of 8-bit floats to take or store a few of them.

Apart from those, `sample` chooses tokens from logits. R rows of a batch, V vocabulary. `fused_topk` and
`fused_experts` are the feed-forward of a mixture of experts: E experts of width F, n of them for each token.
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
SCALED = ("int8", *FLOAT8, "uint8")  # types of caches with scales


# `with linear_by(choice):` names the implementation of products that are traced inside, of those that it can do; the
# others, as of a head that is not quantized, stay with XLA. Part of the key under which JAX keeps what it has traced.
linear_by = jax.make_user_context(default_value=None)

# Likewise of the choice of experts, and of their products.
fused_topk_by, fused_experts_by = (jax.make_user_context(default_value=None) for _ in range(2))


class Norm(NamedTuple):
    """A norm by the root mean square: each number of a row over that, times its gain."""

    gain: Float[Array, " D"]
    eps: float  # added to the mean square
    is_plus_one: bool = False  # `gain` is the distance from one


class Written(NamedTuple):
    """What `write_kv` returns: queries that are rotated, and the caches with what is new."""

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
    """Rotate queries and keys, store keys and values at (blocks [T], offsets [T]), in place where caches are donated.

    `qkv` [T, A, C] holds each token's heads: those of queries, K of keys, K of values (none without a `v_cache`).
    `turn` are cosine and sine of the angles of F pairs, float32, the same for all heads: coordinates i and F + i of the
    first 2 F make a pair, or 2 i and 2 i + 1 where `is_interleaved`, of which the first ones come first in the result;
    None: nothing is rotated. Rotated in float32, rounded to the type of `qkv`, then to the cache's.

    What a vector with NaN is stored as, where there are scales, is not said.
    A token whose block is N or more is not stored. No block or offset may be negative: JAX counts those from the end.
    No two tokens may name the same place, not even one that is not stored.
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
    """Copy blocks `sources` [X] of the caches to `targets` [X] (copy on write), in place where caches are donated.

    Scales are copied as caches are, by a call of their own. A target of N or more is not written. No two targets may be
    equal, and no target may be another's source.
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
    batch_invariant: bool = False,
    implementation: str | Choice | None = None,
) -> Float[Array, "B H V"]:
    """Attend with one query per sequence, q [B, H, C], over its cached keys: [B, H, V] in q's type.

    Row b sits at position `lengths[b] - 1` and sees the positions up to its own (within `window` of them, itself
    included); its key at position p is in block `tables[b, p // P]` at offset p % P. A row of length 0 gives zeros.
    Table entries behind the length may be any block; what lies there, NaN included, is not seen.
    `scale` multiplies the scores, then `softcap` bounds them; `sinks` [H] are logits that take part in the softmax
    and carry no value (gpt-oss). Without a `v_cache`, a value is the first `value_size` coordinates of its key (and the
    two are not given both: a ValueError). `batch_invariant`: the bits of a row's result depend on no other row, which
    most implementations hold to in any case. `implementation` None picks by platform; an unknown name is a ValueError,
    and so is one that cannot do this here.
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
        batch_invariant=batch_invariant,
    )
    site = _site(q, k_cache, q.shape[1], value_size, softcap)
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
    implementation: str | Choice | None = None,
) -> Float[Array, "T H V"]:
    """Attend with a ragged run of queries, q [T, H, C], over cached keys, causally: [T, H, V] in q's type.

    Tile y is `tile_length[y]` (at most `tile`) consecutive queries of one sequence: those from `tile_start[y]` on,
    the first at position `tile_position[y]`, with keys (their own included, already stored) in the blocks
    `tables[y]`. A query sees the positions up to its own. Tiles must not overlap; a tile of length 0 is padding;
    queries in no tile give zeros. Otherwise as `paged_decode`.
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
    )
    tiles = Tiles(tile_start, tile_length, tile_position)
    site = _site(q, k_cache, q.shape[1], value_size, softcap)
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
    """Choose a token for each row of `logits`, float32, and say which rows hold neither infinity nor NaN.

    A row of temperature 0, and each where there is none, gets its likeliest token, the lowest id among equals. Another
    gets the largest sum of its logit over the temperature and Gumbel noise, which draws from the softmax. The noise of
    a token is a function of the row's key (of threefry2x32), its position and the token's id.

    Before that, filters one after another leave the tokens whose probability is at least `min_p` times the largest (0:
    off), the `top_k` largest (0, or V and more: off), and of those left the largest that together have `top_p` of what
    they all have (1: off); tokens equal to the last one left are left too. None is off for all rows.

    A token that is impossible has minus infinity. Where there is NaN or infinity, any token may come out.
    Implementations may differ where two sums, or a sum and a limit, differ in the last bits of float32.
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
    """Multiply the rows `x` [T, D] with a weight of O rows and D columns: [T, O] in float32, in which sums are made.

    `kind` says what the weight's numbers are: "float" as they are in `weight` [O, D]; of the others each is a number,
    less its zero in `zeros` where there are some, times its scale: "int8" and "float8" (e4m3) [O, D]; "int4" (of -8 to
    7, stored with 8 added) and "float4" (e2m1) two to a byte, [O, D / 2], the even column's in the lower half. G groups
    of as many neighbouring columns each have a scale for every row. Such a number may be rounded to the type of `x`.

    With `rounds_rows`, for "int8" of one group without zeros, each row of `x` is rounded to 8 bits as well: products
    are summed as integers, exactly up to 133,000 columns, and the scales of row and weight multiply the sum.
    With `rounds`, for "float" alone, XLA's product rounds each sum once, to the type of `x`, and writes that.
    `implementation` None takes what `linear_by` says, where that can do it, or else XLA's own products.
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
    """Multiply the rows `x` [T, D], normed where there is a `norm`, with a weight of floats: [T, O] in the type of `x`.

    Then add a `bias`. With an `activation` the weight is two, of O rows each, and the activation of the first product
    times the second is the result; otherwise it has O rows. A `residual` is added last. Sums are float32;
    implementations may round to the type of `x` in other places.
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
    """Choose the `per_token` experts of each token that a router scored highest: their numbers and weights, [T, n].

    Weights are the softmax or sigmoid of a token's `scores` [T, E], float32, those of the chosen divided by their sum
    where `is_normalised`, times `scale`. A `bias` [E], float32, counts in the choice and not in weights. Of equals the
    lowest is chosen first; NaN is above all.
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
    implementation: str | Choice | None = None,
) -> Float[Array, "T D"]:
    """Multiply each token of `x` [T, D] with the n experts that it chose, and weigh and sum the results: float32.

    `chosen` [T, n] are numbers below E, and `gates` [T, n] their weights. Of an expert, `up` has 2 F rows: the
    activation of the first F products multiplies the others; `down` has D. Each has a bias where there is one. With a
    `clamp` c the F numbers are instead g · σ(`clamp_slope` · g) · (u + 1), of g at most c and u from -c to c (gpt-oss).
    They are rounded to the type of `x`, sums are float32. Each result may be rounded to that type once it is weighed.
    """
    if up.shape[0] != down.shape[0] or up.shape[1] != 2 * down.shape[2]:
        raise ValueError(f"experts {up.shape} and {down.shape} do not fit: 2 F rows of D, and D rows of F")
    if not x.dtype == up.dtype == down.dtype:
        raise ValueError(f"tokens of {x.dtype} do not go with experts of {up.dtype} and {down.dtype}")
    static = {"activation": activation, "clamp": clamp, "clamp_slope": clamp_slope}
    arrays = (x, up, down, chosen, gates, up_bias, down_bias)
    return _dispatch("fused_experts", implementation, Site("", dtype=str(x.dtype)), static, arrays)


def _product_by(site: Site) -> str | Choice:
    """Return what `linear_by` says, or "xla" where that cannot do a product.

    Programs for a GPU are compiled where there is none, too: what was chosen says where it will run.
    """
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
    # The default backend may not be where this program will run; the lowering knows, and keeps one branch.
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


def _site(q: Array, k_cache: Array, heads: int, value_size: int | None, softcap: float | None = None) -> Site:
    """Describe arrays; where they are is not known yet."""
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
    )


def _here(site: Site) -> Site:
    """Put a site on this process's first device."""
    device = jax.devices()[0]
    return _on(site, device.platform, capability_of(device))


def _on(site: Site, platform: str, capability: int | None = None) -> Site:
    return dataclasses.replace(site, platform=platform, capability=capability)
