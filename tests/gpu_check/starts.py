"""Measure the time until a command answers.

For the 8B shape with compiled programs of earlier parts in the cache, and for the embedded model with an empty cache
and a full one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.gpu_check import shape8b
from tests.gpu_check.check import Check
from tests.support.paths import ROOT

LEAST = {"8B": 45, "embedded": 30}  # seconds needed to begin a start
COVERING, ALL = (["--precompile", when] for when in ("covering", "all"))


def run(check: Check) -> None:
    shape = shape8b.write(check)
    kept, empty = check.folder / "programs", check.folder / "empty"
    whole = ["--model", str(shape.folder), *shape.flags]
    # A dry run has compiled a GPU's table of programs, which differs from the command's table on a CPU.
    start_of(check, "8B, all programs, kept", whole + (COVERING if check.is_dry else ALL), kept, LEAST["8B"])
    start_of(check, "embedded model, nothing kept", [], empty, LEAST["embedded"])
    start_of(check, "embedded model, kept", [], empty, LEAST["embedded"])
    start_of(check, "8B, covering programs, kept", whole + COVERING, kept, LEAST["embedded"])


def start_of(check: Check, what: str, options: list[str], cache: Path, needs: float) -> None:
    if check.is_over(5 if check.is_dry else needs, what):
        return
    command = [sys.executable, "-W", "ignore", "-m", "jaxllm", "generate", "Once upon a time", "--max-tokens", "8"]
    seconds, status = first_text([*command, *options], os.environ | {"JAXLLM_CACHE_DIR": str(cache)}, check.left - 2,
                                 check.folder / "start.log")  # fmt: skip
    if status is None:
        check.not_run(f"{what}: no text in {seconds:.0f} s")
    elif status:
        lines = [line for line in (check.folder / "start.log").read_text(errors="replace").splitlines() if line.strip()]
        check.fail(f"{what}: ended with {status}: {(lines or [''])[-1]:.300}")
    else:
        check.measure(start=what, seconds_to_text=seconds)


def first_text(command: list[str], environment: dict[str, str], limit: float, log: Path) -> tuple[float, int | None]:
    """Return the seconds until a command writes text, and its exit status: None after `limit` seconds."""
    began = time.perf_counter()
    with log.open("w") as errors:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors)
        timer = threading.Timer(max(limit, 0.1), process.kill)
        timer.start()
        assert process.stdout is not None
        try:
            first = process.stdout.read(1)
            seconds = time.perf_counter() - began
            process.stdout.read()
            status = process.wait()
        finally:
            timer.cancel()
    if status == -signal.SIGKILL and seconds >= limit - 1:
        return seconds, None
    return seconds, status if first or status else 1
