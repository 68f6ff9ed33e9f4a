"""The encoder that is trained to embed, in flax.nnx, with BERT's conventions and Hugging Face's names of weights.

The engine does not use this module.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx


class Shape(NamedTuple):
    """The sizes of the encoder; with the defaults it has 1.1 million parameters."""

    vocabulary: int = 2048
    width: int = 128
    layers: int = 4
    heads: int = 4
    inner: int = 512
    positions: int = 256
    epsilon: float = 1e-12


class Norm(nnx.Module):
    """Layer normalisation with learnt scale and bias."""

    def __init__(self, width: int, epsilon: float) -> None:
        self.weight, self.bias = nnx.Param(jnp.ones(width)), nnx.Param(jnp.zeros(width))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Scale every vector to mean 0 and variance 1, then by the learnt weights."""
        return jax.nn.standardize(x, epsilon=self.epsilon) * self.weight[...] + self.bias[...]


class Linear(nnx.Module):
    """A matrix product with bias; the weight is kept [in, out]."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (inputs, outputs)) * 0.5 * inputs**-0.5)
        self.bias = nnx.Param(jnp.zeros(outputs))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Multiply x by the weight and add the bias."""
        return x @ self.weight[...] + self.bias[...]


class Layer(nnx.Module):
    """Attention among all tokens of a row, then the feed-forward layer, each added and then normalised."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs) -> None:
        width, self.heads = shape.width, shape.heads
        self.query, self.key, self.value = (Linear(width, width, rngs) for _ in range(3))
        self.attended, self.attended_norm = Linear(width, width, rngs), Norm(width, shape.epsilon)
        self.inner, self.outer = Linear(width, shape.inner, rngs), Linear(shape.inner, width, rngs)
        self.outer_norm = Norm(width, shape.epsilon)

    def __call__(self, x: jax.Array, hidden: jax.Array) -> jax.Array:
        """Return x [rows * time, width] after this layer; `hidden` [rows, 1, time] is added to the scores."""
        rows, time = hidden.shape[0], hidden.shape[2]

        def heads_first(x: jax.Array) -> jax.Array:
            """One product of matrices per row and head."""
            return x.reshape(rows, time, self.heads, -1).transpose(0, 2, 1, 3)

        q, k, v = heads_first(self.query(x)), heads_first(self.key(x)), heads_first(self.value(x))
        weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5 + hidden[:, None], axis=-1)
        mixed = (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape)
        x = self.attended_norm(x + self.attended(mixed))
        return self.outer_norm(x + self.outer(jax.nn.gelu(self.inner(x), approximate=False)))


class Encoder(nnx.Module):
    """The whole network: the mean of a text's last hidden vectors is its embedding."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs) -> None:
        self.shape = shape
        self.word_embeddings = nnx.Param(jax.random.normal(rngs.params(), (shape.vocabulary, shape.width)) * 0.02)
        self.position_embeddings = nnx.Param(jax.random.normal(rngs.params(), (shape.positions, shape.width)) * 0.02)
        self.embeddings_norm = Norm(shape.width, shape.epsilon)
        self.layers = nnx.List([Layer(shape, rngs) for _ in range(shape.layers)])

    def __call__(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Return embeddings [rows, width] of tokens [rows, time]; token 0 pads."""
        is_token = tokens != 0
        x = self.word_embeddings[...][tokens] + self.position_embeddings[...][positions]
        x = self.embeddings_norm(x).reshape(-1, self.shape.width)
        for layer in self.layers:
            x = layer(x, jnp.where(is_token, 0.0, -1e9)[:, None])
        x = x.reshape(*tokens.shape, -1) * is_token[..., None]
        return x.sum(axis=1) / is_token.sum(axis=1, keepdims=True)


_NAMES = {
    "query": "attention.self.query", "key": "attention.self.key", "value": "attention.self.value",
    "attended": "attention.output.dense", "attended_norm": "attention.output.LayerNorm",
    "inner": "intermediate.dense", "outer": "output.dense", "outer_norm": "output.LayerNorm",
}  # fmt: skip


def hugging_face_weights(model: Encoder) -> dict[str, jax.Array]:
    """Return the weights under Hugging Face's names; matrices are turned to [out, in]."""
    weights = {  # token types: the training has one, without effect
        "embeddings.word_embeddings.weight": model.word_embeddings[...],
        "embeddings.position_embeddings.weight": model.position_embeddings[...],
        "embeddings.token_type_embeddings.weight": jnp.zeros((2, model.shape.width)),
        "embeddings.LayerNorm.weight": model.embeddings_norm.weight[...],
        "embeddings.LayerNorm.bias": model.embeddings_norm.bias[...],
    }
    for number, layer in enumerate(model.layers):
        for (part, leaf), value in nnx.to_flat_state(nnx.state(layer, nnx.Param)):
            array = value[...]
            weights[f"encoder.layer.{number}.{_NAMES[str(part)]}.{leaf}"] = array.T if array.ndim == 2 else array
    return weights
