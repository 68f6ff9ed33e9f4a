"""Products of a step whose rows have different adapters, for one shard of the axis "tp".

Of each adapter two thin products stand beside the weight's own: x·Aᵀ, where rows of others become zero, and that times
Bᵀ. So a row without an adapter gets exact zeros added. Where A is divided along its columns (`out`, `down`), the sums
are of a shard, and the sum over shards that follows the weight's own product covers them: no collective is added.

Letters: T tokens, r rank, U adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax, named_scope

import pallas_kernels
from jaxllm.model import layers
from jaxllm.model.decoder import Linear
from jaxllm.model.lora import Adapter, Pair

Pairs = tuple[Pair[Array], ...]  # of one product, by adapter


def adapted_linear(adapters: Sequence[Adapter[Array]], token_adapter: Array, joins: bool) -> Linear:
    """Return the product of a layer's weights for tokens with adapters.

    `token_adapter`, int32[T], is the number among `adapters` of each token's, or U where it has none. With `joins`
    the factors of all adapters are put together first: fewer and larger products for a copy of the factors, which is
    what a GPU is fast at. On a CPU the copy costs more than it saves (DECISIONS 102).
    """

    def linear(layer: int, name: str, *product: Any) -> Array:
        own = layers.linear(*product)
        pairs = tuple(adapter[layer][name] for adapter in adapters if name in adapter[layer])
        if not pairs:
            return own
        with named_scope("adapters"):
            delta = _delta(product[0], token_adapter, pairs, joins)
            if joins or not pallas_kernels.is_turned_on_a_cpu(product[0]):
                return own + delta
            # Added as they lie, and turned once: turning each took 2 ms of a step of 16 rows of the 0.5B shape.
            return lax.optimization_barrier(own.T + delta.T).T

    return linear


@partial(jax.jit, static_argnames=("joins",))
def _delta(x: Array, token_adapter: Array, pairs: Pairs, joins: bool) -> Array:
    """Sum what the adapters add to a product: [T, out] in float32."""
    owned = [(token_adapter == number)[:, None] for number in range(len(pairs))]
    if joins:
        rank, parts = pairs[0].b[0].shape[1], len(pairs[0].b)
        pairs = (_joined(pairs),)
        owned = [jnp.tile(jnp.repeat(jnp.concatenate(owned, axis=1), rank, axis=1), parts)]  # [T, parts U r]
    inner = [
        jnp.where(own, layers.linear(x, pair.a), 0).astype(x.dtype) for pair, own in zip(pairs, owned, strict=True)
    ]
    outs = [
        reduce(add, (_of_part(own, pair, part) for own, pair in zip(inner, pairs, strict=True)))
        for part in range(len(pairs[0].b))
    ]
    # Side by side. Few rows of float32 are computed the other way round (layers.py), and stay so until they are added
    # to the weight's own product: turned one by one they took 8 ms of a step of 16 rows of the 0.5B shape.
    return outs[0] if len(outs) == 1 else jnp.concatenate([out.T for out in outs]).T


def _of_part(inner: Array, pair: Pair[Array], part: int) -> Array:
    """Multiply the columns of a part with its B."""
    rank = pair.b[part].shape[1]
    return layers.linear(lax.slice_in_dim(inner, part * rank, (part + 1) * rank, axis=1), pair.b[part])


def _joined(pairs: Pairs) -> Pair[Array]:
    """Put the factors of adapters together as those of one whose rank is the sum of theirs."""
    parts, columns = len(pairs[0].b), pairs[0].a.shape[1]
    a = jnp.stack([pair.a.reshape(parts, -1, columns) for pair in pairs], axis=1)  # [parts, U, r, in]
    b = (jnp.concatenate(each, axis=1) for each in zip(*(pair.b for pair in pairs), strict=True))
    return Pair(a.reshape(-1, columns), tuple(b))
