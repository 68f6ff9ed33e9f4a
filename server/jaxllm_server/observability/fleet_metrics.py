"""Prometheus metrics of several engines."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from jaxllm.engine.engine_client import EngineClient
from jaxllm_server.observability.prometheus import FinishedByAdapter, PrometheusObserver


class FleetObserver(PrometheusObserver):
    """The first engine's observer, which also reports the others."""

    def __init__(self, client: EngineClient, model_name: str, adapters: FinishedByAdapter) -> None:
        first, *others = client.engines
        super().__init__(first, model_name, adapters)
        self._others = [PrometheusObserver(each, model_name, adapters, number) for number, each in enumerate(others, 1)]
        for number, observer in enumerate((self, *self._others)):
            client.add_observer(observer, number)

    def collect(self) -> Iterator[Metric]:
        families = {family.name: family for family in super().collect()}
        handled = {family.name for family in self._handled_families()}
        for other in self._others:
            for family in other.collect():
                if family.name in handled:
                    continue
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        yield from families.values()


def observer_of(client: EngineClient, model_name: str, adapters: FinishedByAdapter) -> PrometheusObserver:
    if len(client.engines) > 1:
        return FleetObserver(client, model_name, adapters)
    observer = PrometheusObserver(client, model_name, adapters)
    client.add_observer(observer)
    return observer
