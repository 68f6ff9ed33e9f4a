"""The features of engines: factories, calls, and data types of fleets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxllm.engine.features.adapters import client as adapters
from jaxllm.engine.features.adapters.calls import AdapterCalls
from jaxllm.engine.features.adapters.rows import AdapterRows, AdapterTexts
from jaxllm.engine.features.beams.rows import BeamSearches
from jaxllm.engine.features.drafts import Drafts
from jaxllm.engine.features.feature import Core, Feature
from jaxllm.engine.features.grammars import GrammarRows
from jaxllm.engine.features.media import Images, NoImages
from jaxllm.engine.features.pooling.client import PoolingClient
from jaxllm.engine.features.pooling.rows import NoPooling, Pooling
from jaxllm.engine.features.scoring import Scoring
from jaxllm.engine.features.sources import Sources
from jaxllm.engine.features.speech.rows import SpeechRows
from jaxllm.engine.features.transfer.feature import KvTransfer, NoTransfer
from jaxllm.engine.features.weights import client as weights
from jaxllm.engine.features.weights.calls import WeightCalls
from jaxllm.engine.features.weights.rows import WeightStates, WeightVersions

Factory = Callable[[Core], Feature | None]  # None: not configured


def _adapters(core: Core) -> Feature:
    return (AdapterRows if core.config.enable_lora else AdapterTexts)(core)


def _pooling(core: Core) -> Feature:
    return (Pooling if _pools(core) else NoPooling)(core)


def _drafts(core: Core) -> Feature | None:
    return None if core.config.speculative_config is None else Drafts(core)


def _weights(core: Core) -> Feature:
    return (WeightVersions if core.config.enable_sleep_mode else WeightStates)(core)


def _transfer(core: Core) -> Feature:
    return (NoTransfer if core.config.kv_transfer_config is None else KvTransfer)(core)


def _media(core: Core) -> Feature | None:
    sources = core.language.model.sources
    if sources is not None and sources.sound is not None:
        return None
    return (NoImages if core.runner.encoder is None else Images)(core)


def _sources(core: Core) -> Feature | None:
    return None if core.language.model.sources is None else Sources(core)


def _speech(core: Core) -> Feature | None:
    sources = core.language.model.sources
    return None if sources is None or sources.sound is None else SpeechRows(core)


def _of_generators(factory: Factory) -> Factory:
    return lambda core: None if _pools(core) else factory(core)


def _pools(core: Core) -> bool:
    return core.language.model.pooler is not None


# By name, in the order of calls.
FEATURES: Mapping[str, Factory] = {
    "adapters": _adapters,
    "media": _media,
    "sources": _sources,
    "pooling": _pooling,
    "beams": _of_generators(BeamSearches),
    "drafts": _of_generators(_drafts),
    "grammars": _of_generators(GrammarRows),
    "speech": _speech,
    "scoring": _of_generators(Scoring),
    "weights": _weights,
    "transfer": _transfer,
}

SENT: tuple[type[Any], ...] = tuple(
    kind for each in (Images, Pooling, BeamSearches, GrammarRows) for kind in each.sends
)


class ClientCalls(adapters.AdapterClient, weights.WeightClient, PoolingClient, Protocol):
    """The calls of features in `EngineClient`."""


class AsyncCalls(adapters.AsyncAdapterCalls, weights.AsyncWeightCalls, PoolingClient):
    """`ClientCalls` of one engine."""


class FleetCalls(adapters.NoAdapters, weights.NoWeightCalls, PoolingClient):
    """`ClientCalls` of a fleet."""


class SteppedClientCalls(adapters.SteppedAdapterClient, Protocol):
    """The calls of features in `SteppedEngine`."""


class SteppedCalls(AdapterCalls, WeightCalls):
    """`SteppedClientCalls` of one engine, with vLLM's."""
