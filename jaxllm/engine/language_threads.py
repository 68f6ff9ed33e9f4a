"""Threads for the work of adapters: reading one, and the texts of those that bring a tokenizer or a template.

Separate from the threads in which prompts of the model itself are made, so that an adapter never delays those. Each
language has one thread at most, in which clients take turns. Work of a client in a language is refused for a while
after two tasks were ended; reading never is, since one bad adapter must not keep a client from the others. Belongs to
one event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from jaxllm.engine.fair_threads import FairThreads
from jaxllm.text.confinement import MOST_PROCESSES, ConfinedError, exceeded

Result = TypeVar("Result")
_MOST_ENDED = 2  # times that work may be ended before the next is refused …
_REFUSED_SECONDS = 60.0  # … for so long after the last
_MOST_REMEMBERED = 10_000  # languages of clients


class LanguageThreads:
    """Runs work for adapters. A language is named by the digest of its files; b"" is the reading of adapters."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._threads = FairThreads(MOST_PROCESSES, "jaxllm-adapters", share=1, group_of=lambda pair: pair[0])
        self._clock = clock
        self._ended: dict[tuple[bytes, str | None], tuple[int, float]] = {}  # number of ended tasks, time of the last

    async def run(
        self, language: bytes, client: str | None, function: Callable[..., Result], *arguments: Any
    ) -> Result:
        """Run a function in a thread once it is the turn of this language and client."""
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
        """Begin no more work, and do not wait for running work."""
        self._threads.shutdown()

    def _check(self, pair: tuple[bytes, str | None]) -> None:
        times, last = self._ended.get(pair, (0, 0.0))
        left = last + _REFUSED_SECONDS - self._clock()
        if times >= _MOST_ENDED and left > 0:
            raise exceeded(f"exceeded its limits {times} times and is refused for {left:.0f} s")

    def _note(self, pair: tuple[bytes, str | None]) -> None:
        if not pair[0]:
            return  # any adapter may be read there
        now = self._clock()
        times, last = self._ended.pop(pair, (0, now))
        self._ended[pair] = 1 + (times if now < last + _REFUSED_SECONDS else 0), now
        while len(self._ended) > _MOST_REMEMBERED:
            del self._ended[next(iter(self._ended))]
