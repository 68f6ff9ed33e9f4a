"""`Pooling`, the part of `Serving` that pools."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from jaxllm_server.access.client_quota import FairAdmission
from jaxllm_server.pooling import pool_stream, pooling
from jaxllm_server.pooling.pool_calls import PoolCall, PoolResult
from jaxllm_server.pooling.pool_site import PoolSite

Item = TypeVar("Item")


class Pooling:
    """Answers pooling calls, if the model pools."""

    def __init__(self, site: PoolSite) -> None:
        self._site = site
        self._places = FairAdmission()

    @property
    def tasks(self) -> Sequence[str]:
        """The model's tasks; empty if it generates text."""
        model = self._site.engine.model
        return () if model.pooler is None else pooling.tasks_of(model)

    def check_kind(self, pools: bool) -> None:
        pooling.check_kind(self._site.engine.model, self._site.names[0], pools)

    def pool(self, call: PoolCall) -> AsyncGenerator[PoolResult]:
        return pooling.pool(self._site, self._places, call)

    async def stream(
        self, requests: AsyncIterator[Item], read: Callable[[Item], Awaitable[PoolCall]], client: str
    ) -> AsyncGenerator[pool_stream.Answer[Item]]:
        await self._site.engine.check_health()
        return pool_stream.answers(self._site, self.pool, requests, read, client)
