"""A program that computes how much each output token of a speech model attends to each moment of its sound.

It reads a whole output at once, with the keys and values of its source, which are in the decoder's cache. Letters: A
heads that follow the sound, T tokens, L positions of the encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import named_scope

from jaxllm.model import decoder
from jaxllm.model.decoder import Heads
from jaxllm.runner.step_model import Leaves, StepModel, products_of
from jaxllm.setup.model_setup import Setup


class Aligner:
    """Computes attention weights."""

    def __init__(self, setup: Setup, heads: Sequence[tuple[int, int]]) -> None:
        self._setup = setup
        self._heads = heads
        self._program: Any = None

    @classmethod
    def of(cls, setup: Setup) -> Aligner | None:
        """Return the aligner of a model whose generation_config.json names `alignment_heads` (layer and head each).

        None without them, and where a device has a part of the heads or a cache of 8 bits.
        """
        given, spec = setup.generation_config.get("alignment_heads"), setup.spec
        if not isinstance(given, list) or setup.layout.shards("heads") > 1 or setup.cache_dtype != setup.dtype:
            return None
        heads = [tuple(pair) for pair in given if isinstance(pair, list) and list(map(type, pair)) == [int, int]]
        fits = all(0 <= layer < spec.num_layers and 0 <= head < spec.num_heads for layer, head in heads)
        return cls(setup, heads) if heads and fits and len(heads) == len(given) else None

    def compile(self, make: Callable[..., Any], model: StepModel, kv: Leaves) -> None:
        """Compile the program with `make` (name, function, donated, shapes)."""
        params, size = tuple(jax.tree.leaves(model.params)), model.geometry.max_model_len
        assert model.state.sources is not None
        width = size + 1 + model.state.sources.shape[1]
        buffer = jax.ShapeDtypeStruct((width,), jnp.int32, sharding=model.layout.sharding())
        self._size, self._width = size, width
        self._program = make("align", self._build(model), (), params, kv, buffer)

    @property
    def temporary_bytes(self) -> int:
        found = self._program.memory_analysis()
        return found.temp_size_in_bytes + found.output_size_in_bytes

    def weights(self, params: Leaves, kv: Leaves, tokens: Sequence[int], blocks: Sequence[int]) -> np.ndarray:
        """Return each token's weights, float32[A, T, L]; waits for the device."""
        buffer = np.zeros(self._width, np.int32)
        buffer[: len(tokens)] = tokens
        buffer[self._size + 1 : self._size + 1 + len(blocks)] = blocks
        return np.asarray(self._program(params, kv, buffer))[:, : len(tokens)]

    def _build(self, model: StepModel) -> Callable[..., jax.Array]:
        setup, size, chosen = self._setup, self._size, self._heads
        spec, length = setup.spec, setup.max_source
        trees = [jax.tree.structure(tree) for tree in (model.params, model.state.kv)]

        def on_shard(params_leaves: Leaves, kv_leaves: Leaves, buffer: jax.Array) -> jax.Array:
            given = zip(trees, (params_leaves, kv_leaves), strict=True)
            params, kv = (jax.tree.unflatten(tree, leaves) for tree, leaves in given)
            tokens, blocks = buffer[:size], buffer[size + 1 :]
            found: dict[tuple[int, int], jax.Array] = {}
            places = jnp.arange(size, dtype=jnp.int32)

            def attend(layer: int, heads: Heads, window: int | None, sinks: jax.Array | None) -> jax.Array:
                q, k, v = jnp.split(heads.qkv, (spec.num_heads, spec.num_heads + spec.num_kv_heads), axis=1)
                is_seen = places[:, None] >= places
                return _mixed(_weights(q, k, spec.attention_scale, is_seen), v).astype(heads.qkv.dtype)

            def cross(layer: int, q: jax.Array) -> jax.Array:
                k, v = (_of_blocks(each, blocks)[:length] for each in (kv[layer].keys, kv[layer].values))
                weights = _weights(q, k, spec.attention_scale)
                found.update({(layer, head): weights[head] for own, head in chosen if own == layer})
                return _mixed(weights, v).astype(q.dtype)

            context = decoder.Context(places, attend, layout=model.layout, cross=cross)
            with products_of(model), named_scope("align"):
                x = decoder.embed(spec, params, tokens, context)
                decoder.run_layers(spec, params, x, context, 0, 1 + max(layer for layer, _ in chosen))
            return jnp.stack([found[pair] for pair in chosen])

        on_shard.__name__ = "align"
        specs = [tuple(leaf.sharding.spec for leaf in jax.tree.leaves(tree)) for tree in (model.params, model.state.kv)]
        return model.layout.shard_map(on_shard, (*specs, model.layout.spec()), model.layout.spec())


def _weights(q: jax.Array, k: jax.Array, scale: float, is_seen: jax.Array | None = None) -> jax.Array:
    """Return attention weights, float32[H, T, S], of queries [T, H, C] and keys [S, H, C]."""
    scores = jnp.einsum("thc,shc->hts", q, k, preferred_element_type=jnp.float32) * scale
    return jax.nn.softmax(scores if is_seen is None else jnp.where(is_seen, scores, -jnp.inf), axis=-1)


def _mixed(weights: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("hts,shc->thc", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)


def _of_blocks(cache: jax.Array, blocks: jax.Array) -> jax.Array:
    """Return the vectors of blocks, [·, K, C], of a cache [N, K, P, C]."""
    found = cache.at[blocks].get(mode="clip")
    return found.transpose(0, 2, 1, 3).reshape(-1, found.shape[1], found.shape[3])
