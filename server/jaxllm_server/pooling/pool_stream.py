"""Answers a client's stream of pooling requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from jaxllm.errors import OverloadedError, RequestFailedError, UserError
from jaxllm_server.access.ledger import REQUESTS, Ledger
from jaxllm_server.pooling import pooling
from jaxllm_server.pooling.pool_calls import PoolCall, PoolResult
from jaxllm_server.pooling.pool_site import PoolSite

Request = TypeVar("Request")
Failure: TypeAlias = UserError | RequestFailedError
Read: TypeAlias = Callable[[Request], Awaitable[PoolCall]]
Pool: TypeAlias = Callable[[PoolCall], AsyncGenerator[PoolResult]]


class Answer(NamedTuple, Generic[Request]):
    """A request's outcome."""

    index: int
    request: Request
    outcome: PoolResult | Failure


async def answers(
    serving: PoolSite,
    pool: Pool,
    requests: AsyncIterator[Request],
    read: Read[Request],
    client: str,
) -> AsyncGenerator[Answer[Request]]:
    """Yield the outcome of each request, of one input, in any order; an invalid request yields its error.

    Stops reading `requests` while the queue is full. Answers not yet consumed count as running.
    """
    queue: asyncio.Queue[Answer[Request] | Exception | None] = asyncio.Queue()
    tasks: set[asyncio.Task[None]] = set()
    has_moved = asyncio.Event()
    num_open = num_asked = 0

    async def answer(index: int, request: Request) -> None:
        try:
            outcome = await _pooled(serving.ledger, pool, read, request)
        except (UserError, RequestFailedError) as error:
            error.args = (f"Input {index}: {error}",)
            outcome = error.with_traceback(None)
        queue.put_nowait(Answer(index, request, outcome))

    async def ask() -> None:
        nonlocal num_open, num_asked
        async for request in requests:
            while not pooling.has_room(serving, client, num_open):
                has_moved.clear()
                await has_moved.wait()
            begin(answer(num_asked, request))
            num_asked, num_open = num_asked + 1, num_open + 1
            await asyncio.sleep(0)  # lets the task enter the queue
        queue.put_nowait(None)

    def begin(work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(end)

    def end(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        failure = RequestFailedError("An input was not answered.") if task.cancelled() else task.exception()
        if isinstance(failure, Exception):
            queue.put_nowait(failure)

    item, num_given, has_all = None, 0, False
    begin(ask())
    try:
        while not has_all or num_given < num_asked:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                has_all = True
                continue
            yield item
            num_given, num_open = num_given + 1, num_open - 1
            has_moved.set()
    finally:
        item = None  # breaks a reference cycle
        left = list(tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def _pooled(ledger: Ledger, pool: Pool, read: Read[Request], request: Request) -> PoolResult:
    call = None
    while True:
        try:
            call = call or await read(request)
            with ledger.entry(call.client) as entry:
                entry.charge(REQUESTS, 2 * sum(map(len, call.inputs)))
                async with aclosing(pool(call)) as results:
                    return await anext(results)
        except OverloadedError as error:
            await asyncio.sleep(error.retry_after)
