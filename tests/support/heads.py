"""Queries, keys and values from a decoder's `Heads`, for an attention without a cache."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jaxllm.model.decoder import Heads
from pallas_kernels import rotate


def apart(heads: Heads, num_heads: int) -> tuple[Array, Array, Array]:
    """Return the rotated queries of `num_heads` heads, the keys, and the values."""
    kv_heads = (heads.qkv.shape[1] - num_heads) // 2
    q, k, v = jnp.split(heads.qkv, (num_heads, num_heads + kv_heads), axis=1)
    if heads.turn is not None:
        q, k = (rotate(one, *heads.turn, heads.is_interleaved) for one in (q, k))
    return q, k, v
