"""`Pooling`, the part of `Serving` that embeds, classifies and scores. Independent of protocols."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import TypeVar

from jaxllm_server.access.client_quota import FairPlaces
from jaxllm_server.pooling import pool_stream, pooling
from jaxllm_server.pooling.pool_calls import PoolCall, PoolResult
from jaxllm_server.pooling.pool_site import PoolSite

Item = TypeVar("Item")


class Pooling:
    """Answers the pooling calls of one server, and refuses them if the model generates."""

    def __init__(self, site: PoolSite) -> None:
        self._site = site
        self._places = FairPlaces()

    @property
    def tasks(self) -> Sequence[str]:
        """The tasks of a model that pools; empty if the model generates."""
        model = self._site.engine.model
        return () if model.pooler is None else pooling.tasks_of(model)

    def check_kind(self, pools: bool) -> None:
        """Refuse to generate with a model that pools, or to pool with one that generates."""
        pooling.check_kind(self._site.engine.model, self._site.names[0], pools)

    def pool(self, call: PoolCall) -> AsyncGenerator[PoolResult]:
        """Embed, classify or score a call's inputs. Closing the iterator aborts the remaining ones."""
        return pooling.pool(self._site, self._places, call)

    async def stream(
        self, requests: AsyncIterator[Item], read: Callable[[Item], PoolCall], client: str
    ) -> AsyncGenerator[pool_stream.Answer[Item]]:
        """Return the answers to a client's stream of requests, if the engine is healthy."""
        await self._site.engine.check_health()
        return pool_stream.answers(self._site, self.pool, requests, read, client)
