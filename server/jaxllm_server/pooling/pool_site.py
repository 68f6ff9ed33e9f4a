"""`PoolSite`: the part of `Serving` that pooling uses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from jaxllm.engine.engine_client import EngineClient
from jaxllm_server.access.client_quota import Shares
from jaxllm_server.access.ledger import Ledger
from jaxllm_server.shared.options import ServerOptions

Item = TypeVar("Item")


class PoolSite(Protocol):
    """A server's engine, options, model names and limits."""

    engine: EngineClient
    options: ServerOptions
    names: tuple[str, ...]
    shares: Shares  # of sequences, by client
    ledger: Ledger

    def check_model(self, name: str, adapter: str = "") -> str: ...

    def check_text(self, name: str, value: str | None) -> None:
        """Raise UserError if a value is too long or has special characters."""

    def owner_of(self, client: str) -> str: ...

    def salt_of(self, client: str, given: str | None) -> dict[str, str]: ...

    def priority_of(self, client: str, priority: int, num_outputs: int) -> AbstractContextManager[int]: ...

    async def off_loop(
        self, client: str, function: Callable[..., Item], *arguments: Any, language: bytes | None = None
    ) -> Item: ...
