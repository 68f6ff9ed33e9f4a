"""Threads that read adapters and use their tokenizers and templates, for one event loop.

A language has at most one. Two tasks over their limits bar a client from it for a while, but not from reading.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from jaxllm.engine.fair_threads import FairThreads
from jaxllm.text.confinement import MOST_PROCESSES, ConfinedError, exceeded

Result = TypeVar("Result")
_MOST_ENDED = 2  # tasks that exceed limits before refusal …
_REFUSED_SECONDS = 60.0  # … for this long
_MOST_REMEMBERED = 10_000


class LanguageThreads:
    """Runs tasks by language, the digest of an adapter's files; b"" is the reading of adapters."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._threads = FairThreads(MOST_PROCESSES, "jaxllm-adapters", share=1, group_of=lambda pair: pair[0])
        self._clock = clock
        self._ended: dict[tuple[bytes, str | None], tuple[int, float]] = {}

    async def run(
        self, language: bytes, client: str | None, function: Callable[..., Result], *arguments: Any
    ) -> Result:
        pair = language, client

        def work() -> Result:
            self._check(pair)
            try:
                return function(*arguments)
            except ConfinedError:
                self._note(pair)
                raise

        self._check(pair)
        return await self._threads.run(pair, work)

    def shutdown(self) -> None:
        self._threads.shutdown()

    def _check(self, pair: tuple[bytes, str | None]) -> None:
        times, last = self._ended.get(pair, (0, 0.0))
        left = last + _REFUSED_SECONDS - self._clock()
        if times >= _MOST_ENDED and left > 0:
            raise exceeded(f"exceeded its limits {times} times and is refused for {left:.0f} s")

    def _note(self, pair: tuple[bytes, str | None]) -> None:
        if not pair[0]:
            return  # reading is never refused
        now = self._clock()
        times, last = self._ended.pop(pair, (0, now))
        self._ended[pair] = 1 + (times if now < last + _REFUSED_SECONDS else 0), now
        while len(self._ended) > _MOST_REMEMBERED:
            del self._ended[next(iter(self._ended))]
