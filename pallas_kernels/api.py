"""The public operations on a paged key-value cache: what they mean, and which implementation runs.

A layer's cache is two arrays [N, K, P, C]: N blocks in the pool, K key-value heads, P tokens per block, C head size (V
that of the values). Where each value is the beginning of its key, as in latent attention, there is one array only.
Layout, writing and attention are owned together here. Scores, softmax and accumulation are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels import xla, xla_gather, xla_lanes

_IMPLEMENTATIONS: dict[str, dict[str, Callable[..., Array]]] = {
    "paged_decode": {
        "xla": xla.paged_decode,
        "xla_lanes": xla_lanes.paged_decode,
        "xla_gather": xla_gather.paged_decode,
    },
    "paged_prefill": {"xla": xla.paged_prefill, "xla_gather": xla_gather.paged_prefill},
}


def operations() -> tuple[str, ...]:
    """Name the operations that take an `implementation`."""
    return tuple(_IMPLEMENTATIONS)


def implementations(operation: str) -> tuple[str, ...]:
    """Name the implementations of an operation."""
    return tuple(_IMPLEMENTATIONS[operation])


def resolve(operation: str, platform: str) -> str:
    """Name the best implementation of `operation` on `platform` ("cpu", "gpu", ...)."""
    if operation not in _IMPLEMENTATIONS:
        raise ValueError(f"{operation!r} is not one of {', '.join(_IMPLEMENTATIONS)}")
    if operation == "paged_decode" and platform == "cpu":
        return "xla_lanes"
    # The page loop stops at the longest sequence. On a GPU its `while` leaves the CUDA graph, but gathering whole
    # tables instead takes memory for rows × context: 128 GiB for an 8B model at 256 × 131,072 (DECISIONS 12).
    return "xla"


def write_kv(
    k_cache: Float[Array, "N K P C"],
    v_cache: Float[Array, "N K P V"] | None,
    k: Float[Array, "T K C"],
    v: Float[Array, "T K V"] | None,
    blocks: Int[Array, " T"],
    offsets: Int[Array, " T"],
) -> tuple[Float[Array, "N K P C"], Float[Array, "N K P V"] | None]:
    """Store k and v [T, K, C] at (blocks [T], offsets [T]) of the caches [N, K, P, C]; in place when those are donated.

    `v_cache` and `v` are None where there are no values of their own.

    A token whose block is N or more is not stored. No block or offset may be negative: JAX counts those from the end.
    No two tokens may name the same place, not even one that is not stored.
    """

    def store(cache: Array, new: Array) -> Array:
        return cache.at[blocks, :, offsets].set(new.astype(cache.dtype), mode="drop", unique_indices=True)

    if v_cache is None or v is None:
        if v_cache is not v:
            raise ValueError("a cache of values and new values go together, or there are neither")
        return store(k_cache, k), None
    return store(k_cache, k), store(v_cache, v)


def paged_decode(
    q: Float[Array, "B H C"],
    k_cache: Float[Array, "N K P C"],
    v_cache: Float[Array, "N K P V"] | None,
    tables: Int[Array, "B M"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " H"] | None = None,
    value_size: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "B H V"]:
    """Attend with one query per sequence, q [B, H, C], over its cached keys: [B, H, V] in q's type.

    Row b sits at position `lengths[b] - 1` and sees the positions up to its own (within `window` of them, itself
    included); its key at position p is in block `tables[b, p // P]` at offset p % P. A row of length 0 gives zeros.
    Table entries behind the length may be any block; what lies there, NaN included, is not seen.
    `scale` multiplies the scores, then `softcap` bounds them; `sinks` [H] are logits that take part in the softmax
    and carry no value (gpt-oss). Without a `v_cache`, a value is the first `value_size` coordinates of its key (and the
    two are not given both: a ValueError). `implementation` None picks by platform; an unknown name is a ValueError.
    """
    _check_heads(q, k_cache, v_cache, value_size)
    static = {"scale": scale, "window": window, "softcap": softcap, "value_size": value_size}
    return _dispatch("paged_decode", implementation, static, (q, k_cache, v_cache, tables, lengths, sinks))


def paged_prefill(
    q: Float[Array, "T H C"],
    k_cache: Float[Array, "N K P C"],
    v_cache: Float[Array, "N K P V"] | None,
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
    implementation: str | None = None,
) -> Float[Array, "T H V"]:
    """Attend with a ragged run of queries, q [T, H, C], over cached keys, causally: [T, H, V] in q's type.

    Tile y is `tile_length[y]` (at most `tile`) consecutive queries of one sequence: those from `tile_start[y]` on,
    the first at position `tile_position[y]`, with keys (their own included, already stored) in the blocks
    `tables[y]`. A query sees the positions up to its own. Tiles must not overlap; a tile of length 0 is padding;
    queries in no tile give zeros. Otherwise as `paged_decode`.
    """
    _check_heads(q, k_cache, v_cache, value_size)
    static = {"tile": tile, "scale": scale, "window": window, "softcap": softcap, "value_size": value_size}
    arrays = (q, k_cache, v_cache, tables, tile_start, tile_length, tile_position, sinks)
    return _dispatch("paged_prefill", implementation, static, arrays)


def _dispatch(
    operation: str, implementation: str | None, static: dict[str, Any], arrays: tuple[Array | None, ...]
) -> Array:
    known = _IMPLEMENTATIONS[operation]
    arrays = jax.tree.map(jnp.asarray, arrays)
    if implementation is None:
        # The default backend may not be where this program will run; the lowering knows, and keeps one branch.
        return lax.platform_dependent(
            *arrays,
            cpu=lambda *operands: known[resolve(operation, "cpu")](*operands, **static),
            default=lambda *operands: known[resolve(operation, "gpu")](*operands, **static),
        )
    if implementation not in known:
        raise ValueError(f"{operation} has no implementation {implementation!r}; it has {', '.join(known)}")
    return known[implementation](*arrays, **static)


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
    if not jnp.issubdtype(k_cache.dtype, jnp.floating):
        raise ValueError(f"the cache must hold floats, not {k_cache.dtype}")
