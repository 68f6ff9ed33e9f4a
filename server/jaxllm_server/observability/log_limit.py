"""Keeps a log short where any client can make the server repeat a line, without a key even. Knows no server."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

SECONDS = 10.0
_MOST_LINES = 64  # that are remembered; one that names a request comes once anyway


class Seldom(logging.Filter):
    """Lets a line of some loggers through once in ten seconds; the next one says how many like it were left out.

    For a handler: filters of loggers would outlive it.
    """

    def __init__(self, *names: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._names = names
        self._clock = clock
        self._lines: dict[str, tuple[float, int]] = {}  # when each was written, and how often it was not since

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether a line is to be written; takes no lock, as the event loop alone writes these lines."""
        if record.name not in self._names or record.exc_info:
            return True
        line, now = record.getMessage(), self._clock()
        written, num_left_out = self._lines.pop(line, (now - SECONDS, 0))
        if now - written < SECONDS:
            self._lines[line] = written, num_left_out + 1
            return False
        if num_left_out:
            record.msg, record.args = f"{line} ({num_left_out} more such lines were left out)", None
        self._lines[line] = now, 0
        if len(self._lines) > _MOST_LINES:
            del self._lines[next(iter(self._lines))]  # the one that came least recently
        return True
