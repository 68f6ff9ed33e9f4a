"""Replace a runner's weights one by one, each old array before its successor is allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxllm.checkpoints import orbax_checkpoint, weights
from jaxllm.checkpoints.described import describe
from jaxllm.checkpoints.given_tensors import ExpectedTensors, GivenTensor, Key
from jaxllm.checkpoints.sources import open_sources
from jaxllm.config import EngineConfig
from jaxllm.errors import UserError
from jaxllm.model import stages
from jaxllm.model.decoder import Params
from jaxllm.runner.step_model import Leaves
from jaxllm.setup.model_setup import Setup

Holes = list[jax.Array | None]  # the leaves of the parameters; None: no array yet


class WeightUpdate:
    """One update. `take` returns the current leaves, which the runner gives up, before the first is replaced."""

    def __init__(
        self, config: EngineConfig, setup: Setup, described: Params[jax.ShapeDtypeStruct], take: Callable[[], Holes]
    ) -> None:
        self._config = config
        self._setup = setup
        self._take = take
        own = setup.spec, setup.layout, config.quantization, setup.head, setup.family
        self._declared = weights.declared_weights(*own)
        self._expected = ExpectedTensors(self._declared, setup.family, setup.head)
        count = len(jax.tree.leaves(described))
        numbered: Params[Any] = jax.tree.unflatten(jax.tree.structure(described), range(count))
        layers = [*enumerate(stages.each_layer(numbered.layers, setup.layout))]
        self._places: dict[Key, list[int]] = {
            (layer, name): jax.tree.leaves(leaf)
            for layer, own in [(None, numbered.top), *layers]
            for name, leaf in own.items()
        }
        self._pending: dict[str, GivenTensor] = {}  # of incomplete weights
        self._given: set[str] = set()
        self._leaves: Holes | None = None
        self.folder: Path | None = None

    @property
    def has_begun(self) -> bool:
        return self._leaves is not None

    def missing(self, further: Mapping[str, Any] | None = None) -> list[str]:
        return self._expected.missing(self._given | (further or {}).keys())

    def check(self, arrays: Mapping[str, Any]) -> dict[str, GivenTensor]:
        """Return the tensors to `write`; raise UserError, changing nothing, if one is unknown or unsuitable."""
        return self._expected.check(arrays)

    def write(self, tensors: Mapping[str, GivenTensor]) -> None:
        """Replace each weight with complete tensors; copy other tensors, which wait."""
        pending = {**self._pending, **tensors}
        self.folder = None
        for key, names in self._expected.names.items():
            if not names.isdisjoint(tensors) and names <= pending.keys():
                self._replace(key, self._expected.pieces(key, pending))
        self._given |= tensors.keys()
        complete = {name for names in self._expected.names.values() if names <= pending.keys() for name in names}
        self._pending = {
            name: tensor.copied() if name in tensors else tensor
            for name, tensor in pending.items()
            if name not in complete
        }

    def read(self, folder: Path) -> None:
        """Replace all weights by a folder's; raise UserError, changing nothing, if it is unsuitable."""
        config, setup = self._config, self._setup
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}.", "weights")
        if orbax_checkpoint.is_here(folder):
            raise UserError(f"{folder} is an Orbax checkpoint; an update reads safetensors.", "weights")
        described = describe(folder, config.max_model_len, config.runner, config.pooler_config)
        given = described.spec, described.head, described.family.stored
        if given != (setup.spec, setup.head, setup.family.stored):
            raise UserError(f"{folder} has another model than the engine: their config.json differ.", "weights")
        sources = open_sources(folder, self._declared, setup.family, setup.head)
        for key in self._expected.weights:
            self._replace(key, sources[key])
        self._pending.clear()
        self._given = {name for names in self._expected.names.values() for name in names}
        self.folder = folder

    def finished(self) -> Holes:
        """Return the new leaves; a draft model's are unchanged."""
        assert self._leaves is not None
        return self._leaves

    def _replace(self, key: Key, pieces: Any) -> None:
        if self._leaves is None:
            self._leaves = self._take()
        setup = self._setup
        here, kept = setup.layout.of_layer(key[0]), []
        for place in self._places[key]:
            kept.append(stages.on_others(self._leaves[place], here))
            self._leaves[place] = None
        made: Leaves = tuple(
            jax.tree.leaves(weights.read_weight(self._expected.weights[key], pieces, here, setup.dtype))
        )
        for place, leaf, others in zip(self._places[key], jax.block_until_ready(made), kept, strict=True):
            self._leaves[place] = leaf if here is setup.layout else stages.with_others(leaf, others, setup.layout)
