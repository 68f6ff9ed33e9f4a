"""Positions of a weight's rows in checkpoint tensors and over devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxllm.model.parameters import Comb, Part


@dataclass(frozen=True)
class Rows:
    """A part's rows in its tensor: from `first`, or those of `comb`."""

    first: int
    comb: Comb | None

    def slices(self, start: int, count: int) -> list[slice]:
        """Return the tensor slices of `count` rows from `start`."""
        if self.comb is None:
            return [slice(self.first + start, self.first + start + count)] if count else []
        first, length, period = self.comb.first, self.comb.length, self.comb.period
        if length == 1:
            return [slice(first + start * period, first + (start + count - 1) * period + 1, period)] if count else []
        groups = range(start // length, -(-(start + count) // length))
        pieces = []
        for group in groups:
            shift = first + group * (period - length)
            begin, end = max(start, group * length), min(start + count, (group + 1) * length)
            pieces.append(slice(shift + begin, shift + end))
        return pieces


def in_tensors(
    parts: Sequence[Part], names: Sequence[str], alternating: Collection[str]
) -> tuple[list[Rows], Counter[str]]:
    """Return the position of each part in its tensor, and the rows of each tensor."""
    rows: Counter[str] = Counter()
    found = []
    for part, name in zip(parts, names, strict=True):
        comb = part.comb
        if part.name in alternating:
            comb = Comb(rows[name] // part.rows * part.block, part.block, names.count(name) * part.block)
        found.append(Rows(rows[name], comb))
        rows[name] += part.rows if part.comb is None else part.rows // part.comb.length * part.comb.period
    return found, rows


class Run(NamedTuple):
    """Contiguous rows of a part in a weight, followed by `padding` rows of zeros."""

    part: int
    first: int
    count: int
    padding: int


def in_order(parts: Sequence[Part], length: int, shards: int, wanted: slice) -> Iterator[Run]:
    start, stop, _ = wanted.indices(length)
    each = length // shards
    for shard in range(start // each, stop // each):
        for number, part in enumerate(parts):
            share = -(-part.rows * part.copies // shards)
            first = shard // part.copies * share
            real = max(0, min(share, part.rows - first))  # the vocabulary may be padded
            yield Run(number, first, real, share - real)
