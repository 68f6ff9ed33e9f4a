"""XLA's lines at a terminal while programs are compiled for a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.paths import ROOT

NOISE = (
    "E0000 00:00:1764230000.123456   12345 cuda_timer.cc:87] Delay kernel timed out: measured time has sub-optimal "
    "accuracy. There may be a missing warmup execution, please investigate in Nsight Systems.\n"
)
OLD_NOISE = NOISE.replace("E0000 00:00:1764230000.123456   12345 ", "2026-11-27 10:34:02.197166: E external/xla/")
SCRIPT = """
import os, sys, threading, time
from jaxllm.compiling import compile_noise
noise, old, is_wanted, platform, end = sys.argv[1], sys.argv[2], sys.argv[3] == "1", sys.argv[4], sys.argv[5]
if is_wanted:
    compile_noise.hide()
os.write(2, b"before\\n")
def work(number):
    with compile_noise.hidden(platform):
        for line in (noise, f"E0000 00:00:1 {number} cuda_executor.cc:1] failed to allocate\\n", old):
            os.write(2, line.encode())
        print("programs:  50%\\r", end="", file=sys.stderr, flush=True)  # one write
        time.sleep(0.2)
threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
if end == "abort":
    with compile_noise.hidden(platform):
        os.write(2, b"F0000 00:00:1 1 fatal.cc:1] Check failed")
        os.abort()
os.write(2, b"after\\n")
"""


@pytest.mark.parametrize(
    ("wanted", "platform", "end"),
    [("1", "gpu", ""), ("1", "gpu", "abort"), ("0", "gpu", ""), ("1", "cpu", "")],
    ids=["hidden", "abort", "not asked for", "on a CPU"],
)
def test_only_lines_of_the_timer_are_hidden(wanted: str, platform: str, end: str) -> None:
    command = [sys.executable, "-c", SCRIPT, NOISE, OLD_NOISE, wanted, platform, end]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=False)
    shown = done.stderr.decode()
    is_hidden = (wanted, platform) == ("1", "gpu")
    assert shown.count("Delay kernel") == (0 if is_hidden else 4)
    assert shown.count("failed to allocate") == 2 and shown.count("programs:  50%\r") == 2
    assert shown.startswith("before\n")
    assert ("Check failed" if end else "after\n") in shown
    assert (done.returncode == 0) is not bool(end)
