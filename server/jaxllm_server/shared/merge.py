"""Merges asynchronous iterators into one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


async def merge(iterators: Sequence[AsyncGenerator[Item]]) -> AsyncGenerator[tuple[int, Item]]:
    """Yield items as they arrive, with their iterator's index; an exception ends all."""
    queue: asyncio.Queue[tuple[int, Item] | BaseException | None] = asyncio.Queue(maxsize=len(iterators))

    async def read(number: int, iterator: AsyncGenerator[Item]) -> None:
        try:
            async with aclosing(iterator):
                async for item in iterator:
                    await queue.put((number, item))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks: list[asyncio.Task[None]] = []
    num_open = len(iterators)
    try:
        for number, iterator in enumerate(iterators):
            tasks.append(asyncio.ensure_future(read(number, iterator)))
            await asyncio.sleep(0)
        while num_open:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
