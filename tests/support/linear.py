"""Whether a function takes time in proportion to its input, on a shared machine."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

LEAST_SECONDS = 0.01  # shorter times are clock noise
TRIES = 4  # neighbours on the machine disturb some tries, not all


def is_linear(prepare: Callable[[int], Callable[[], object]], size: int) -> bool:
    """Return whether twice the size takes less than 2.5 times as long. The time of `prepare` is excluded."""
    return any(_seconds(prepare(2 * size)) < 2.5 * max(_seconds(prepare(size)), LEAST_SECONDS) for _ in range(TRIES))


def pushes_in_linear_time(make: Callable[[], Any], start: str, repeated: str, piece: int) -> bool:
    """Check that a parser reads a repeated text, in pieces of some size, in linear time."""

    def prepare(size: int) -> Callable[[], object]:
        text = start + repeated * (size // len(repeated))
        pieces = [text[at : at + piece] for at in range(0, len(text), piece)]
        parser = make()
        return lambda: ([parser.push(one) for one in pieces], parser.finish())

    return is_linear(prepare, 2**17 if piece > 1 else 2**14)  # a call of `push` costs ten characters' time


def _seconds(work: Callable[[], object]) -> float:
    """Return the processor time of this thread, without the garbage collector.

    Other threads may compile programs of engines from earlier tests.
    """
    gc.disable()
    try:
        began = time.thread_time()
        work()
        return time.thread_time() - began
    finally:
        gc.enable()
