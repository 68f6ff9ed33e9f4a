"""Threads that compute slow masks during steps.

One thread at a time uses a grammar's lexer, which llguidance locks during a mask.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from jaxllm.threads import start_thread

NUM_THREADS = max(1, (os.cpu_count() or 1) - 1)
# Usual grammars take 10 to 200 us, ambiguous ones 100 ms or more.
SLOW_SECONDS = 0.005
MOST_LEAD = 1.0  # thread seconds of earlier use that count
PATIENCE = 16  # fast masks until the engine's loop computes them again


class Pace:
    """Mask durations of one grammar."""

    def __init__(self) -> None:
        self._left = 0
        self.used = 0.0  # thread seconds
        self.is_running = False

    @property
    def is_slow(self) -> bool:
        return self._left > 0

    def note(self, seconds: float) -> None:
        if seconds > SLOW_SECONDS:
            self._left = PATIENCE
        elif self._left:
            self._left -= 1


class Job:
    """A mask being computed."""

    def __init__(self, work: Callable[[], None], words: np.ndarray) -> None:
        self.work = work
        self.words = words  # int32[W], valid when done
        self.is_done = False


class SlowMasks:
    """A thread pool for masks that serves the grammar with the least thread time first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[Pace, deque[Job]] = {}
        self._num_undone = 0
        self._threads: list[threading.Thread] = []

    def begin(self, pace: Pace, work: Callable[[], None], words: np.ndarray) -> Job:
        """Queue `work`, which writes `words` and must not raise."""
        job = Job(work, words)
        with self._changed:
            if self._waiting and pace not in self._waiting:
                least = min(each.used for each in self._waiting)
                pace.used = min(max(pace.used, least), least + MOST_LEAD)
            self._waiting.setdefault(pace, deque()).append(job)
            self._num_undone += 1
        self.start()
        return job

    def start(self) -> None:
        """Start a thread if needed and possible."""
        with self._changed:
            if self._ready() and len(self._threads) < NUM_THREADS:
                with suppress(RuntimeError):
                    self._threads.append(start_thread(self._run, "jaxllm-masks"))

    def wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._num_undone, seconds)

    def close(self) -> None:
        with self._changed:
            self._num_undone -= sum(map(len, self._waiting.values()))
            self._waiting.clear()
            threads = [*self._threads]
        for thread in threads:
            thread.join()

    def _run(self) -> None:
        while (following := self._next()) is not None:
            (pace, job), began = following, time.perf_counter()
            try:
                job.work()
            finally:
                with self._changed:
                    pace.used += time.perf_counter() - began
                    pace.is_running = False
                    job.is_done = True
                    self._num_undone -= 1
                    if sys.exception() is not None:
                        self._threads.remove(threading.current_thread())
                    self._changed.notify_all()

    def _ready(self) -> list[Pace]:
        return [pace for pace in self._waiting if not pace.is_running]

    def _next(self) -> tuple[Pace, Job] | None:
        with self._changed:
            ready = self._ready()
            if not ready:
                self._threads.remove(threading.current_thread())
                return None
            pace = min(ready, key=lambda each: each.used)
            pace.is_running = True
            job = self._waiting[pace].popleft()
            if not self._waiting[pace]:
                del self._waiting[pace]
            return pace, job
