"""Rotary positions in three dimensions, time, row and column (M-RoPE; Wang et al. 2024, "Qwen2-VL", §2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Grid(NamedTuple):
    """The tokens of an image or video in a prompt, the first one at `start`."""

    start: int
    rows: int
    columns: int
    layers: int = 1  # in time
    step: float = 0.0  # of positions in time from layer to layer

    @property
    def end(self) -> int:
        return self.start + self.layers * self.rows * self.columns

    @property
    def times(self) -> np.ndarray:
        return (np.arange(self.layers, dtype=np.float32) * np.float32(self.step)).astype(np.int32)

    @property
    def shift(self) -> int:
        """Return the difference of positions after it, which continue after its longest axis."""
        return max(self.rows, self.columns, int(self.times[-1]) + 1) + self.start - self.end


def shift_of(grids: Sequence[Grid]) -> int:
    """Return the difference between positions after all images and places in the sequence."""
    return sum(grid.shift for grid in grids)


def positions_of(grids: Sequence[Grid], first: int, count: int) -> np.ndarray:
    """Return the positions of `count` tokens from the place `first`, int32[3, count]; `grids` are in order."""
    places = np.arange(first, first + count, dtype=np.int32)
    found = np.stack([places] * 3)
    for grid in grids:
        low, high = (min(max(place - first, 0), count) for place in (grid.start, grid.end))
        offset = places[low:high] - grid.start
        layer, within = np.divmod(offset, grid.rows * grid.columns)
        found[0, low:high] -= offset - grid.times[layer]
        found[1, low:high] -= offset - within // grid.columns
        found[2, low:high] -= offset - within % grid.columns
        found[:, high:] += grid.shift
    return found
