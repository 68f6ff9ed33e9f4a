"""Adapter calls of servers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from jaxllm import combinations
from jaxllm.engine.features.adapters.calls import AdapterCalls
from jaxllm.engine.features.adapters.store import Adapter, Known
from jaxllm.engine.model_info import ModelInfo
from jaxllm.lora_request import LoRARequest


class AdapterClient(Protocol):
    """The adapter calls of `EngineClient`."""

    def find_adapter(self, lora_request: LoRARequest) -> Adapter | None:
        """Return an adapter in memory; None if it must be read."""
        ...

    def known_adapter(self, lora_request: LoRARequest) -> Known | None:
        """Return the record of an adapter that was read, in memory or not."""
        ...

    def forget_adapter(self, lora_id: int) -> bool: ...

    def read_adapter(self, lora_request: LoRARequest) -> Adapter:
        """Read an adapter, slowly; raise UserError if it is invalid. Thread-safe."""
        ...

    async def add_lora(self, lora_request: LoRARequest) -> bool: ...

    async def remove_lora(self, lora_id: int) -> bool: ...

    async def list_loras(self) -> set[int]: ...


class SteppedAdapterClient(Protocol):
    """The adapter calls of `SteppedEngine`."""

    def model_of(self, lora_request: LoRARequest | None) -> ModelInfo: ...


class AsyncAdapterCalls(ABC):
    """`AdapterClient` on one engine, with slow work off the event loop."""

    @property
    @abstractmethod
    def engine(self) -> AdapterCalls:
        """The engine; raises UnavailableError while it is loading."""

    @abstractmethod
    async def off_loop(self, function: Callable[..., Any], *arguments: Any, language: bytes | None = None) -> Any:
        """See `EngineClient.off_loop`."""

    def find_adapter(self, lora_request: LoRARequest) -> Adapter | None:
        return self.engine.adapters.find(lora_request)

    def known_adapter(self, lora_request: LoRARequest) -> Known | None:
        return self.engine.adapters.known(lora_request)

    def forget_adapter(self, lora_id: int) -> bool:
        return self.engine.remove_lora(lora_id)

    def read_adapter(self, lora_request: LoRARequest) -> Adapter:
        return self.engine.adapters.get(lora_request)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        return await self.off_loop(self.engine.add_lora, lora_request, language=b"")

    async def remove_lora(self, lora_id: int) -> bool:
        return self.forget_adapter(lora_id)

    async def list_loras(self) -> set[int]:
        return self.engine.list_loras()


class NoAdapters:
    """`AdapterClient` for a fleet, which has no adapters."""

    def find_adapter(self, lora_request: LoRARequest) -> Adapter | None:
        raise combinations.refusal("lora_request", combinations.FLEET)

    def known_adapter(self, lora_request: LoRARequest) -> Known | None:
        """Return None."""

    def forget_adapter(self, lora_id: int) -> bool:
        return False

    def read_adapter(self, lora_request: LoRARequest) -> Adapter:
        raise combinations.refusal("lora_request", combinations.FLEET)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        raise combinations.refusal("lora_request", combinations.FLEET)

    async def remove_lora(self, lora_id: int) -> bool:
        return False

    async def list_loras(self) -> set[int]:
        return set()
