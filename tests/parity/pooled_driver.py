"""Our decoder over one whole prompt at a time with the simplest attention, as reference for pooling."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.checkpoints import pooler_files, weights
from jaxllm.families.families import read_spec
from jaxllm.model import decoder, layers, sharding
from jaxllm.model import pooler as pooling
from jaxllm.model.pooler import Pooler
from jaxllm.model.spec import Spec
from pallas_kernels import rotate


class PooledDriver:
    """The model of a folder in float32, on `shards` devices."""

    def __init__(self, folder: Path, shards: int = 1, **options: Any) -> None:
        config = weights.read_config(folder)
        self.spec, family = read_spec(config)
        pooler = pooler_files.read_pooler(folder, config, self.spec, family, **options)
        assert pooler is not None
        self.pooler: Pooler = pooler
        layout = sharding.make_layout(jax.devices("cpu"), shards)
        self._params = weights.load(folder, self.spec, family, layout, "float32", head=pooler)
        declared = decoder.declare(self.spec, layout, head=pooler)
        places = jax.tree.map(lambda weight: layout.spec(*weight.axes), declared)
        whole = layout.spec()
        self._run = jax.jit(
            layout.shard_map(partial(_on_shard, self.spec, pooler, layout), (places, whole, whole), (whole, whole)),
            compiler_options={"xla_backend_optimization_level": 0},
        )

    def run(self, tokens: list[int], token_types: list[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the hidden states [T, D] and the result [W] of a prompt, without truncation, activation or
        normalization.
        """
        types = np.zeros(len(tokens), np.int32) if token_types is None else np.asarray(token_types, np.int32)
        hidden, result = self._run(self._params, np.asarray(tokens, np.int32), types)
        return np.asarray(hidden), np.asarray(result)[0]

    def embed(self, tokens: list[int]) -> np.ndarray:
        """Return the embedding of a prompt."""
        _, result = self.run(tokens)
        return result / np.linalg.norm(result) if self.pooler.normalize else result


def _on_shard(spec: Spec, pooler: Pooler, layout: sharding.Layout, params, tokens, token_types):
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    distance = positions - positions[:, None]  # from each query to each key

    def attend(layer, heads, window, sinks):
        qkv = heads.qkv
        key_heads = qkv.shape[1] * spec.num_kv_heads // (spec.num_heads + 2 * spec.num_kv_heads)
        q, k, v = jnp.split(qkv, (qkv.shape[1] - 2 * key_heads, qkv.shape[1] - key_heads), axis=1)
        if heads.turn is not None:
            q, k = (rotate(one, *heads.turn, heads.is_interleaved) for one in (q, k))
        k, v = (jnp.repeat(one, q.shape[1] // key_heads, axis=1) for one in (k, v))
        scores = layers.softcap(jnp.einsum("qhc,khc->hqk", q, k) * spec.attention_scale, spec.attention_softcap)
        if spec.relative_buckets:
            table = params.top["relative_bias"]
            scores += layers.relative_bias(table, len(tokens), spec.relative_buckets, spec.relative_distance)
        seen = jnp.ones_like(distance, bool) if window is None else jnp.abs(distance) < window
        if spec.is_causal:
            seen &= distance <= 0
        return jnp.einsum("hqk,khc->qhc", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v)

    context = decoder.Context(positions, attend, layout=layout, token_types=token_types)
    hidden = decoder.forward(spec, params, tokens, context)
    pooled = {"cls": hidden[:1], "last": hidden[-1:], "mean": jnp.mean(hidden, axis=0, keepdims=True)}[pooler.pooling]
    return hidden, pooling.apply(pooler, params.top, pooled)
