"""`PoolSite`: the protocol of a server that pools, which `Serving` implements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from jaxllm.engine.engine_client import EngineClient
from jaxllm_server.access.client_quota import Shares
from jaxllm_server.access.ledger import Ledger
from jaxllm_server.shared.options import ServerOptions

Item = TypeVar("Item")


class PoolSite(Protocol):
    """A server's engine, options, names and bounds."""

    engine: EngineClient
    options: ServerOptions
    names: tuple[str, ...]
    shares: Shares  # of sequences, by client
    ledger: Ledger

    def check_model(self, name: str, adapter: str = "") -> str:
        """Return the served name; raises NotFoundError."""
        ...

    def check_text(self, name: str, value: str | None) -> None:
        """Refuse names that are long or unreadable in a log."""

    def owner_of(self, client: str) -> str:
        """Return the scope in which a client's request ids are unique."""
        ...

    def salt_of(self, client: str, given: str | None) -> dict[str, str]:
        """`given` is the client's salt of the prefix cache."""
        ...

    async def off_loop(
        self, client: str, function: Callable[..., Item], *arguments: Any, language: bytes | None = None
    ) -> Item:
        """Use a thread; raises DeadlineError if it takes too long."""
        ...
