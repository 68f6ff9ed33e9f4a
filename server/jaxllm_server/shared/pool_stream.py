"""A client's stream of texts: each is a call of its own, begun when there is room and answered when it is computed.

Knows nothing of messages, status codes or connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, TypeVar

from jaxllm.errors import OverloadedError, RequestFailedError, UserError
from jaxllm_server.shared import pooling
from jaxllm_server.shared.pool_calls import PoolCall, PoolResult

if TYPE_CHECKING:
    from jaxllm_server.shared.serving import Serving

Request = TypeVar("Request")
Failure: TypeAlias = UserError | RequestFailedError


class Answer(NamedTuple, Generic[Request]):
    """What became of a request."""

    index: int  # from 0, in the order of the requests
    request: Request
    outcome: PoolResult | Failure


async def answers(
    serving: Serving, requests: AsyncIterator[Request], read: Callable[[Request], PoolCall], client: str
) -> AsyncGenerator[Answer[Request]]:
    """Answer each request of one input, in any order; what is wrong with one is its own answer.

    No more requests are asked for than can be under way together, answers that were not taken included; a full queue
    is waited for.
    """
    queue: asyncio.Queue[Answer[Request] | None] = asyncio.Queue()
    has_moved = asyncio.Event()
    num_open = num_asked = 0

    async def answer(index: int, request: Request) -> None:
        try:
            outcome = await _pooled(serving, read(request))
        except (UserError, RequestFailedError) as error:
            error.args = (f"Input {index}: {error}",)
            outcome = error
        queue.put_nowait(Answer(index, request, outcome))

    async def ask() -> None:
        nonlocal num_open, num_asked
        async with asyncio.TaskGroup() as tasks:
            async for request in requests:
                while not pooling.has_room(serving, client, num_open):
                    has_moved.clear()
                    await has_moved.wait()
                tasks.create_task(answer(num_asked, request))
                num_asked, num_open = num_asked + 1, num_open + 1
                await asyncio.sleep(0)  # it takes its place

    num_given = 0
    asking = asyncio.create_task(ask())
    asking.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (item := await queue.get()) is not None:
            yield item
            num_given, num_open = num_given + 1, num_open - 1
            has_moved.set()
        failures = asking.exception()
        if isinstance(failures, ExceptionGroup):
            raise failures.exceptions[0]
        if num_given < num_asked:  # a task was cancelled by nobody that we know
            raise RequestFailedError(f"{num_asked - num_given} inputs were not answered.")
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def _pooled(serving: Serving, call: PoolCall) -> PoolResult:
    while True:
        try:
            async with aclosing(serving.pool(call)) as results:
                return await anext(results)
        except OverloadedError as error:
            await asyncio.sleep(error.retry_after)
