"""Declarations of weights: shape, sharding, and checkpoint tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from pallas_kernels import Kind


@dataclass(frozen=True)
class Comb:
    """A tensor's rows: of every `period`, the `length` beginning at `first`."""

    first: int
    length: int
    period: int


@dataclass(frozen=True)
class Part:
    """A checkpoint tensor inside a weight. `copies` adjacent shards hold the same rows.

    Without `comb`, rows are contiguous, after earlier parts of the same tensor. Where parts alternate in a tensor,
    `block` rows stay together.
    """

    name: str
    rows: int
    copies: int = 1
    block: int = 1
    comb: Comb | None = None


@dataclass(frozen=True)
class Scheme:
    """A quantization scheme.

    `group` columns of a row share a scale; None: all columns on a device. `rounds_rows`: activations have 8 bits too.
    """

    kind: Kind = "int8"
    group: int | None = None
    has_zeros: bool = False
    rounds_rows: bool = False


@dataclass(frozen=True)
class Weight:
    """An array: shape, logical axis of each dimension (see sharding.py), parts.

    Parts are ordered by shard ([q_0, k_0, v_0, q_1, k_1, v_1, ...]), so that splitting axis 0 gives each shard its
    piece of every part. `stack` experts are stacked along axis 0, with parts of one. `is_wide` weights are always
    float32. `is_product` matrices receive a `scheme` under quantization.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    parts: tuple[Part, ...]
    initial: Literal["normal", "zeros", "ones"] = "normal"
    stack: int | None = None
    is_wide: bool = False
    is_product: bool = False
    scheme: Scheme | None = None

    def type_of(self, default: np.dtype) -> np.dtype:
        return np.dtype(np.float32) if self.is_wide else default

    @property
    def one(self) -> tuple[int, ...]:
        return self.shape if self.stack is None else self.shape[1:]

    @property
    def axes_of_one(self) -> tuple[str | None, ...]:
        return self.axes if self.stack is None else self.axes[1:]
