"""Our decoder with a paged cache, one sequence at a time, without an engine.

The cache starts as NaN and blocks are allocated in random order, so that reading an unwritten place or another
sequence's block is detected.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from jaxllm.checkpoints import weights
from jaxllm.families.families import read_spec
from jaxllm.model import decoder, sharding
from jaxllm.model.spec import Spec, heads_per_shard

BLOCK_TOKENS = 4
TILE = 16


class Driver:
    """A model and the cache of one sequence of at most `max_tokens` tokens."""

    def __init__(
        self,
        spec: Spec,
        params: decoder.Params[jax.Array],
        layout: sharding.Layout,
        max_tokens: int,
        implementation: str | None,
    ) -> None:
        self._spec, self._params, self._layout, self._implementation = spec, params, layout, implementation
        blocks = -(-max_tokens // BLOCK_TOKENS)
        self._table = jnp.asarray(np.random.default_rng(5).permutation(blocks + 3)[:blocks], jnp.int32)
        shards = layout.shards("kv_heads")
        heads = heads_per_shard(spec, shards)[1] * shards
        dtype = params.top["embed"].dtype
        empty = np.full((blocks + 3, heads, BLOCK_TOKENS, spec.head_size), np.nan, dtype)
        axes = ("blocks", "kv_heads", None, "head")
        self._caches = [
            (
                jax.device_put(empty, layout.sharding(*axes)),
                jax.device_put(empty, layout.sharding(*axes)) if spec.latent is None else None,
            )
            for _ in range(spec.num_layers)
        ]
        places = jax.tree.map(lambda weight: layout.spec(*weight.axes), decoder.declare(spec, layout))
        cache, whole = layout.spec(*axes), layout.spec()
        self._step = jax.jit(
            layout.shard_map(self._on_shard, (places, cache, whole, whole), (layout.spec(None, "vocab"), cache)),
            compiler_options={"xla_backend_optimization_level": 0},  # compiles in two thirds of the time, and runs once
        )
        self._length = 0

    def run(self, tokens: list[int]) -> np.ndarray:
        """Append tokens to the sequence; return their logits [T, V]."""
        positions = np.arange(self._length, self._length + len(tokens), dtype=np.int32)
        self._length += len(tokens)
        logits, self._caches = self._step(self._params, self._caches, np.asarray(tokens, np.int32), positions)
        return np.asarray(logits)[:, : self._spec.vocab_size]

    def _on_shard(self, params, caches, tokens, positions):
        caches = list(caches)
        blocks, offsets = self._table[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS
        options = {
            "scale": self._spec.attention_scale,
            "softcap": self._spec.attention_softcap,
            "value_size": self._spec.latent.rank if self._spec.latent else None,
            "implementation": self._implementation,
        }

        def attend(layer, heads, window, sinks):
            layer_options = options | {"window": window, "sinks": sinks}
            turning = {"turn": heads.turn, "is_interleaved": heads.is_interleaved}
            q, *written = pallas_kernels.write_kv(heads.qkv, *caches[layer], blocks, offsets, **turning)
            caches[layer] = tuple(written[:2])
            if len(tokens) == 1:
                return pallas_kernels.paged_decode(q, *caches[layer], self._table[None], positions + 1, **layer_options)
            start = jnp.arange(0, len(tokens), TILE, dtype=jnp.int32)
            tables = jnp.broadcast_to(self._table, (len(start), len(self._table)))
            length = jnp.minimum(TILE, len(tokens) - start)
            return pallas_kernels.paged_prefill(
                q, *caches[layer], tables, start, length, positions[start], tile=TILE, **layer_options
            )

        hidden = decoder.forward(self._spec, params, tokens, decoder.Context(positions, attend, layout=self._layout))
        return decoder.head(self._spec, params, hidden), caches


def generate(
    folder: Path, prompt: list[int], steps: int, shards: int = 1, implementation: str | None = None
) -> tuple[np.ndarray, list[int]]:
    """Load a folder in float32 and decode greedily; return the logits of all positions but the last, and the tokens."""
    layout = sharding.make_layout(jax.devices("cpu"), shards)
    spec, family = read_spec(weights.read_config(folder))
    params = weights.load(folder, spec, family, layout, "float32")
    return decode_greedily(Driver(spec, params, layout, len(prompt) + steps, implementation), prompt, steps)


def decode_greedily(driver: Driver, prompt: list[int], steps: int) -> tuple[np.ndarray, list[int]]:
    """Run a prompt and `steps` further tokens; return the logits [prompt + steps - 1, V] and the tokens."""
    logits = [driver.run(prompt)]
    tokens = [int(logits[-1][-1].argmax())]
    while len(tokens) < steps:
        logits.append(driver.run(tokens[-1:]))
        tokens.append(int(logits[-1][-1].argmax()))
    return np.concatenate(logits), tokens
