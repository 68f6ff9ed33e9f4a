"""Tensors of a weight update, checked and read as those of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.checkpoints.checkpoint import FLOATS, Tensor
from jaxllm.checkpoints.sources import Source, by_name, find_pieces, is_unread, shapes_of, usual_name, with_head
from jaxllm.errors import UserError
from jaxllm.families.family import Family
from jaxllm.model.decoder import Params
from jaxllm.model.head import Head
from jaxllm.model.parameters import Weight

Key = tuple[int | None, str]  # layer and name of a weight
_NAMES = {dtype: name for name, dtype in FLOATS.items()}


@dataclass(frozen=True)
class GivenTensor(Tensor):
    """An array in the place of a stored tensor."""

    array: Any = None

    def values(self) -> np.ndarray:
        return np.asarray(self.array)

    def release(self) -> None:
        """Do nothing: the caller owns the array."""

    def copied(self) -> GivenTensor:
        return replace(self, array=np.array(self.array))


class ExpectedTensors:
    """The tensors of a model, without the family's prefix."""

    def __init__(self, declared: Params[Weight], family: Family, head: Head | None) -> None:
        self._declared = declared
        self._family = with_head(family, head)
        self._is_tied = head is None and "head" not in declared.top
        self.weights = by_name(declared)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.names: dict[Key, frozenset[str]] = {}
        for key, weight in self.weights.items():
            own = shapes_of(weight, self._family, key[0])
            self._shapes |= own
            self.names[key] = frozenset(own)

    def check(self, arrays: Mapping[str, Any]) -> dict[str, GivenTensor]:
        """Return the tensors by name without prefix; raise UserError for an unknown or unsuitable one."""
        if not isinstance(arrays, Mapping):
            message = f"weights are a folder or a mapping from names to arrays, not {type(arrays).__name__}."
            raise UserError(message, "weights")
        if self._family.stored is not None:
            method = self._family.stored.method
            raise UserError(f"the model's checkpoint is quantized ({method}): update it from a folder.", "weights")
        found: dict[str, GivenTensor] = {}
        head = None
        for name, array in arrays.items():
            usual = usual_name(name, self._family) if isinstance(name, str) else name
            if usual in found:
                raise UserError(f"tensor {name} is given twice, with and without a prefix.", "weights")
            if usual in self._shapes:
                found[usual] = _tensor(name, array, self._shapes[usual])
            elif not isinstance(name, str) or not is_unread(usual, self._declared, self._family):
                raise UserError(f"the model has no tensor {name!r:.200}.", "weights")
            elif self._is_tied and usual == self._family.tensors["head"]:
                head = array
        if head is not None:
            tied = self._family.tensors["embed"]
            if tied not in found or not np.array_equal(np.asarray(head), found[tied].values()):
                message = f"the model ties its head to {tied}: give equal tensors together, or no head."
                raise UserError(message, "weights")
        return found

    def missing(self, names: Iterable[str]) -> list[str]:
        return sorted(self._shapes.keys() - set(names))

    def pieces(self, key: Key, tensors: Mapping[str, Tensor]) -> tuple[tuple[Source, ...], ...]:
        return find_pieces(self.weights[key], self._family, tensors, key[0])[1]


def _tensor(name: str, array: Any, shape: tuple[int, ...]) -> GivenTensor:
    own, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
    if own is None or dtype is None:
        raise UserError(f"tensor {name} must be an array, not {type(array).__name__}.", "weights")
    if tuple(own) != shape:
        raise UserError(f"tensor {name} has shape {list(own)}, the model's is {list(shape)}.", "weights")
    if isinstance(array, jax.Array) and array.is_deleted():
        raise UserError(f"the array of tensor {name} was deleted, for example donated to a program.", "weights")
    try:
        kind = _NAMES[np.dtype(dtype)]
    except (TypeError, KeyError):
        raise UserError(f"tensor {name} has type {dtype}; only {', '.join(FLOATS)} can be read.", "weights") from None
    return GivenTensor(name, Path("the update"), kind, tuple(own), 0, 0, None, array)  # pyright: ignore[reportArgumentType]
