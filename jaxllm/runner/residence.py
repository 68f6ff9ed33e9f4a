"""A runner's weights and state may leave the device and return; programs stay."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxllm.config import EngineConfig
from jaxllm.model.decoder import Params
from jaxllm.runner.host_tier import HostTier
from jaxllm.runner.step_model import Leaves
from jaxllm.runner.weight_update import Holes, WeightUpdate
from jaxllm.setup.kv_cache import host_memory_kind
from jaxllm.setup.model_setup import Setup

WEIGHTS, KV_CACHE = TAGS = ("weights", "kv_cache")


class Residence(ABC):
    """The part of a runner that sleeps, wakes and takes in other weights."""

    setup: Setup
    _config: EngineConfig
    _params_shapes: Params[jax.ShapeDtypeStruct]
    _params: Leaves  # () away from the device
    _state: Leaves
    _host: HostTier | None
    _away: Holes  # weights on the host, or of an unfinished update
    _is_mixed: bool  # `_away` has weights of two versions
    _can_read: bool  # False: weights were given as arrays
    _folder: Path | None  # None: random weights

    @abstractmethod
    def renew(self) -> None:
        """Allocate the state."""

    @abstractmethod
    def _load(self, folder: Path | None, progress: bool) -> Params[jax.Array]:
        """Read or draw all weights, including a draft model's."""

    @abstractmethod
    def _load_draft(self, progress: bool) -> Any:
        """Read or draw the weights of the draft model; return None without one."""

    @abstractmethod
    def _drop_state(self) -> None:
        """Free the device's memory of all but weights."""

    @property
    def has_weights(self) -> bool:
        return bool(self._params)

    def sleep(self, tags: Collection[str], level: int) -> None:
        """Free the device's memory of `tags`: level 1 moves the weights to the host, 2 drops them."""
        with suppress(Exception):
            jax.block_until_ready(self._state)
        if KV_CACHE in tags:
            self._drop_state()
        if WEIGHTS in tags:
            if level == 1 and self._params:
                self._away = [*jax.block_until_ready(jax.device_put([*self._params], [*map(_on_host, self._params)]))]
            elif level == 2:
                self._away, self._is_mixed = [], False
            self._params = ()
        self.forget_host()

    def wake_weights(self) -> bool:
        """Bring the weights back; return False if an update failed, or if they were arrays and were dropped."""
        if self._params or self._is_mixed:
            return self.has_weights
        if self._away:
            self._params = tuple(jax.block_until_ready([*map(_put, self._away, self._described)]))
        elif self._can_read:
            self._params = tuple(jax.tree.leaves(self._load(self._folder, progress=False)))
        self._away = []
        return self.has_weights

    def begin_update(self) -> WeightUpdate:
        return WeightUpdate(self._config, self.setup, self._params_shapes, self._take)

    def end_update(self, update: WeightUpdate) -> None:
        leaves, count = update.finished(), len(jax.tree.leaves(replace(self._params_shapes, draft=None)))
        if any(leaf is None for leaf in leaves[count:]):  # dropped at level 2
            leaves[count:] = jax.tree.leaves(self._load_draft(progress=False))
        self._params = tuple(jax.block_until_ready([*map(_put, leaves, self._described)]))
        self._away, self._is_mixed = [], False
        self._can_read, self._folder = update.folder is not None, update.folder
        self.forget_host()

    def forget_host(self) -> None:
        """Free the host's copies of KV blocks; the scheduler's record of them must be reset."""
        if self._host is not None:
            self._host.forget()

    @property
    def _described(self) -> list[jax.ShapeDtypeStruct]:
        return jax.tree.leaves(self._params_shapes)

    def _take(self) -> Holes:
        self._away = list(self._params) or self._away or [None] * len(self._described)
        self._params, self._is_mixed = (), True
        return self._away


def _on_host(array: jax.Array) -> NamedSharding:
    assert isinstance(array.sharding, NamedSharding)
    (device, *_) = array.sharding.device_set
    return array.sharding.with_memory_kind(host_memory_kind(device))


def _put(array: Any, described: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.device_put(array, described.sharding)
