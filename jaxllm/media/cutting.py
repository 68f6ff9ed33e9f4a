"""Cut images into patches, a token being a square of them."""

from __future__ import annotations

import math

import numpy as np

from jaxllm.media.sizes import MOST_RATIO


def most_tokens(fewest: int, most: int, side: int) -> int:
    """Return the most tokens of an image between two bounds of pixels, which rounding a long one's sides can exceed."""
    long = math.sqrt(MOST_RATIO)
    rounded = fewest + (long + 1 / long) * side * math.sqrt(fewest) + side**2
    return math.ceil(max(most, long * side * math.sqrt(most), rounded) / side**2)


def cut(values: np.ndarray, patch: int, merge: int, table: np.ndarray) -> np.ndarray:
    """Return an image uint8[H, W, 3] as float32[patches, values]: a token's patches adjacent, tokens in rows."""
    high, wide, _ = values.shape
    rows, columns, size = high // (patch * merge), wide // (patch * merge), patch**2
    pieces = values.reshape(rows, merge, patch, columns, merge, patch, 3)
    pieces = pieces.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, size)
    found = np.empty(pieces.shape, np.float32)
    for channel, own in enumerate(table):
        found[:, channel] = own[pieces[:, channel]]
    return found.reshape(-1, 3 * size)
