"""Gumbel noise on NVIDIA GPUs in Triton, with JAX's threefry generator."""

# pyright: reportMissingImports=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mixed(x, y, TURN: tl.constexpr):
    x += y
    return x, x ^ ((y << TURN) | (y >> (32 - TURN)))


@triton.jit
def _four(x, y, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, FOURTH: tl.constexpr):
    x, y = _mixed(x, y, FIRST)
    x, y = _mixed(x, y, SECOND)
    x, y = _mixed(x, y, THIRD)
    return _mixed(x, y, FOURTH)


@triton.jit
def _threefry(key, other, x, y):
    """Encrypt words x and y: threefry2x32 in 20 rounds (Salmon et al. 2011), as JAX."""
    last = key ^ other ^ 0x1BD11BDA
    x += key
    y += other
    x, y = _four(x, y, 13, 15, 26, 6)
    x += other
    y += last + 1
    x, y = _four(x, y, 17, 29, 16, 24)
    x += last
    y += key + 2
    x, y = _four(x, y, 13, 15, 26, 6)
    x += key
    y += other + 3
    x, y = _four(x, y, 17, 29, 16, 24)
    x += other
    y += last + 4
    x, y = _four(x, y, 13, 15, 26, 6)
    return x + last, y + key + 5


@triton.jit
def gumbel(keys, positions, row, ids):
    """Draw noise of a row's tokens; see `xla.gumbel`."""
    position = tl.load(positions + row).to(tl.uint32)
    zero = position ^ position
    key, other = _threefry(tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1), zero, position)
    counters = ids.to(tl.uint32)
    high, low = _threefry(key, other, counters ^ counters, counters)
    mantissa = ((high ^ low) >> 9) | 0x3F800000
    uniform = mantissa.to(tl.float32, bitcast=True) - 1.0
    return -tl.log(-tl.log(tl.maximum(uniform, 1.1754943508222875e-38)))
