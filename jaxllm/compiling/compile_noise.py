"""Remove XLA's harmless error lines from the terminal while it compiles for a GPU.

The autotuner logs `cuda_timer.cc:87] Delay kernel timed out` as an error. A log threshold would hide real errors. The
filter is a process, which survives an abort of this one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Unfinished lines are delayed only if they begin like XLA's log lines.
_FILTER = r"""
import os, re
noise = re.compile(rb"[^\r\n]*cuda_timer\.cc:\d+\] [^\r\n]*[Dd]elay kernel[^\n]*(\n|$)")
begins = re.compile(rb"[EW]?\d[^\r\n]*$")
rest = b""
while piece := os.read(0, 1 << 16):
    rest += piece
    end = 1 + max(rest.rfind(b"\r"), rest.rfind(b"\n"))
    if not begins.match(rest, end):
        end = len(rest)
    os.write(1, noise.sub(b"", rest[:end]))
    rest = rest[end:]
os.write(1, noise.sub(b"", rest))
"""


class StandardError:
    """The process's standard error, with optional filtering."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_wanted = False
        self._num_inside = 0
        self._original = -1

    def hide(self) -> None:
        self._is_wanted = True

    @contextmanager
    def hidden(self, platform: str) -> Iterator[None]:
        """Remove XLA's harmless error lines while the block compiles for a GPU, if `hide` was called. Thread-safe."""
        if not self._is_wanted or platform != "gpu":
            yield
            return
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> None:
        with self._lock:
            self._num_inside += 1
            if self._num_inside > 1:
                return
            sys.stderr.flush()
            try:
                self._original = os.dup(2)
            except OSError:
                self._original = -1
                return
            command = [sys.executable, "-S", "-E", "-c", _FILTER]
            try:
                filtering = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=self._original, start_new_session=True
                )
            except OSError:
                return
            assert filtering.stdin is not None
            os.dup2(filtering.stdin.fileno(), 2)
            filtering.stdin.close()

    def _leave(self) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside and self._original >= 0:
                sys.stderr.flush()
                os.dup2(self._original, 2)  # closes the pipe: the filter writes the rest and exits
                os.close(self._original)


_STANDARD_ERROR = StandardError()
hide, hidden = _STANDARD_ERROR.hide, _STANDARD_ERROR.hidden
