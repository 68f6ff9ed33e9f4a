"""The Llama that is trained here, in flax.nnx: whole sequences for training, one token at a time for evaluation.

It follows the conventions of Hugging Face's Llama (rotary halves, grouped keys and values, tied embeddings), so that
its weights can be written under those names without a change. The engine does not use this module.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx


class Shape(NamedTuple):
    """The sizes of the network; with the defaults it has 1.8 million parameters."""

    vocabulary: int = 1536
    width: int = 192
    layers: int = 4
    heads: int = 4
    key_heads: int = 2
    head_width: int = 32
    inner: int = 512
    rope_theta: float = 10000.0
    epsilon: float = 1e-5


Pair = tuple[jax.Array, jax.Array]
Cache = list[Pair]


def rotary(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Turn the two halves of every head of x [batch, heads, time, head_width] by the angles of the positions."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half) / half)
    angles = positions[:, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    low, high = x[..., :half], x[..., half:]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


class Norm(nnx.Module):
    """RMS normalisation with a learnt scale."""

    def __init__(self, width: int, epsilon: float) -> None:
        self.weight = nnx.Param(jnp.ones(width))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Scale every vector to a mean square of one, then by the learnt weights."""
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.epsilon) * self.weight[...]


class Linear(nnx.Module):
    """A matrix product without bias; the weight is kept [in, out]."""

    def __init__(self, inputs: int, outputs: int, std: float, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (inputs, outputs)) * std)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Multiply x by the weight."""
        return x @ self.weight[...]


class Attention(nnx.Module):
    """Causal attention in which `heads // key_heads` queries share one key and value."""

    def __init__(self, shape: Shape, std: float, rngs: nnx.Rngs) -> None:
        self.shape = shape
        queries, keys = shape.heads * shape.head_width, shape.key_heads * shape.head_width
        self.q_proj = Linear(shape.width, queries, std, rngs)
        self.k_proj = Linear(shape.width, keys, std, rngs)
        self.v_proj = Linear(shape.width, keys, std, rngs)
        self.o_proj = Linear(queries, shape.width, std / (2 * shape.layers) ** 0.5, rngs)

    def heads_first(self, x: jax.Array, time: int) -> jax.Array:
        """Turn x [batch * time, heads * head_width] into [batch, heads, time, head_width]."""
        width = self.shape.head_width
        return x.reshape(-1, time, x.shape[-1] // width, width).transpose(0, 2, 1, 3)

    def __call__(self, x: jax.Array, positions: jax.Array, cache: Pair | None) -> tuple[jax.Array, Pair]:
        """Attend to the sequence itself or, with a cache, to the cached tokens and this one."""
        s, time = self.shape, len(positions)
        q = rotary(self.heads_first(self.q_proj(x), time), positions, s.rope_theta)
        k = rotary(self.heads_first(self.k_proj(x), time), positions, s.rope_theta)
        v = self.heads_first(self.v_proj(x), time)
        if cache is not None:
            k = jax.lax.dynamic_update_slice_in_dim(cache[0], k, positions[0], axis=2)
            v = jax.lax.dynamic_update_slice_in_dim(cache[1], v, positions[0], axis=2)
        # One product of matrices per key head, with the queries that share it stacked as rows: XLA's CPU backend is
        # several times slower on the same sum written with more batch dimensions.
        grouped = q.reshape(q.shape[0] * s.key_heads, -1, s.head_width)
        flat_k, flat_v = (t.reshape(-1, t.shape[2], s.head_width) for t in (k, v))
        hidden = jnp.where(positions[:, None] >= jnp.arange(k.shape[2])[None, :], 0.0, -1e9)
        scores = grouped @ flat_k.transpose(0, 2, 1) * s.head_width**-0.5
        weights = jax.nn.softmax(scores + jnp.tile(hidden, (s.heads // s.key_heads, 1)), axis=-1)
        mixed = (weights @ flat_v).reshape(q.shape).transpose(0, 2, 1, 3).reshape(x.shape[0], -1)
        return self.o_proj(mixed), (k, v)


class Feed(nnx.Module):
    """The gated feed-forward layer (SwiGLU)."""

    def __init__(self, shape: Shape, std: float, rngs: nnx.Rngs) -> None:
        self.gate_proj = Linear(shape.width, shape.inner, std, rngs)
        self.up_proj = Linear(shape.width, shape.inner, std, rngs)
        self.down_proj = Linear(shape.inner, shape.width, std / (2 * shape.layers) ** 0.5, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the gated layer to every vector."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """One decoder layer: attention, then the feed-forward layer, each on a normalised copy and added back."""

    def __init__(self, shape: Shape, std: float, rngs: nnx.Rngs) -> None:
        self.input_layernorm = Norm(shape.width, shape.epsilon)
        self.self_attn = Attention(shape, std, rngs)
        self.post_attention_layernorm = Norm(shape.width, shape.epsilon)
        self.mlp = Feed(shape, std, rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, cache: Pair | None) -> tuple[jax.Array, Pair]:
        """Return the vectors after this layer, and its keys and values."""
        attended, kept = self.self_attn(self.input_layernorm(x), positions, cache)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), kept


class Llama(nnx.Module):
    """The whole network; the embedding also makes the logits."""

    def __init__(self, shape: Shape, rngs: nnx.Rngs) -> None:
        std = 0.5 * shape.width**-0.5
        self.shape = shape
        self.embed_tokens = nnx.Param(jax.random.normal(rngs.params(), (shape.vocabulary, shape.width)) * std)
        self.layers = nnx.List([Layer(shape, std, rngs) for _ in range(shape.layers)])
        self.norm = Norm(shape.width, shape.epsilon)

    def __call__(self, tokens: jax.Array, positions: jax.Array, cache: Cache | None = None) -> tuple[jax.Array, Cache]:
        """Return logits [batch, time, vocabulary] for tokens [batch, time] at positions [time], and the new cache."""
        # All tokens in one matrix [batch * time, width]: the gradients take half the time that three dimensions take.
        x, kept = self.states(self.embed_tokens[...][tokens.reshape(-1)], positions, cache)
        logits = self.norm(x) @ self.embed_tokens[...].T
        return logits.reshape(*tokens.shape, -1), kept

    def states(self, x: jax.Array, positions: jax.Array, cache: Cache | None = None) -> tuple[jax.Array, Cache]:
        """Return embeddings x [batch * time, width] after the layers, before the last norm, and the new cache."""
        kept = []
        for i, layer in enumerate(self.layers):
            x, pair = layer(x, positions, None if cache is None else cache[i])
            kept.append(pair)
        return x, kept

    def empty_cache(self, batch: int, length: int) -> Cache:
        """Return a cache of zeros for `length` positions."""
        s = self.shape
        zeros = jnp.zeros((batch, s.key_heads, length, s.head_width))
        return [(zeros, zeros) for _ in range(s.layers)]


def hugging_face_weights(model: Llama) -> dict[str, jax.Array]:
    """Return the weights under Hugging Face's names; matrices are turned to [out, in]."""
    weights = {"model.embed_tokens.weight": model.embed_tokens[...]}
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name = ".".join(str(part) for part in path)
        if name != "embed_tokens":
            value = leaf[...]
            weights[f"model.{name}"] = value.T if value.ndim == 2 else value
    return weights


