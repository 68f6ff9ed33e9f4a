"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", §2.1).

Only a latent and one rotated key part per token are cached: queries are multiplied with the key matrix, heads attend to
latents as in multi-query attention, and the result is multiplied with the value matrix.

N plain and R rotated coordinates of a head, V of a value, K of a latent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxllm.model import layers
from jaxllm.model.parameters import Comb, Part, Weight
from jaxllm.model.spec import Latent, Rope, Spec
from pallas_kernels import rotate

_NORM_EPS = 1e-6  # of latent norms in modeling_deepseek.py


def declare(spec: Spec, latent: Latent) -> dict[str, Weight]:
    """Return a layer's weights, except the output product and the first norm."""
    heads, width = spec.num_heads, spec.width
    rows = heads * (latent.plain_size + latent.rope_size)
    keys, values = heads * latent.plain_size, heads * latent.value_size
    short = latent.rank + latent.rope_size
    period = latent.plain_size + latent.value_size
    of_keys, of_values = Comb(0, latent.plain_size, period), Comb(latent.plain_size, latent.value_size, period)
    weights = {
        "latent": Weight((short, width), (None, "width"), (Part("latent", short),), is_product=True),
        "latent_norm": Weight((latent.rank,), (None,), (Part("latent_norm", latent.rank),), "ones"),
        # In one tensor, by head; separate here, so that products need no slices.
        "key": Weight((keys, latent.rank), ("heads", None), (Part("key", keys, comb=of_keys),)),
        "value": Weight((values, latent.rank), ("heads", None), (Part("value", values, comb=of_values),)),
    }
    if latent.q_rank is None:
        weights["q"] = Weight((rows, width), ("heads", "width"), (Part("q", rows),), is_product=True)
    else:
        weights["q_latent"] = Weight(
            (latent.q_rank, width), (None, "width"), (Part("q_latent", latent.q_rank),), is_product=True
        )
        weights["q_norm"] = Weight((latent.q_rank,), (None,), (Part("q_norm", latent.q_rank),), "ones")
        weights["q"] = Weight((rows, latent.q_rank), ("heads", None), (Part("q_up", rows),), is_product=True)
    return weights


def project(
    latent: Latent,
    weights: dict[str, Any],
    x: Array,
    turn: tuple[Array, Array],
    rope: Rope,
    linear: Callable[..., Array],
) -> tuple[Array, Array]:
    """Return queries [T, H, K + R] and the key [T, 1, K + R], whose first K coordinates are the latent, also the
    value.
    """
    short = linear("latent", x, weights["latent"]).astype(x.dtype)  # [T, K + R]
    values = layers.norm(short[:, : latent.rank], weights["latent_norm"], None, "rms", _NORM_EPS)
    turned = rotate(short[:, None, latent.rank :], *turn, rope.is_interleaved)  # [T, 1, R]
    key = jnp.concatenate([values[:, None], turned], axis=-1)

    if latent.q_rank is not None:
        x = linear("q_latent", x, weights["q_latent"]).astype(x.dtype)
        x = layers.norm(x, weights["q_norm"], None, "rms", _NORM_EPS)
    q = linear("q", x, weights["q"]).astype(x.dtype)
    q = q.reshape(len(x), -1, latent.plain_size + latent.rope_size)  # [T, H, N + R]
    matrix = weights["key"].reshape(-1, latent.plain_size, latent.rank)  # [H, N, K]
    absorbed = jnp.einsum("thn,hnk->thk", q[..., : latent.plain_size], matrix, preferred_element_type=jnp.float32)
    turned = rotate(q[..., latent.plain_size :], *turn, rope.is_interleaved)
    return jnp.concatenate([absorbed.astype(x.dtype), turned], axis=-1), key


def expand(latent: Latent, weights: dict[str, Any], mixed: Array) -> Array:
    """Convert mixed latents [T, H, K] to values [T, H · V]."""
    matrix = weights["value"].reshape(-1, latent.value_size, latent.rank)  # [H, V, K]
    values = jnp.einsum("thk,hvk->thv", mixed, matrix, preferred_element_type=jnp.float32)
    return values.astype(mixed.dtype).reshape(len(mixed), -1)
