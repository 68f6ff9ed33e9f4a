"""Products with a different LoRA adapter per row, for one shard of the axis "tp".

Where A is sharded by columns, the all-reduce after the base product covers both. r rank, U adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

Pairs = tuple[Pair[Array], ...]  # one product, by adapter


@dataclass(frozen=True)
class AdapterWeights:
    """Implements `RowWeights` with LoRA adapters."""

    described: Adapter[jax.ShapeDtypeStruct]
    joins: bool

    def linear(self, sets: Sequence[Adapter[Array]], token_set: Array) -> Linear:
        return adapted_linear(sets, token_set, self.joins)


def adapted_linear(adapters: Sequence[Adapter[Array]], token_adapter: Array, joins: bool) -> Linear:
    """Return `Linear` with adapters; `token_adapter`, int32[T], indexes `adapters`, U for no adapter.

    `joins` concatenates all adapters' factors: faster on a GPU, not on a CPU (DECISIONS, "Adapters are arguments of a
    step").
    """

    def linear(layer: int, name: str, *product: Any) -> Array:
        base = layers.linear(*product)
        pairs = tuple(adapter[layer][name] for adapter in adapters if name in adapter[layer])
        if not pairs:
            return base
        with named_scope("adapters"):
            delta = _delta(product[0], token_adapter, pairs, joins)
            if joins or not pallas_kernels.is_turned_on_a_cpu(product[0]):
                return base + delta
            # Separate transposes took 2 ms of a step of 16 rows of the 0.5B shape.
            return lax.optimization_barrier(base.T + delta.T).T

    return linear


@partial(jax.jit, static_argnames=("joins",))
def _delta(x: Array, token_adapter: Array, pairs: Pairs, joins: bool) -> Array:
    """Return the adapters' sum for a product, float32 [T, out]."""
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
    # Few rows are computed transposed on a CPU: transposing each took 8 ms of a step of 16 rows of the 0.5B shape.
    return outs[0] if len(outs) == 1 else jnp.concatenate([out.T for out in outs]).T


def _of_part(inner: Array, pair: Pair[Array], part: int) -> Array:
    rank = pair.b[part].shape[1]
    return layers.linear(lax.slice_in_dim(inner, part * rank, (part + 1) * rank, axis=1), pair.b[part])


def _joined(pairs: Pairs) -> Pair[Array]:
    parts, columns = len(pairs[0].b), pairs[0].a.shape[1]
    a = jnp.stack([pair.a.reshape(parts, -1, columns) for pair in pairs], axis=1)  # [parts, U, r, in]
    b = (jnp.concatenate(each, axis=1) for each in zip(*(pair.b for pair in pairs), strict=True))
    return Pair(a.reshape(-1, columns), tuple(b))
