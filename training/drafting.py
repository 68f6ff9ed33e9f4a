"""Draft with an EAGLE-3 head after every token of whole texts at once, in passes that each use the results before.

A draft of several tokens can begin at any position, and all of them are computed together: entry p of a pass reads the
token at p + 1 and a hidden state, and predicts the token at p + 2. In the first pass the state is the target's; in pass
j it is the result of entry p - 1 of the pass before. A draft is therefore a diagonal, and attends to the first pass up
to its first entry, and in the later passes to its entries only ("training-time test", Li et al. 2025, §3.2).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.model import decoder, eagle
from jaxllm.model.decoder import Params
from jaxllm.model.eagle import Head
from jaxllm.model.spec import Spec
from pallas_kernels import rotate


def behind(x: Array, count: int) -> Array:
    """Shift the entries of x [rows, time, ...] right by `count`, filling with zeros."""
    return jnp.pad(x, [(0, 0), (count, 0)] + [(0, 0)] * (x.ndim - 2))[:, : x.shape[1]]


def rows_of_heads(spec: Spec, heads: decoder.Heads, rows: int) -> tuple[Array, Array, Array]:
    """Reshape a layer's heads [rows * time, ...]: queries, keys and values, each [rows, time, H, C]."""
    q, k, v = jnp.split(heads.qkv, (spec.num_heads, spec.num_heads + spec.num_kv_heads), axis=1)
    if heads.turn is not None:
        q, k = (rotate(each, *heads.turn, heads.is_interleaved) for each in (q, k))
    k, v = (jnp.repeat(each, spec.num_heads // spec.num_kv_heads, axis=1) for each in (k, v))
    return tuple(each.reshape(rows, -1, *each.shape[1:]) for each in (q, k, v))  # pyright: ignore[reportReturnType]


def attend_apart(spec: Spec, rows: int) -> decoder.Attend:
    """Attend within each row of tokens separately, like the target."""

    def attend(layer: int, heads: decoder.Heads, window: int | None, sinks: Array | None) -> Array:
        q, k, v = rows_of_heads(spec, heads, rows)
        mixed = jax.nn.dot_product_attention(q, k, v, scale=spec.attention_scale, is_causal=True)
        return mixed.reshape(-1, *mixed.shape[2:])

    return attend


def attend_to_drafts(spec: Spec, rows: int, kept: list[tuple[Array, Array]]) -> decoder.Attend:
    """Attend in the next pass after those with the keys and values in `kept`, and append its keys and values."""

    def attend(layer: int, heads: decoder.Heads, window: int | None, sinks: Array | None) -> Array:
        q, k, v = rows_of_heads(spec, heads, rows)
        kept.append((k, v))
        number, places = len(kept) - 1, jnp.arange(q.shape[1])
        seen = places[:, None] - number >= places
        scores = [jnp.where(seen, jnp.einsum("rqhc,rkhc->rhqk", q, kept[0][0]), -1e9)]
        later = [[behind(x, number - pass_) for x in kept[pass_]] for pass_ in range(1, number + 1)]
        scores += [jnp.einsum("rqhc,rqhc->rhq", q, own)[..., None] for own, _ in later]
        shares = jax.nn.softmax(jnp.concatenate(scores, axis=-1) * spec.attention_scale, axis=-1)
        mixed = jnp.einsum("rhqk,rkhc->rqhc", shares[..., : q.shape[1]], kept[0][1])
        for place, (_, own) in enumerate(later):
            mixed += shares[..., q.shape[1] + place].transpose(0, 2, 1)[..., None] * own
        return mixed.reshape(-1, *mixed.shape[2:])

    return attend


def read(spec: Spec, head: Head, params: Params[Array], target: Params[Array], tokens: Array) -> tuple[Array, Array]:
    """Run the target over tokens [rows, time]: its logits [rows, time, V], and the fused states for the head."""
    rows, time = tokens.shape
    context = decoder.Context(jnp.tile(jnp.arange(time), rows), attend_apart(spec, rows))
    hidden, aux = decoder.forward_with_aux(spec, target, tokens.reshape(-1), context, head.aux_layers)
    logits = jax.lax.stop_gradient(decoder.head(spec, target, hidden))
    fused = eagle.fuse(head, params, tuple(map(jax.lax.stop_gradient, aux)))
    return logits.reshape(rows, time, -1), fused.reshape(rows, time, -1)


def drafts(
    head: Head,
    params: Params[Array],
    target: Params[Array],
    fused: Array,
    tokens: Array,
    passes: int,
    choose: Callable[[Array], Array] | None = None,
) -> list[Array]:
    """Run the passes; return each pass's scores over the head's vocabulary, [rows, time, draft vocabulary].

    `tokens` [rows, time] are the inputs of the first pass, one position after the states `fused`. Later passes read the
    same tokens, which assumes correct drafts. With `choose`, which maps scores to the target's token ids, they read the
    tokens drafted in the pass before.
    """
    rows, time = tokens.shape
    kept: list[tuple[Array, Array]] = []
    positions, attend = jnp.tile(jnp.arange(time), rows), attend_to_drafts(head.spec, rows, kept)
    context, hidden, found = decoder.Context(positions, attend), fused, []
    for _ in range(passes):
        if found:
            hidden = behind(hidden, 1)
            tokens = tokens if choose is None else behind(choose(found[-1]), 1)
        embedded = eagle.embed(head, params, target, tokens.reshape(-1), context)
        out, scored = eagle.forward(head, params, embedded, hidden.reshape(rows * time, -1), context)
        hidden = out.reshape(rows, time, -1)
        found.append((scored @ params.top["head"].T).reshape(rows, time, -1))
    return found
