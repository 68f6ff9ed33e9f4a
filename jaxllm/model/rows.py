"""Where the rows of a weight are: in the tensors that it is made of, and in its own order over the devices.

Pure arithmetic of row numbers, for whatever has a row for each output: matrices, biases, and adapters' B.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxllm.model.parameters import Comb, Part


@dataclass(frozen=True)
class Rows:
    """The rows of one part in its tensor: from row `first` on, or those of `comb`."""

    first: int
    comb: Comb | None

    def slices(self, start: int, count: int) -> list[slice]:
        """Give where `count` of the part's rows from `start` on are, in as few pieces as there are."""
        if self.comb is None:
            return [slice(self.first + start, self.first + start + count)] if count else []
        first, length, period = self.comb.first, self.comb.length, self.comb.period
        if length == 1:
            return [slice(first + start * period, first + (start + count - 1) * period + 1, period)] if count else []
        groups = range(start // length, -(-(start + count) // length))
        pieces = []
        for group in groups:
            shift = first + group * (period - length)  # from a row of the part to that of the tensor
            begin, end = max(start, group * length), min(start + count, (group + 1) * length)
            pieces.append(slice(shift + begin, shift + end))
        return pieces


def in_tensors(
    parts: Sequence[Part], names: Sequence[str], alternating: Collection[str]
) -> tuple[list[Rows], Counter[str]]:
    """Say where the parts are in the tensors `names`, one for each part, and how many rows each tensor has."""
    rows: Counter[str] = Counter()  # found so far in each tensor
    found = []
    for part, name in zip(parts, names, strict=True):
        comb = part.comb
        if part.name in alternating:
            comb = Comb(rows[name] // part.rows * part.block, part.block, names.count(name) * part.block)
        found.append(Rows(rows[name], comb))
        rows[name] += part.rows if part.comb is None else part.rows // part.comb.length * part.comb.period
    return found, rows


class Run(NamedTuple):
    """Some rows of a part that stand together in a weight, and how many rows of zeros stand behind them."""

    part: int
    first: int
    count: int
    padding: int


def in_order(parts: Sequence[Part], length: int, shards: int, wanted: slice) -> Iterator[Run]:
    """Give the rows `wanted` of a weight of `length` rows, whole ones of its shards, in the weight's order."""
    start, stop, _ = wanted.indices(length)
    each = length // shards  # rows of one shard
    for shard in range(start // each, stop // each):
        for number, part in enumerate(parts):
            share = -(-part.rows * part.copies // shards)
            first = shard // part.copies * share
            real = max(0, min(share, part.rows - first))  # the vocabulary's last rows may be padding
            yield Run(number, first, real, share - real)
