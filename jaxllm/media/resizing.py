"""Resize frames as torchvision does on a CPU: antialiased, with weights of 16 bits, so not as Pillow."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

_TAPS = {2: 2, 3: 4}  # of Pillow's filter numbers, bilinear and bicubic; at a scale of 1
_MOST_BITS = 22
_AT_ONCE = 1 << 18  # values, which the processor's cache holds


def resized(frame: np.ndarray, height: int, width: int, resample: int) -> np.ndarray:
    """Return a frame uint8[H, W, 3] in another size; `resample` is a filter's number of Pillow, 2 or 3."""
    rows, columns, channels = frame.shape
    if columns != width:
        values = frame.transpose(1, 0, 2).reshape(columns, rows * channels)
        frame = _mixed(values, width, resample).reshape(width, rows, channels).transpose(1, 0, 2)
    if rows != height:
        values = frame.reshape(rows, width * channels)
        frame = _mixed(values, height, resample).reshape(height, width, channels)
    return np.ascontiguousarray(frame)


def _mixed(values: np.ndarray, size: int, resample: int) -> np.ndarray:
    """Resize the first axis of uint8[N, M]."""
    weights, bits = _weights(len(values), size, resample)
    found = np.empty((size, values.shape[1]), np.uint8)
    step = max(64, _AT_ONCE // len(values))
    for start in range(0, values.shape[1], step):
        total: Any = weights @ values[:, start : start + step].astype(np.int32)
        total += 1 << (bits - 1)
        total >>= bits
        found[:, start : start + step] = np.clip(total, 0, 255, out=total)
    return found


@lru_cache(maxsize=64)
def _weights(before: int, after: int, resample: int) -> tuple[Any, int]:
    """Return the weights of inputs for outputs, a sparse int32[after, before], and the number of fractional bits."""
    from scipy.sparse import csr_array

    scale = before / after
    support = _TAPS[resample] / 2 * max(scale, 1.0)
    inverse = 1.0 / scale if scale >= 1.0 else 1.0
    places, weights = [], []
    for at in range(after):
        center = scale * (at + 0.5)
        first, end = max(int(center - support + 0.5), 0), min(int(center + support + 0.5), before)
        own = _filter((np.arange(first, end) - center + 0.5) * inverse, resample)
        places.append(np.arange(first, end))
        weights.append(own / own.sum())
    largest, bits = max(float(own.max()) for own in weights), 0
    while bits < _MOST_BITS and int(0.5 + largest * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    flat = np.concatenate(weights)
    whole = np.trunc(flat * (1 << bits) + np.where(flat < 0, -0.5, 0.5)).astype(np.int32)
    starts = np.cumsum([0, *map(len, places)])
    return csr_array((whole, np.concatenate(places), starts), shape=(after, before)), bits


def _filter(at: np.ndarray, resample: int) -> np.ndarray:
    far = np.abs(at)
    if resample == 2:
        return np.maximum(1.0 - far, 0.0)
    near = (1.5 * far - 2.5) * far * far + 1.0
    return np.where(far < 1.0, near, np.where(far < 2.0, ((-0.5 * far + 2.5) * far - 4.0) * far + 2.0, 0.0))
