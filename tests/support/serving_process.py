"""`jaxllm serve` in a process, as users run it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time

from tests.support.paths import ROOT
from tests.support.sizes import MANY_SLOTS, flags

QUICK = flags(MANY_SLOTS)


class ServingProcess:
    """A server on free ports; `http` and `grpc` are its addresses."""

    module = "jaxllm"
    command: tuple[str, ...] = ("serve", "--port", "0", "--grpc-port", "0", "--log-stats-interval", "0")

    def __init__(
        self, *arguments: str, ready: bool = True, env: dict[str, str] | None = None, module: str | None = None
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module or self.module, *self.command, *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'server'}", **(env or {})},
        )
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.grpc = self.wait_for(r"gRPC on (\S+)")
            self.http = self.wait_for(r"HTTP on (\S+)")
            if ready:
                self.wait_for(r"(ready) after", 120.0)
        except BaseException:
            self.stop()  # no `with` block is entered yet
            raise

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)

    def wait_for(self, pattern: str, seconds: float = 60.0) -> str:
        """Wait for a line of the log; return its first group."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for line in self.log:
                if match := re.search(pattern, line):
                    return match[1]
            if self.process.poll() is not None and not self._reader.is_alive():
                break
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in the log:\n{''.join(self.log)}")

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def wait(self, seconds: float = 60.0) -> int:
        """Wait for the end; return the exit code."""
        code = self.process.wait(seconds)
        self._reader.join(5.0)
        return code

    def stop(self) -> None:
        """Kill the process."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10.0)

    def __enter__(self) -> ServingProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
