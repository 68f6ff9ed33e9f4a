"""Keeps meaningless lines of XLA from the terminal while it compiles for a GPU.

XLA's tuner writes `cuda_timer.cc:87] Delay kernel timed out` as an error where a measurement is less exact than it
could be. A threshold would hide errors with it, so standard error goes through another process, which removes only
these lines and survives an abort of this one. The command line alone uses it: a library must not replace standard
error.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# An unfinished line is held back only if it begins like a line of XLA's log.
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
    """The process's standard error, from which lines can be filtered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_wanted = False
        self._num_inside = 0  # threads in `hidden`
        self._original = -1  # while it is replaced

    def hide(self) -> None:
        """From now on `hidden` hides lines."""
        self._is_wanted = True

    @contextmanager
    def hidden(self, platform: str) -> Iterator[None]:
        """Hide those lines while the block compiles; threads may be inside at once. Nothing is done without `hide`."""
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
            except OSError:  # no descriptor is free: the lines are printed
                self._original = -1
                return
            command = [sys.executable, "-S", "-E", "-c", _FILTER]
            try:
                filtering = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=self._original, start_new_session=True
                )
            except OSError:  # no process can be started: the lines are seen
                return
            assert filtering.stdin is not None
            os.dup2(filtering.stdin.fileno(), 2)
            filtering.stdin.close()

    def _leave(self) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside and self._original >= 0:
                sys.stderr.flush()
                os.dup2(self._original, 2)  # closes the pipe: the other process writes the rest, and ends
                os.close(self._original)


_STANDARD_ERROR = StandardError()
hide, hidden = _STANDARD_ERROR.hide, _STANDARD_ERROR.hidden
