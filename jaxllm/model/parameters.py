"""What a weight is: its shape, where it lies, and the tensors of a checkpoint that it is made of.

Plain values, read by the loader, by what makes random weights and by what compiles. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from pallas_kernels import Kind


@dataclass(frozen=True)
class Comb:
    """Some of a tensor's rows: of every `period` of them the `length` that begin at `first`."""

    first: int
    length: int
    period: int


@dataclass(frozen=True)
class Part:
    """One tensor of a checkpoint inside a weight. `copies` neighbouring shards hold the same rows.

    Without a `comb` the rows are all in one piece, behind those of the parts before it in the same tensor; but where a
    family's parts alternate within a tensor, `block` rows of a part stay together.
    """

    name: str
    rows: int
    copies: int = 1
    block: int = 1
    comb: Comb | None = None


@dataclass(frozen=True)
class Scheme:
    """How a matrix is quantized: what its numbers are, and which of them share a scale.

    `group` columns of a row share one; None: all that a device has. `rounds_rows`: rows that it is multiplied with are
    rounded to 8 bits as well.
    """

    kind: Kind = "int8"
    group: int | None = None
    has_zeros: bool = False
    rounds_rows: bool = False


@dataclass(frozen=True)
class Weight:
    """One array: its shape, the logical axis of each dimension (see sharding.py), what it is made of.

    Several parts lie shard by shard ([q_0, k_0, v_0, q_1, k_1, v_1, ...]), so that splitting axis 0 gives each shard
    its own piece of every part. A weight of `stack` experts has a piece of that kind for each of them along axis 0,
    and its parts are those of one. `initial` is the value of a freshly made model; `is_wide` weights are float32
    whatever the others are. Quantization gives `is_product` matrices, those that whole rows of tokens are multiplied
    with, a `scheme`: see quantized.py.
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
        """Say what type the weight has in a model of type `default`."""
        return np.dtype(np.float32) if self.is_wide else default

    @property
    def one(self) -> tuple[int, ...]:
        """The shape of the piece that the parts make up: the whole, or one expert's."""
        return self.shape if self.stack is None else self.shape[1:]

    @property
    def axes_of_one(self) -> tuple[str | None, ...]:
        """The logical axes of that piece."""
        return self.axes if self.stack is None else self.axes[1:]
