"""Programs that write a source's encoded keys and values into blocks of the decoder's cache before a step.

L tokens of a program, Ms blocks of the longest source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import named_scope

import pallas_kernels
from jaxllm.model import decoder, spectrogram
from jaxllm.model.decoder import Params
from jaxllm.runner.alignment import Aligner
from jaxllm.runner.device_state import DeviceState, leaf_index
from jaxllm.runner.encoder_weights import EncoderWeights
from jaxllm.runner.pooling import attention_in_bins
from jaxllm.runner.step_model import Leaves, StepModel, products_of
from jaxllm.setup.kv_cache import KvLayer
from jaxllm.setup.model_setup import Setup, declare_encoder, describe_encoder

PLACED = 16  # slots per call of `place`
SHORTEST = 32  # tokens


class NewSource(NamedTuple):
    """A source to encode."""

    content: np.ndarray  # tokens, int32[·], or a spectrogram, float32[M, F]
    blocks: Sequence[int]
    num_cached: int  # blocks at the beginning that have their content


class Placed(NamedTuple):
    """The source of an admitted sequence."""

    slot: int
    num_tokens: int
    blocks: Sequence[int]


class SourceInputs(NamedTuple):
    """Sources of a plan."""

    new: Sequence[NewSource]
    placed: Sequence[Placed]


class SourceEncoder(EncoderWeights):
    """Encodes sources into the state's cache; blocks are those of scheduler/sources.py."""

    def __init__(self, setup: Setup) -> None:
        assert setup.encoder is not None
        self._spec, tensors, self._num_mels = setup.encoder
        super().__init__(setup, declare_encoder(setup), tensors)
        self.max_tokens = setup.max_source
        # More than a step's tokens would delay other requests.
        self.budget = max(setup.max_num_batched_tokens, self.max_tokens)
        self._programs: dict[int, Any] = {}  # ascending
        self._place: Any = None
        self.aligner = Aligner.of(setup) if self._num_mels else None

    def compile(self, make: Callable[..., Any], model: StepModel) -> None:
        """Compile the programs with `make` (name, function, donated, shapes)."""
        state: DeviceState[jax.ShapeDtypeStruct] = model.state
        everywhere = model.layout.sharding()
        self._model, self._kv_at = model, leaf_index(state, "kv")
        self._sources_at = leaf_index(state, "sources")
        kv, own, params = (
            tuple(jax.tree.leaves(tree)) for tree in (state.kv, describe_encoder(self._setup), model.params)
        )
        self._num_kv = len(kv)
        for length in [self.max_tokens] if self._num_mels else lengths(self.max_tokens):
            buffer = jax.ShapeDtypeStruct((1 + length,), jnp.int32, sharding=everywhere)
            name = f"encode_source_{length}"
            run = self._build(name, length)
            content = jax.ShapeDtypeStruct((length,), jnp.int32, sharding=everywhere)
            if self._num_mels:
                content = jax.ShapeDtypeStruct((self._num_mels, 2 * length), jnp.float32, sharding=everywhere)
            self._programs[length] = make(name, run, (2,), params, own, kv, buffer, content)
        assert state.sources is not None
        changes = jax.ShapeDtypeStruct((PLACED, 1 + state.sources.shape[1]), jnp.int32, sharding=everywhere)
        self._place = make("place_sources", place, (0,), state.sources, changes)
        if self.aligner is not None:
            self.aligner.compile(make, model, kv)

    @property
    def temporary_bytes(self) -> int:
        own = max(each.memory_analysis().temp_size_in_bytes for each in self._programs.values())
        return own if self.aligner is None else max(own, self.aligner.temporary_bytes)

    def prepare(self, params: Leaves, state: Leaves, given: SourceInputs) -> Leaves:
        """Dispatch a plan's changes, and return the next state; `params` are the decoder's weights."""
        leaves, kv = list(state), slice(self._kv_at, self._kv_at + self._num_kv)
        for new in given.new:
            length, *inputs = self._pack(new)
            leaves[kv] = self._programs[length](params, self._params, tuple(leaves[kv]), *inputs)
        for start in range(0, len(given.placed), PLACED):
            sources = leaves[self._sources_at]
            changes = np.zeros((PLACED, 1 + sources.shape[1]), np.int32)
            changes[:, 0] = len(sources)
            for row, each in zip(changes, given.placed[start : start + PLACED], strict=False):
                row[:2] = each.slot, each.num_tokens
                row[2 : 2 + len(each.blocks)] = each.blocks
            leaves[self._sources_at] = self._place(sources, changes)
        return tuple(leaves)

    def weights(self, params: Leaves, state: Leaves, tokens: Sequence[int], blocks: Sequence[int]) -> np.ndarray:
        """Return the attention of tokens to a source in the cache; see `Aligner.weights`."""
        assert self.aligner is not None
        return self.aligner.weights(params, tuple(state[self._kv_at : self._kv_at + self._num_kv]), tokens, blocks)

    def _pack(self, new: NewSource) -> tuple[int, np.ndarray, np.ndarray]:
        """Return a program's length, buffer (number of tokens, each one's block) and content."""
        count, size = self.max_tokens if self._num_mels else len(new.content), self._model.geometry.block_size
        length = next(length for length in self._programs if length >= count)
        buffer, content = np.zeros(1 + length, np.int32), new.content
        if not self._num_mels:
            content = np.zeros(length, np.int32)
            content[:count] = new.content
        buffer[0] = count
        # Padding and cached blocks have distinct indices out of bounds: the scatter assumes unique ones.
        blocks = self._model.geometry.num_blocks + np.arange(length)
        first = new.num_cached * size
        blocks[first:count] = np.repeat(np.asarray(new.blocks, np.int32), size)[first:count]
        buffer[1:] = blocks
        return length, buffer, content

    def _build(self, name: str, length: int) -> Callable[..., Leaves]:
        """Return a function of flat tuples: (decoder's weights, encoder's, KV leaves, buffer, content) -> KV leaves."""
        model = self._model
        described = model.params, describe_encoder(self._setup), model.state.kv
        trees = [jax.tree.structure(tree) for tree in described]

        def on_shard(
            params_leaves: Leaves, own_leaves: Leaves, kv_leaves: Leaves, buffer: jax.Array, content: jax.Array
        ) -> Leaves:
            given = zip(trees, (params_leaves, own_leaves, kv_leaves), strict=True)
            params, own, kv = (jax.tree.unflatten(tree, leaves) for tree, leaves in given)
            own = replace(own, top={"embed": params.top["embed"], **own.top})
            with products_of(model):
                encoded = self._encode(own, content, length, buffer[0])
                written = [self._write(params, layer, cache, encoded, buffer[1:]) for layer, cache in enumerate(kv)]
            return tuple(jax.tree.leaves(written))

        on_shard.__name__ = name
        specs = [tuple(leaf.sharding.spec for leaf in jax.tree.leaves(tree)) for tree in described]
        return model.layout.shard_map(on_shard, (*specs, model.layout.spec(), model.layout.spec()), specs[2])

    def _encode(self, params: Params[jax.Array], content: jax.Array, length: int, count: jax.Array) -> jax.Array:
        """Return the encoder's output, [L, D]; arbitrary from `count` on."""
        layout = self._setup.layout
        places = jnp.arange(length, dtype=jnp.int32)
        attend = attention_in_bins(self._spec, layout, params, length, (places >= count).astype(jnp.int32))
        with named_scope("encoder"):
            context = decoder.Context(places, attend, layout=layout)
            if not self._num_mels:
                return decoder.forward(self._spec, params, content, context)
            x = decoder.run_layers(self._spec, params, spectrogram.embed(params.top, content), context)
            return decoder.final_norm(self._spec, params, x)

    def _write(
        self,
        params: Params[jax.Array],
        layer: int,
        cache: KvLayer[jax.Array],
        encoded: jax.Array,
        blocks: jax.Array,
    ) -> KvLayer[Any]:
        model = self._model
        with named_scope(f"layer_{layer:02}/cross"):
            heads = decoder.cross_heads(model.spec, params.layers[layer], encoded, model.layout)
            _, *written = pallas_kernels.write_kv(
                heads,
                cache.keys,
                cache.values,
                blocks,
                jnp.arange(len(encoded), dtype=jnp.int32) % model.geometry.block_size,
                k_scales=cache.k_scales,
                v_scales=cache.v_scales,
                float8=model.geometry.float8,
                implementation="xla",
            )
        return KvLayer(*written)


def lengths(max_tokens: int) -> list[int]:
    """Return the programs' lengths: powers of two up to the longest source.

    >>> lengths(100)
    [32, 64, 104]
    """
    longest = max(SHORTEST, -(-max_tokens // 8) * 8)  # matrix products prefer multiples of 8
    return sorted({min(longest, SHORTEST << power) for power in range(longest.bit_length())})


def place(sources: jax.Array, changes: jax.Array) -> jax.Array:
    """Store sources of slots: `changes` is int32[·, 2 + Ms] of slot, tokens, blocks; slot S is dropped."""
    return sources.at[changes[:, 0]].set(changes[:, 1:], mode="drop")
