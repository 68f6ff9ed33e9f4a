"""Rotary positions in three dimensions, time, row and column (M-RoPE; Wang et al. 2024, "Qwen2-VL", §2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Grid(NamedTuple):
    """An image's tokens in a prompt, the first one at `start`."""

    start: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        return self.start + self.rows * self.columns

    @property
    def shift(self) -> int:
        """Return the difference of positions after the image, which continue after its longer side."""
        return max(self.rows, self.columns) - self.rows * self.columns


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
        found[0, low:high] -= offset
        found[1, low:high] -= offset - offset // grid.columns
        found[2, low:high] -= offset - offset % grid.columns
        found[:, high:] += grid.shift
    return found
