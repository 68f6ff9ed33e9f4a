"""Worker processes that may loop, exhaust memory or crash: they limit their own resources when they start."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

TOO_MUCH_MEMORY = "takes too much memory"
TOO_MUCH_TIME = "takes too much processor time"
_START = "import sys; sys.path.insert(0, {!r}); from {} import main; main()"
_ROOT = str(Path(__file__).resolve().parents[1])


class LimitedProcess:
    """A process that runs `main` of a module, and its pipes."""

    def __init__(self, module: str, *arguments: str) -> None:
        command = [sys.executable, "-c", _START.format(_ROOT, module), *arguments]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        # Unaffected by Ctrl-C.
        self._popen = subprocess.Popen(command, bufsize=0, start_new_session=True, **pipes)
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._input, self._output = self._popen.stdin, self._popen.stdout
        self._answers = select.poll()
        self._answers.register(self._output, select.POLLIN)

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def write(self, data: bytes) -> None:
        """Send bytes; raise BrokenPipeError if the process has ended."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._input.write(rest) :]

    def read(self, length: int, give_up: float) -> bytearray:
        """Return the next bytes; raise EOFError if the process has ended, TimeoutError at a time of the clock."""
        read = bytearray()
        while len(read) < length:
            left = give_up - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if self._answers.poll(1000 * left):
                piece = os.read(self._output.fileno(), min(length - len(read), 2**20))
                if not piece:
                    raise EOFError
                read += piece
        return read

    def why_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            if self._popen.wait(5) in (-signal.SIGPROF, -signal.SIGXCPU):
                return TOO_MUCH_TIME
        return f"{TOO_MUCH_MEMORY}, or crashes"

    def end(self) -> None:
        with suppress(OSError):
            self._popen.kill()
        self._popen.wait()
        self._input.close()
        self._output.close()
