"""Conversion of KV blocks between bytes and rows of the host's tier.

The bytes are a group's leaves in order, the model's before a draft model's. They do not depend on the number of
devices, except for repeated KV heads. n leaves of a kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

Row = tuple[Any, ...]


@dataclass(frozen=True)
class RowLayout:
    """The arrays of a block of one group, and their conversion to bytes."""

    arrays: Sequence[jax.ShapeDtypeStruct]  # [n, …] of each kind, in the host's memory
    places: Sequence[tuple[int, int]]  # kind of each leaf, and index in its array
    num_own: int  # leaves of the model; those of a draft model follow

    def sizes(self) -> tuple[int, int]:
        """Return the bytes of the model's leaves and of a draft model's."""
        sizes = [self._of(place).size * self._of(place).dtype.itemsize for place in self.places]
        return sum(sizes[: self.num_own]), sum(sizes[self.num_own :])

    def about(self, are_drafts: bool) -> list[Any]:
        chosen = self.places[self.num_own :] if are_drafts else self.places[: self.num_own]
        return [[list(self._of(place).shape), self._of(place).dtype.name] for place in chosen]

    def pack(self, row: Row) -> bytes:
        arrays = [np.asarray(array) for array in row]
        return b"".join(arrays[kind][number].tobytes() for kind, number in self.places)

    def unpack(self, content: memoryview, has_drafts: bool) -> Row:
        """Return a row in the host's memory; without drafts those leaves are zeros."""
        arrays = [np.zeros(each.shape, each.dtype) for each in self.arrays]
        at = 0
        for kind, number in self.places if has_drafts else self.places[: self.num_own]:
            target = arrays[kind][number]
            target[...] = np.frombuffer(content[at : at + target.nbytes], target.dtype).reshape(target.shape)
            at += target.nbytes
        return tuple(jax.device_put(arrays, [each.sharding for each in self.arrays]))

    def _of(self, place: tuple[int, int]) -> jax.ShapeDtypeStruct:
        array = self.arrays[place[0]]
        return jax.ShapeDtypeStruct(array.shape[1:], array.dtype)
