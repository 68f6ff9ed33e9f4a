"""At a terminal a command leaves its output and one line of numbers: progress is one line, which is erased."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from tests.support.terminal import lines_at_terminal

COMMAND = (sys.executable, "-m", "jaxllm", "generate", "Once upon a time", "--max-tokens", "8", "--temperature", "0")


def at_terminal(*command: str) -> list[str]:
    """Return the lines that a command leaves at a terminal, without colors and empty ones."""
    lines = (re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line).strip() for line in lines_at_terminal(shlex.join(command)))
    return [line for line in lines if line]


@pytest.mark.ci
def test_a_terminal_keeps_no_progress() -> None:
    piped = subprocess.run(COMMAND, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True).stdout
    *answer, numbers = at_terminal(*COMMAND)
    assert answer == [line.strip() for line in piped.splitlines() if line.strip()]
    assert re.fullmatch(r"\d+ prompt tokens, 8 tokens in .* tokens/s", numbers)
    assert len(at_terminal(*COMMAND, "--verbose")) > len(piped.splitlines()) + 3
