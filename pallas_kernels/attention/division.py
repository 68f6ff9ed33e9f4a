"""Divide decode rows' keys into pieces, one per program of a kernel.

`evenly` balances concurrent programs. In `by_own_length` a row's pieces, and so its sums' last bits, depend only on its
length.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.attention.arguments import AttentionArgs
from pallas_kernels.tuning import Decode


class Pieces(NamedTuple):
    """Pieces, int32; a row's are consecutive, and a row without keys has one empty piece."""

    row: Array  # [B], -1: unused
    begin: Array  # [B], first key
    end: Array  # [B], end of keys
    siblings: Array  # [B], pieces of the row
    first: Array  # [R], first piece
    count: Array  # [R], pieces


def divide(lengths: Array, context: int, args: AttentionArgs, chosen: Decode) -> Pieces:
    lengths = lengths.astype(jnp.int32)
    if args.batch_invariant:
        return by_own_length(lengths, args.window, chosen.keys, chosen.splits, chosen.least_keys)
    return evenly(lengths, context, args.window, chosen.keys, chosen.programs, chosen.least_keys)


def evenly(lengths: Array, context: int, window: int | None, visited: int, programs: int, least: int) -> Pieces:
    """Divide visible keys into at most R + `programs` pieces, equal multiples of `visited` keys.

    Cuts rows longer than `least` and than 17/16 of an even share, so not 64 rows of 8 heads.
    """
    begins = _begins(lengths, window)
    keys = lengths - begins
    even = -(-jnp.sum(keys) // programs)
    share = jnp.maximum(even + even // 16, least)
    longest = context if window is None else min(context, window)
    most = min(len(lengths) + programs, len(lengths) * -(-longest // least))
    return _cut(begins, lengths, -(-keys // share), visited, most)


def by_own_length(lengths: Array, window: int | None, visited: int, splits: int, least: int) -> Pieces:
    """Cut rows longer than `least` keys into at most `splits` equal pieces; R · `splits` in all."""
    begins = _begins(lengths, window)
    count = jnp.minimum(-(-(lengths - begins) // least), splits)
    return _cut(begins, lengths, count, visited, len(lengths) * splits)


def _begins(lengths: Array, window: int | None) -> Array:
    return jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0)


def _cut(begins: Array, ends: Array, count: Array, visited: int, most: int) -> Pieces:
    keys = ends - begins
    each = jnp.maximum(-(-keys // (jnp.maximum(count, 1) * visited)), 1) * visited
    count = jnp.maximum(-(-keys // each), 1)
    numbers = jnp.arange(len(keys))
    # Fewer kernels than cumulative sums and searches.
    first = jnp.sum(jnp.where(numbers[None, :] < numbers[:, None], count[None, :], 0), axis=1)
    piece = jnp.arange(most)[:, None]
    is_own = (first <= piece) & (piece < first + count)  # [B, R]
    begin = begins + (piece - first) * each

    def own(values: Array) -> Array:
        return jnp.sum(jnp.where(is_own, values, 0), axis=1, dtype=jnp.int32)

    return Pieces(
        row=own(numbers + 1) - 1,
        begin=own(begin),
        end=own(jnp.minimum(begin + each, ends)),
        siblings=own(count),
        first=first.astype(jnp.int32),
        count=count.astype(jnp.int32),
    )
