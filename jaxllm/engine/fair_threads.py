"""A thread pool for slow work off one event loop."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")
_NOBODY = object()


class FairThreads:
    """At least two threads, which serve clients in turn.

    `share` limits the threads of a group, by default of each client; the group None is not limited.
    """

    def __init__(
        self,
        num_threads: int,
        name: str,
        share: int | None = None,  # threads of a group; None: all but one
        group_of: Callable[[Any], Hashable] = lambda client: client,
    ) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_free = num_threads
        self._share = num_threads - 1 if share is None else share
        self._group_of = group_of
        self._running: Counter[Hashable] = Counter()  # by group
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}  # by client, in order of service

    async def run(self, client: Hashable, function: Callable[..., Result], *arguments: Any) -> Result:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            self._withdraw(client, turn)
            raise
        try:
            work = loop.run_in_executor(self._pool, function, *arguments)
        except RuntimeError:  # shut down
            self._give_back(client)
            raise
        work.add_done_callback(partial(self._ended, client))
        return await asyncio.shield(work)  # a cancelled caller's thread runs on

    def shutdown(self) -> None:
        self._pool.shutdown(wait=False)

    def _hand_out(self) -> None:
        while self._num_free:
            client = next(filter(self._may_run, self._waiting), _NOBODY)
            if client is _NOBODY:
                return
            turns = self._waiting.pop(client)
            turn = turns.popleft()
            if turns:
                self._waiting[client] = turns
            if turn.done():
                continue  # `_withdraw` runs later
            turn.set_result(None)
            self._num_free -= 1
            self._running[self._group_of(client)] += 1

    def _may_run(self, client: Hashable) -> bool:
        group = self._group_of(client)
        return group is None or self._running[group] < self._share

    def _withdraw(self, client: Hashable, turn: asyncio.Future[None]) -> None:
        if not turn.cancelled():  # granted at the same time
            self._give_back(client)
            return
        turns = self._waiting.get(client, deque())
        if turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[client]

    def _ended(self, client: Hashable, work: asyncio.Future[Any]) -> None:
        work.exception()  # retrieved, or asyncio logs it
        self._give_back(client)

    def _give_back(self, client: Hashable) -> None:
        self._num_free += 1
        group = self._group_of(client)
        self._running[group] -= 1
        if not self._running[group]:
            del self._running[group]
        self._hand_out()
