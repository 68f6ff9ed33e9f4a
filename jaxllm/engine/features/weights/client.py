"""Calls of servers that sleep, wake and update weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, Protocol

from jaxllm import combinations
from jaxllm.engine.features.weights.calls import WeightCalls, Weights
from jaxllm.engine.features.weights.rows import FIRST_VERSION
from jaxllm.engine.life_cycle import PauseMode


class WeightClient(Protocol):
    """See `WeightCalls`."""

    async def sleep(self, level: int = 1, tags: Iterable[str] | None = None, *, mode: PauseMode = "abort") -> None: ...

    async def wake_up(self, tags: Iterable[str] | None = None) -> None: ...

    async def is_sleeping(self) -> bool: ...

    async def init_weight_transfer_engine(self, backend: str = "safetensors") -> None: ...

    async def start_weight_update(self) -> None: ...

    async def check_piece(self, shapes: Mapping[str, Any]) -> None: ...

    async def update_weights(self, weights: Weights, *, weight_version: str | None = None) -> str: ...

    async def finish_weight_update(self, weight_version: str | None = None) -> str: ...

    async def get_weight_version(self) -> str: ...


class AsyncWeightCalls(ABC):
    """`WeightClient` for one engine, which refuses requests asleep; during an update they wait."""

    _sleeps = False  # until `wake_up`

    @abstractmethod
    async def _call(self, function: Callable[[Any], Any]) -> Any:
        """Call a function with the engine, in its thread, and return the result."""

    @abstractmethod
    async def pause(self, mode: PauseMode = "abort", clear_cache: bool | None = None) -> None:
        """See `EngineClient.pause`."""

    @abstractmethod
    async def _continue(self) -> None:
        """Take requests again."""

    async def sleep(self, level: int = 1, tags: Iterable[str] | None = None, *, mode: PauseMode = "abort") -> None:
        """See `WeightCalls.sleep`; the outputs of aborted requests go to their readers."""

        def check(engine: WeightCalls) -> None:
            engine.check_sleep(level, tags)

        await self._call(check)
        await self.pause(mode)
        self._sleeps = True

        def sleep(engine: WeightCalls) -> None:
            engine.sleep(level, tags, mode="keep")

        await self._call(sleep)

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """See `WeightCalls.wake_up`."""
        await self._call(lambda engine: engine.wake_up(tags))
        await self._continue_if_awake()

    async def is_sleeping(self) -> bool:
        return await self._call(lambda engine: engine.is_sleeping())

    async def init_weight_transfer_engine(self, backend: str = "safetensors") -> None:
        """See `WeightCalls.init_weight_transfer_engine`."""
        await self._call(lambda engine: engine.init_weight_transfer_engine(backend))

    async def start_weight_update(self) -> None:
        """See `WeightCalls.start_weight_update`."""
        await self._call(lambda engine: engine.start_weight_update())

    async def check_piece(self, shapes: Mapping[str, Any]) -> None:
        """See `WeightCalls.check_piece`."""
        await self._call(lambda engine: engine.check_piece(shapes))

    async def update_weights(self, weights: Weights, *, weight_version: str | None = None) -> str:
        """See `WeightCalls.update_weights`."""
        version = await self._call(lambda engine: engine.update_weights(weights, weight_version=weight_version))
        await self._continue_if_awake()
        return version

    async def finish_weight_update(self, weight_version: str | None = None) -> str:
        """See `WeightCalls.finish_weight_update`."""
        version = await self._call(lambda engine: engine.finish_weight_update(weight_version))
        await self._continue_if_awake()
        return version

    async def get_weight_version(self) -> str:
        return await self._call(lambda engine: engine.get_weight_version())

    async def _continue_if_awake(self) -> None:
        if self._sleeps and await self._call(lambda engine: engine.held is None):
            self._sleeps = False
            await self._continue()


class NoWeightCalls:
    """`WeightClient` for a fleet, which neither sleeps nor updates weights."""

    async def sleep(self, level: int = 1, tags: Iterable[str] | None = None, *, mode: PauseMode = "abort") -> None:
        _refuse()

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        _refuse()

    async def is_sleeping(self) -> bool:
        return False

    async def init_weight_transfer_engine(self, backend: str = "safetensors") -> None:
        _refuse()

    async def start_weight_update(self) -> None:
        _refuse()

    async def check_piece(self, shapes: Mapping[str, Any]) -> None:
        _refuse()

    async def update_weights(self, weights: Weights, *, weight_version: str | None = None) -> str:
        _refuse()

    async def finish_weight_update(self, weight_version: str | None = None) -> str:
        _refuse()

    async def get_weight_version(self) -> str:
        return FIRST_VERSION


def _refuse() -> NoReturn:
    raise combinations.refusal("enable_sleep_mode", combinations.FLEET)
