"""Drafts on the device: verification, and prompt lookup for the next step.

Verification by coupling (Daliri, Musco, Suresh 2024, arXiv:2408.07978): drafts are accepted while they equal tokens
that are sampled with the request's noise, so they never change a request's tokens.

Traced inside the step. K drafts per row, L capacity of a slot.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxllm.sampling.sampler import Sampled
from jaxllm.setup.draft_setup import Drafting
from jaxllm.setup.kv_cache import KvLayer, Leaf

NO_DRAFT = -1


@struct.dataclass
class Drafted(Generic[Leaf]):
    """Drafts and their state on the device."""

    lengths: Leaf  # int32[S]
    tokens: Leaf  # int32[S, K]: drafts that follow the tokens
    kv: tuple[KvLayer[Leaf], ...] = ()  # of the draft model
    aux: tuple[Leaf, ...] = ()  # [T, D] each: the target's hidden states, between the parts of a step


class SamplePositions(NamedTuple):
    """The tokens after which a step samples, see `batch.SamplePositions`."""

    slots: jax.Array  # i32[·], S for padding
    positions: jax.Array  # i32[·]
    samples: jax.Array  # bool[·]
    offsets: jax.Array | None = None  # i32[·]; None without drafts
    drafts: jax.Array | None = None  # i32[·]


def begin(drafted: Drafted[jax.Array], slots: jax.Array, offsets: jax.Array | None) -> jax.Array:
    """Return the positions of decode rows' tokens, i32[·]."""
    last = drafted.lengths.at[slots].get(mode="clip") - 1
    return last if offsets is None else last + offsets


def with_drafts(drafted: Drafted[jax.Array], tokens: jax.Array, slots: jax.Array, offsets: jax.Array) -> jax.Array:
    """Replace all tokens of a row but the first by its drafts."""
    drafts = drafted.tokens.at[slots, offsets - 1].get(mode="clip")
    return jnp.where(offsets > 0, jnp.maximum(drafts, 0), tokens)


def count(drafted: Drafted[jax.Array], at: SamplePositions, sampled: Sampled) -> tuple[jax.Array, jax.Array]:
    """Return each row's numbers of yielded tokens (accepted drafts plus one) and drafts, i32[·] at its first place."""
    if at.offsets is None or at.drafts is None:
        return jnp.ones_like(at.slots), jnp.zeros_like(at.slots)
    drafts = drafted.tokens.at[at.slots].get(mode="clip")  # [·, K]
    counts, is_kept = jnp.ones_like(at.slots), jnp.ones(at.slots.shape, jnp.bool_)
    for place in range(drafts.shape[1]):
        # Tokens after non-finite logits are invalid.
        is_next_finite = jnp.roll(sampled.is_finite, -place - 1)
        is_equal = jnp.roll(sampled.tokens, -place) == drafts[:, place]
        is_kept &= is_equal & is_next_finite & (place < at.drafts)
        counts += is_kept
    is_there = (drafts != NO_DRAFT) & (jnp.arange(drafts.shape[1]) < at.drafts[:, None])
    return counts, is_there.sum(axis=1, dtype=jnp.int32)


def take_in(
    drafted: Drafted[jax.Array], tokens: jax.Array, at: SamplePositions, sampled: Sampled, counts: jax.Array
) -> tuple[jax.Array, Drafted[jax.Array]]:
    """Append the yielded tokens to their slots, int32[S, L]; return these and the new lengths."""
    num_slots = len(tokens)
    ends = at.positions + 1
    is_wanted, is_first = at.samples, jnp.ones_like(at.samples)
    if at.offsets is not None:
        first = jnp.arange(len(ends)) - jnp.maximum(at.offsets, 0)
        is_wanted = is_wanted & (at.offsets < counts[first])
        is_first = at.offsets == 0
    tokens = tokens.at[jnp.where(is_wanted, at.slots, num_slots), ends].set(sampled.tokens, mode="drop")
    lengths = drafted.lengths.at[jnp.where(is_first, at.slots, num_slots)].set(
        ends + jnp.where(at.samples, counts, 0), mode="drop"
    )
    return tokens, replace(drafted, lengths=lengths)


def sequences(at: SamplePositions, most: int, num_slots: int) -> tuple[jax.Array, jax.Array]:
    """Return the first places, i32[R], and slots of a step's sequences, at most `most`."""
    is_first = at.samples if at.offsets is None else at.samples & (at.offsets == 0)
    (rows,) = jnp.nonzero(is_first, size=most, fill_value=len(is_first))
    return rows, at.slots.at[rows].get(mode="fill", fill_value=num_slots)


def look_up(tokens: jax.Array, lengths: jax.Array, drafting: Drafting) -> jax.Array:
    """Return the tokens that followed an earlier match of a sequence's last tokens, i32[R, K].

    Prompt lookup (Saxena 2023): the longest match, the latest of equal length. Fewer than K following tokens repeat.
    """
    size = tokens.shape[1]
    last = (lengths - 1)[:, None]  # [R, 1]
    places = jnp.arange(size)[None]
    is_equal, found = places < last, jnp.zeros_like(tokens)
    for back in range(drafting.max_match):
        suffix = jnp.take_along_axis(tokens, jnp.maximum(last - back, 0), axis=1)
        before = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=NO_DRAFT)[:, :size]
        is_equal &= (before == suffix) & (back <= last)
        found += is_equal
    best = jnp.argmax(jnp.where(found >= drafting.min_match, found * size + places, -1), axis=1)[:, None]
    has_match = jnp.take_along_axis(found, best, axis=1) >= drafting.min_match
    period = jnp.maximum(last - best, 1)
    following = best + 1 + lax.rem(jnp.arange(drafting.most)[None], period)
    drafts = jnp.take_along_axis(tokens, jnp.minimum(following, size - 1), axis=1)
    return jnp.where(has_match, drafts, NO_DRAFT)
