"""Log of prefix cache changes, for routers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import NamedTuple

from jaxllm.errors import OutOfRangeError
from jaxllm.scheduler.state import BlockEvent, BlockStored

LOGGED_EVENTS = 100_000  # 25 MB


class BlockBatch(NamedTuple):
    """Changes of the prefix cache in one step."""

    sequence: int  # consecutive, from 0
    time: float  # seconds since 1970
    block_size: int  # tokens
    events: tuple[BlockEvent, ...]
    adapters: Mapping[int, str] = {}  # names, by number


class BlockLog:
    """The most recent changes of the prefix cache, for the event loop only."""

    def __init__(self, name_of: Callable[[int], str]) -> None:
        self._name_of = name_of
        self._batches: deque[BlockBatch] = deque()
        self._num_events = 0
        self._next = 0
        self._changed = asyncio.Event()
        self._error: BaseException | None = None

    def append(self, time: float, block_size: int, events: tuple[BlockEvent, ...]) -> None:
        numbers = {event.adapter for event in events if isinstance(event, BlockStored) and event.adapter}
        names = {number: self._name_of(number) for number in numbers}
        self._batches.append(BlockBatch(self._next, time, block_size, events, names))
        self._next += 1
        self._num_events += len(events)
        while self._num_events > LOGGED_EVENTS and len(self._batches) > 1:
            self._num_events -= len(self._batches.popleft().events)
        self._wake()

    def end(self, error: BaseException) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def read(self, start: int) -> AsyncGenerator[BlockBatch]:
        """Yield batches from number `start` on, indefinitely; raise OutOfRangeError if it was discarded."""
        while True:
            first = self._next - len(self._batches)
            if not first <= start <= self._next:
                raise OutOfRangeError(
                    f"batch {start} is not kept; the next one is {self._next}, the first that is kept {first}: forget "
                    "all that was received and begin there.",
                    "start_sequence",
                )
            changed = self._changed
            for batch in [self._batches[number - first] for number in range(start, self._next)]:
                yield batch
                start = batch.sequence + 1
            if start == self._next:
                if self._error is not None:
                    raise self._error
                await changed.wait()