def greedy(model: Llama, prompts: list[list[int]], ends: tuple[int, ...], new_tokens: int) -> list[list[int]]:
    """Continue the prompts greedily, all at once, up to an end token (which is kept) or `new_tokens` tokens.

    The prompts are fed token by token with the answers, which needs one compiled step only.
    """
    longest = max(map(len, prompts))
    length = -(-(longest + new_tokens) // 64) * 64
    table = jnp.array([prompt + [0] * (length - len(prompt)) for prompt in prompts])
    lengths = jnp.array([len(prompt) for prompt in prompts])
    table = jax.device_get(_greedy_loop(model, table, lengths, jnp.array(ends), jnp.array(new_tokens)))
    answers = []
    for row, prompt in zip(table.tolist(), prompts, strict=True):
        answer = row[len(prompt) : len(prompt) + new_tokens]
        stops = [i for i, token in enumerate(answer) if token in ends]
        answers.append(answer[: stops[0] + 1] if stops else answer)
    return answers


@nnx.jit
def _greedy_loop(
    model: Llama, table: jax.Array, lengths: jax.Array, ends: jax.Array, new_tokens: jax.Array
) -> jax.Array:
    """Fill `table` [batch, length] after each prompt's length; stop when every row has met an end token."""
    batch, length = table.shape
    graph, state = nnx.split(model)

    def unfinished(carry: Any) -> jax.Array:
        position, _, done, _ = carry
        return (position < length - 1) & ~jnp.all(done)

    def step(carry: Any) -> Any:
        position, table, done, cache = carry
        token = jax.lax.dynamic_slice_in_dim(table, position, 1, axis=1)
        logits, cache = nnx.merge(graph, state)(token, position[None], cache)
        best = jnp.argmax(logits[:, 0], axis=-1).astype(table.dtype)
        answering = (position + 1 >= lengths) & ~done
        following = jax.lax.dynamic_slice_in_dim(table, position + 1, 1, axis=1)[:, 0]
        column = jnp.where(answering, best, following)[:, None]
        table = jax.lax.dynamic_update_slice_in_dim(table, column, position + 1, axis=1)
        done = done | answering & jnp.isin(best, ends) | (position + 2 >= lengths + new_tokens)
        return position + 1, table, done, cache

    start = (jnp.array(0), table, jnp.zeros(batch, bool), model.empty_cache(batch, length))
    return jax.lax.while_loop(unfinished, step, start)[1]
