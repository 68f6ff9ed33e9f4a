"""The metrics of a fleet: each family once, with the samples of every replica, which the label `engine` tells apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.metrics_core import Metric

from jaxllm.engine.async_llm import AsyncLLM, EngineState
from jaxllm.fleet.fleet_llm import FleetLLM
from jaxllm.fleet.replica import Replica
from jaxllm.metrics import DeviceReport, Load, Metrics
from jaxllm_server.observability.prometheus import FinishedByAdapter, PrometheusObserver


class One:
    """A replica, as an observer reads an engine."""

    def __init__(self, fleet: FleetLLM, replica: Replica) -> None:
        self.config = fleet.config
        self._fleet, self._replica = fleet, replica

    @property
    def model(self) -> Any:
        """The model, which all replicas have."""
        return self._fleet.model

    @property
    def metrics(self) -> Metrics:
        """What it has counted."""
        return self._replica.metrics

    @property
    def state(self) -> EngineState:
        """What it does."""
        return self._replica.state

    def get_load(self) -> Load:
        """Say how busy it is."""
        return self._replica.get_load()

    def device_report(self) -> DeviceReport | None:
        """Say what is compiled there."""
        return self._replica.device_report()


class FleetObserver(PrometheusObserver):
    """An observer of the first replica, with observers of the others."""

    def __init__(self, fleet: FleetLLM, model_name: str, adapters: FinishedByAdapter) -> None:
        ones: list[Any] = [One(fleet, replica) for replica in fleet.replicas]
        super().__init__(ones[0], model_name, adapters)
        others = [PrometheusObserver(one, model_name, adapters, number) for number, one in enumerate(ones[1:], 1)]
        self._others = others
        fleet.observers = [self, *others]

    def collect(self) -> Iterator[Metric]:
        """Give all families."""
        families = {family.name: family for family in super().collect()}
        handled = {family.name for family in self._handled_families()}
        for other in self._others:
            for family in other.collect():
                if family.name in handled:  # of the front ends, which there are once
                    continue
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        yield from families.values()


def observer_of(engine: AsyncLLM, model_name: str, adapters: FinishedByAdapter) -> PrometheusObserver:
    """Make the observer of an engine or of a fleet, and let it be told what happens."""
    if isinstance(engine, FleetLLM):
        return FleetObserver(engine, model_name, adapters)
    engine.observer = observer = PrometheusObserver(engine, model_name, adapters)
    return observer
