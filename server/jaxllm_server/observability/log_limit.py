"""Rate limit for log lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

SECONDS = 10.0
_MOST_LINES = 64  # lines with a request id do not recur


class RateLimitFilter(logging.Filter):
    """Passes each line of some loggers once per ten seconds, and counts suppressed ones.

    For handlers: filters of loggers would outlive the handler.
    """

    def __init__(self, *names: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._names = names
        self._clock = clock
        self._lines: dict[str, tuple[float, int]] = {}  # line -> (time written, repetitions suppressed since)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record. Without a lock: only the event loop writes these."""
        if record.name not in self._names or record.exc_info:
            return True
        line, now = record.getMessage(), self._clock()
        written, num_left_out = self._lines.pop(line, (now - SECONDS, 0))
        if now - written < SECONDS:
            self._lines[line] = written, num_left_out + 1
            return False
        if num_left_out:
            record.msg, record.args = f"{line} (repetitions not shown: {num_left_out})", None
        self._lines[line] = now, 0
        if len(self._lines) > _MOST_LINES:
            del self._lines[next(iter(self._lines))]
        return True
