"""The network that writes spoken words down, in flax.nnx, with the conventions and names of Hugging Face's Whisper.

The engine does not use this module.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from training import network
from training.encoder import Linear, Norm
from training.phrases import WORDS
from training.spoken import NUM_MELS, POSITIONS

MOST_WORDS = 20  # of a window
# The heads of a position: the word that is spoken there, or none, and its index in the window.
HEADS: tuple[int, ...] = (1 + len(WORDS), MOST_WORDS)
# Heads of the decoder's last layer: they attend to the token to be written, and to the one before.
WRITTEN_HEAD, READ_HEAD = 0, 1


class Shape(NamedTuple):
    """The sizes of the network; with the defaults it has 1.3 million parameters."""

    vocabulary: int
    mels: int = NUM_MELS
    positions: int = POSITIONS  # of the encoder
    tokens: int = 32  # positions of the decoder
    width: int = 128
    heads: int = 4
    encoder_layers: int = 3
    decoder_layers: int = 2
    inner: int = 512
    epsilon: float = 1e-5


class Attention(nnx.Module):
    """Attention of one sequence to another or to itself; keys have no bias."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs) -> None:
        width, self.heads = shape.width, shape.heads
        self.q_proj, self.v_proj, self.out_proj = (Linear(width, width, rngs) for _ in range(3))
        self.k_proj = network.Linear(width, width, 0.5 * width**-0.5, rngs)

    def __call__(self, x: jax.Array, other: jax.Array, rows: int, is_causal: bool) -> tuple[jax.Array, jax.Array]:
        """Return the result for x [rows * time, width] and the weights [rows, heads, time, time of `other`]."""

        def heads_first(x: jax.Array) -> jax.Array:
            return x.reshape(rows, -1, self.heads, x.shape[-1] // self.heads).swapaxes(1, 2)

        q, k, v = heads_first(self.q_proj(x)), heads_first(self.k_proj(other)), heads_first(self.v_proj(other))
        scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
        if is_causal:
            scores = jnp.where(jnp.tri(q.shape[2], dtype=bool), scores, -1e9)
        weights = jax.nn.softmax(scores, axis=-1)
        return self.out_proj((weights @ v).swapaxes(1, 2).reshape(x.shape)), weights


class Layer(nnx.Module):
    """Attention within a sequence, of a decoder also to the encoder's output, then the feed-forward layer."""

    def __init__(self, shape: Shape, is_decoder: bool, rngs: nnx.Rngs) -> None:
        width, epsilon, self.is_decoder = shape.width, shape.epsilon, is_decoder
        self.self_attn, self.self_attn_layer_norm = Attention(shape, rngs), Norm(width, epsilon)
        if is_decoder:
            self.encoder_attn, self.encoder_attn_layer_norm = Attention(shape, rngs), Norm(width, epsilon)
        self.fc1, self.fc2 = Linear(width, shape.inner, rngs), Linear(shape.inner, width, rngs)
        self.final_layer_norm = Norm(width, epsilon)

    def __call__(self, x: jax.Array, rows: int, encoded: jax.Array | None = None) -> tuple[jax.Array, jax.Array | None]:
        """Return x [rows * time, width] after the layer, and a decoder's weights for the encoder's output `encoded`."""
        normed, weights = self.self_attn_layer_norm(x), None
        x = x + self.self_attn(normed, normed, rows, self.is_decoder)[0]
        if encoded is not None:
            added, weights = self.encoder_attn(self.encoder_attn_layer_norm(x), encoded, rows, False)
            x = x + added
        inner = jax.nn.gelu(self.fc1(self.final_layer_norm(x)), approximate=False)
        return x + self.fc2(inner), weights


class Encoder(nnx.Module):
    """Two convolutions of three frames, of which the second takes every other frame, and transformer layers."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs) -> None:
        self.shape = shape
        self.conv1, self.conv2 = Linear(3 * shape.mels, shape.width, rngs), Linear(3 * shape.width, shape.width, rngs)
        self.layers = nnx.List([Layer(shape, False, rngs) for _ in range(shape.encoder_layers)])
        self.layer_norm = Norm(shape.width, shape.epsilon)

    def __call__(self, bands: jax.Array) -> jax.Array:
        """Return states [rows * positions, width] of spectrograms [rows, mels, frames]."""
        rows = len(bands)
        x = bands.swapaxes(1, 2)
        for convolution, stride in ((self.conv1, 1), (self.conv2, 2)):
            padded = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
            taps = [padded[:, tap : tap + x.shape[1] : stride] for tap in range(3)]
            joined = jnp.concatenate(taps, axis=-1)
            x = jax.nn.gelu(convolution(joined.reshape(-1, joined.shape[-1])), approximate=False)
            x = x.reshape(rows, -1, x.shape[-1])
        x = (x + positions(self.shape)).reshape(-1, self.shape.width)
        for layer in self.layers:
            x, _ = layer(x, rows)
        return self.layer_norm(x)


class Decoder(nnx.Module):
    """Transformer layers on tokens; the embedding also makes the logits."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs) -> None:
        self.shape, std = shape, 0.5 * shape.width**-0.5
        self.embed_tokens = nnx.Param(jax.random.normal(rngs.params(), (shape.vocabulary, shape.width)) * std)
        self.embed_positions = nnx.Param(jax.random.normal(rngs.params(), (shape.tokens, shape.width)) * std)
        self.layers = nnx.List([Layer(shape, True, rngs) for _ in range(shape.decoder_layers)])
        self.layer_norm = Norm(shape.width, shape.epsilon)

    def __call__(self, tokens: jax.Array, encoded: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return logits [rows, time, vocabulary] of tokens [rows, time], and the last layer's weights."""
        rows, time = tokens.shape
        x = self.embed_tokens[...][tokens] + self.embed_positions[...][:time]
        x, weights = x.reshape(-1, self.shape.width), None
        for layer in self.layers:
            x, weights = layer(x, rows, encoded)
        assert weights is not None
        logits = self.layer_norm(x) @ self.embed_tokens[...].T
        return logits.reshape(rows, time, -1), weights


class Recogniser(nnx.Module):
    """The whole network. Heads on the encoder's output, for the training alone, name the word at each position."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs) -> None:
        self.encoder, self.decoder = Encoder(shape, rngs), Decoder(shape, rngs)
        self.heads = Linear(shape.width, sum(HEADS), rngs)


def positions(shape: Shape) -> np.ndarray:
    """Return the encoder's positions, float32[positions, width], as bfloat16 has them: sines, then cosines."""
    half = shape.width // 2
    rates = np.exp(-np.log(10000) / (half - 1) * np.arange(half))
    angles = np.arange(shape.positions)[:, None] * rates
    found = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    return np.asarray(found.astype(jnp.bfloat16), np.float32)


def greedy(model: Recogniser, bands: jax.Array, prompt: list[int], end: int) -> list[list[int]]:
    """Return the likeliest tokens after the prompt, for each spectrogram, without the end and by no rules."""
    table = np.asarray(_greedy_loop(model, bands, jnp.array(prompt), jnp.array(end)))
    rows = (row[len(prompt) :] for row in table.tolist())
    return [row[: row.index(end)] if end in row else row for row in rows]


@nnx.jit
def _greedy_loop(model: Recogniser, bands: jax.Array, prompt: jax.Array, end: jax.Array) -> jax.Array:
    encoded, size = model.encoder(bands), model.decoder.shape.tokens
    table = jnp.full((len(bands), size), end).at[:, : len(prompt)].set(prompt)
    graph, state = nnx.split(model.decoder)

    def step(position: jax.Array, table: jax.Array) -> jax.Array:
        logits, _ = nnx.merge(graph, state)(table, encoded)
        best = jnp.argmax(jax.lax.dynamic_index_in_dim(logits, position, 1, keepdims=False), axis=-1)
        before = jax.lax.dynamic_index_in_dim(table, position, 1, keepdims=False)
        is_done = (before == end) & (position >= len(prompt))
        return jax.lax.dynamic_update_index_in_dim(table, jnp.where(is_done, end, best), position + 1, 1)

    return jax.lax.fori_loop(len(prompt) - 1, size - 1, step, table)


def hugging_face_weights(model: Recogniser) -> dict[str, jax.Array]:
    """Return the weights under Hugging Face's names; matrices are turned to [out, in], convolutions to [out, in, 3]."""
    shape = model.encoder.shape
    weights = {"model.encoder.embed_positions.weight": jnp.asarray(positions(shape))}
    for half in ("encoder", "decoder"):
        for path, leaf in nnx.to_flat_state(nnx.state(getattr(model, half), nnx.Param)):
            name, value = ".".join(str(part) for part in path), leaf[...]
            if name.startswith("conv") and name.endswith("weight"):
                value = value.reshape(3, -1, shape.width).transpose(2, 1, 0)
            elif name.startswith("embed"):
                name = f"{name}.weight"
            elif value.ndim == 2:
                value = value.T
            weights[f"model.{half}.{name}"] = value
    return weights
