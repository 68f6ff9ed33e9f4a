"""The adapters feature: the adapters of requests and steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.checkpoints.lora_files import LoraFiles
from jaxllm.engine.accepted import Accepted
from jaxllm.engine.features.adapters.store import Adapter, Adapters, weights_reader
from jaxllm.engine.features.feature import Core, Feature
from jaxllm.engine.sequence import Sequence, SequenceGroup
from jaxllm.runner.step_input import StepInput
from jaxllm.scheduler.state import State


class AdapterTexts(Feature):
    """The feature without `enable_lora`: refuses every adapter."""

    name = "adapters"
    options = ("lora_request",)

    def __init__(self, core: Core, make_store: Callable[[Core], Adapters] | None = None) -> None:
        super().__init__(core)
        self.store = _store_of(core) if make_store is None else make_store(core)

    def thread_of(self, options: Mapping[str, Any]) -> bytes | None:
        """Return b"" if the adapter must be read, else `confined` of its tokenizer."""
        request = options.get("lora_request")
        if request is None:
            return None
        adapter = self.store.find(request)
        return b"" if adapter is None else adapter.language.model.tokenizer.confined

    def claim(self, accepted: Accepted) -> None:
        request = accepted.options.get("lora_request")
        if request is not None:
            adapter = self.store.get(request)
            accepted.language, accepted.content = adapter.language, adapter.digest
            accepted.states[self.name] = adapter

    def close(self) -> None:
        self.store.close()


class AdapterRows(AdapterTexts):
    """Passes the adapters of each step to the devices."""

    def __init__(self, core: Core, make_store: Callable[[Core], Adapters] | None = None) -> None:
        super().__init__(core, make_store)
        self._numbers = np.zeros(core.runner.limits.num_slots, np.int64)  # by slot; 0 without an adapter
        self._placed: dict[int, Adapter] = {}  # by number, since the last step with adapters

    def begin(self, accepted: Accepted, group: SequenceGroup) -> None:
        if self.name in accepted.states:
            group.states[self.name] = accepted.states[self.name]

    def schedule(self, sequence: Sequence, fields: dict[str, Any]) -> None:
        adapter: Adapter | None = sequence.group.states.get(self.name)
        if adapter is not None:
            fields["adapter"] = adapter.number

    def place(self, slot: int, sequence: Sequence) -> None:
        adapter: Adapter | None = sequence.group.states.get(self.name)
        self._numbers[slot] = 0 if adapter is None else adapter.number
        if adapter is not None:
            self._placed[adapter.number] = adapter

    def inputs(self, step: StepInput) -> None:
        if step.plan.adapters:
            self.core.runner.hold_adapters(step.plan.adapters, lambda number: self._placed[number].weights)
            step.side["adapters"] = self._numbers[step.plan.slots]
            self._placed.clear()

    def load(self, state: State) -> Mapping[str, Any]:
        running = {record.request.adapter for record in state.running if record is not None}
        waiting = {entry.request.adapter for entry in state.waiting}
        return {
            "running_adapters": tuple(sorted(map(self.store.name_of, running - {0}))),
            "waiting_adapters": tuple(sorted(map(self.store.name_of, waiting - {0}))),
            "deferred": state.num_deferred(self.core.scheduler.limits),
        }


def _store_of(core: Core) -> Adapters:
    def read(folder: Path) -> LoraFiles:
        return weights_reader(core.runner.setup, core.config)(folder)

    return Adapters(core.config, core.language, read)
