"""The adapters on the devices: separate arrays, passed to a step as arguments.

Adding or removing one compiles nothing and changes no array of a step in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np

from jaxllm.model.lora import Adapter

Leaves = tuple[jax.Array, ...]
Weights = Callable[[int], Adapter[np.ndarray]]  # by an adapter's number


class ResidentAdapters:
    """Adapters of one padded shape, by number."""

    def __init__(self, described: Adapter[jax.ShapeDtypeStruct]) -> None:
        self._described = tuple(jax.tree.leaves(described))
        self._numbers: tuple[int, ...] = ()
        self._leaves: dict[int, Leaves] = {}
        self._nothing: Leaves = ()

    def hold(self, numbers: tuple[int, ...], weights: Weights) -> int:
        """Keep exactly the adapters `numbers`; return how many were missing. After an exception none remain."""
        if numbers is self._numbers:
            return 0
        kept = {number: self._leaves[number] for number in numbers if number in self._leaves}
        self._leaves, self._numbers = {}, ()
        missing = [number for number in numbers if number not in kept]
        for number in missing:
            kept[number] = self._put(weights(number))
        self._leaves, self._numbers = kept, numbers
        return len(missing)

    def of_rows(self, rows: np.ndarray) -> tuple[int, ...]:
        return tuple(number for number in dict.fromkeys(rows.tolist()) if number)

    def places(self, rows: np.ndarray | None, distinct: Sequence[int], count: int) -> np.ndarray | None:
        """Return each row's index in `distinct`, int32[R]; `count` without an adapter."""
        if rows is None or not count:
            return None
        at = {number: index for index, number in enumerate(distinct)} | {0: count}
        return np.array([at[number] for number in rows.tolist()], np.int32)

    def arguments(self, distinct: Sequence[int], count: int) -> tuple[Leaves, ...]:
        """Return the arrays of `count` adapters for a program: `distinct`, then zeros."""
        if not count:
            return ()
        leaves = [self._leaves[number] for number in distinct]
        return (*leaves, *(self._zeros(),) * (count - len(leaves)))

    def forget(self) -> None:
        self._leaves, self._numbers, self._nothing = {}, (), ()

    def _put(self, weights: Adapter[np.ndarray]) -> Leaves:
        shardings = [leaf.sharding for leaf in self._described]
        return tuple(jax.device_put(jax.tree.leaves(weights), shardings))

    def _zeros(self) -> Leaves:
        if not self._nothing:

            @cache
            def zeros(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.Array:
                return jax.device_put(np.zeros(shape, dtype), sharding)  # `jnp.zeros` would compile a program

            self._nothing = tuple(zeros(leaf.shape, leaf.dtype, leaf.sharding) for leaf in self._described)
        return self._nothing
