"""At a terminal a command leaves its output and one line of numbers: progress is one line, which is erased."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

COMMAND = (sys.executable, "-m", "jaxllm", "generate", "Once upon a time", "--max-tokens", "8", "--temperature", "0")


def at_terminal(*command: str) -> list[str]:
    """Return the lines that a command leaves at a terminal, of both streams, without empty ones."""
    own, other = pty.openpty()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=other, stderr=other)
    os.close(other)
    written = bytearray()
    try:
        while piece := os.read(own, 1 << 16):
            written += piece
    except OSError:  # Linux ends the reading of a closed terminal so
        pass
    os.close(own)
    assert process.wait() == 0, written
    lines = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", written.decode().replace("\r\n", "\n")).split("\n")
    return [shown for line in lines if (shown := line.rpartition("\r")[2].strip())]


@pytest.mark.ci
def test_a_terminal_keeps_no_progress() -> None:
    piped = subprocess.run(COMMAND, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True).stdout
    *answer, numbers = at_terminal(*COMMAND)
    assert answer == [line.strip() for line in piped.splitlines() if line.strip()]
    assert re.fullmatch(r"\d+ prompt tokens, 8 tokens in .* tokens/s", numbers)
    assert len(at_terminal(*COMMAND, "--verbose")) > len(piped.splitlines()) + 3
