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
        """Return the name that answers give; NotFoundError for one that is not served."""
        ...

    def check_text(self, name: str, value: str | None) -> None:
        """Refuse names that are long or would be unreadable in a log."""

    def owner_of(self, client: str) -> str:
        """Return the owner of a client's requests, among which ids are unique."""
        ...

    def salt_of(self, client: str, given: str | None) -> dict[str, str]:
        """Return the salt of a call's prompts in the prefix cache; `given` is the client's."""
        ...

    async def off_loop(
        self, client: str, function: Callable[..., Item], *arguments: Any, language: bytes | None = None
    ) -> Item:
        """Run something slow in a thread; DeadlineError if it takes too long."""
        ...
