"""How the keys of a decode step's rows are divided among the programs of a kernel: in pieces, each of one row.

By `evenly` all rows' keys are shared among as many programs as run at once, so that one long row among short ones keeps
no program busy while the others have nothing to do. By `by_own_length` a row's pieces depend on its own length alone,
and so its sums' last bits do, too.

The same for all layers with the same window; XLA computes it once a step. Letters: R rows, B pieces.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.attention.arguments import AttentionArgs
from pallas_kernels.tuning import Decode


class Pieces(NamedTuple):
    """All int32; a row's pieces follow one another, and a row without keys has one piece without any."""

    row: Array  # [B]: of each piece; -1 where there is none
    begin: Array  # [B]: its first key
    end: Array  # [B]: the one behind its last
    siblings: Array  # [B]: how many its row has, this one too
    first: Array  # [R]: the number of a row's first piece
    count: Array  # [R]: how many a row has


def divide(lengths: Array, context: int, args: AttentionArgs, chosen: Decode) -> Pieces:
    """Divide rows of `lengths` [R], of at most `context` keys, as a kernel was chosen to have them."""
    lengths = lengths.astype(jnp.int32)
    if args.batch_invariant:
        return by_own_length(lengths, args.window, chosen.keys, chosen.splits, chosen.least_keys)
    return evenly(lengths, context, args.window, chosen.keys, chosen.programs, chosen.least_keys)


def evenly(lengths: Array, context: int, window: int | None, visited: int, programs: int, least: int) -> Pieces:
    """Divide the keys that rows of `lengths` [R] see into R + `programs` pieces at most.

    A row is cut where it is longer than `least` keys and than an even share of all keys and a sixteenth of it, so that
    rows that nearly fill the programs, as 64 with 8 heads do, are not cut. Its pieces are whole visits, of `visited`
    keys, and as equal as these allow. No row is longer than `context`.
    """
    begins = _begins(lengths, window)
    keys = lengths - begins
    even = -(-jnp.sum(keys) // programs)
    share = jnp.maximum(even + even // 16, least)
    longest = context if window is None else min(context, window)
    most = min(len(lengths) + programs, len(lengths) * -(-longest // least))
    return _cut(begins, lengths, -(-keys // share), visited, most)


def by_own_length(lengths: Array, window: int | None, visited: int, splits: int, least: int) -> Pieces:
    """Cut each row that is longer than `least` keys into `splits` equal pieces at most; R · `splits` pieces in all."""
    begins = _begins(lengths, window)
    count = jnp.minimum(-(-(lengths - begins) // least), splits)
    return _cut(begins, lengths, count, visited, len(lengths) * splits)


def _begins(lengths: Array, window: int | None) -> Array:
    """Return where rows begin: at 0, or at the window's first key."""
    return jnp.zeros_like(lengths) if window is None else jnp.maximum(lengths - window, 0)


def _cut(begins: Array, ends: Array, count: Array, visited: int, most: int) -> Pieces:
    """Cut each row's keys into about `count` [R] equal pieces of whole visits."""
    keys = ends - begins
    each = jnp.maximum(-(-keys // (jnp.maximum(count, 1) * visited)), 1) * visited
    count = jnp.maximum(-(-keys // each), 1)
    numbers = jnp.arange(len(keys))
    # Sums over all pairs: a few kernels, where a running sum and searches would be many.
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
