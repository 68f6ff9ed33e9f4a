"""`Pooling`, the part of `Serving` that embeds, classifies and scores."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import TypeVar

from jaxllm_server.access.client_quota import FairPlaces
from jaxllm_server.pooling import pool_stream, pooling
from jaxllm_server.pooling.pool_calls import PoolCall, PoolResult
from jaxllm_server.pooling.pool_site import PoolSite

Item = TypeVar("Item")


class Pooling:
    """Answers the pooling calls of a server; refuses them if the model generates."""

    def __init__(self, site: PoolSite) -> None:
        self._site = site
        self._places = FairPlaces()

    @property
    def tasks(self) -> Sequence[str]:
        """Empty if the model generates."""
        model = self._site.engine.model
        return () if model.pooler is None else pooling.tasks_of(model)

    def check_kind(self, pools: bool) -> None:
        pooling.check_kind(self._site.engine.model, self._site.names[0], pools)

    def pool(self, call: PoolCall) -> AsyncGenerator[PoolResult]:
        """Closing the iterator aborts the remaining inputs."""
        return pooling.pool(self._site, self._places, call)

    async def stream(
        self, requests: AsyncIterator[Item], read: Callable[[Item], PoolCall], client: str
    ) -> AsyncGenerator[pool_stream.Answer[Item]]:
        """Raises an error if the engine is unhealthy."""
        await self._site.engine.check_health()
        return pool_stream.answers(self._site, self.pool, requests, read, client)
