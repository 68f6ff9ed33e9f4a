"""Run a command in a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Mapping


def lines_at_terminal(command: str, environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the lines that a shell command leaves at a terminal, of both streams; raise CalledProcessError."""
    own, other = pty.openpty()
    process = subprocess.Popen(
        command, shell=True, stdin=subprocess.DEVNULL, stdout=other, stderr=other, env=environment
    )
    os.close(other)
    written = bytearray()
    try:
        while piece := os.read(own, 1 << 16):
            written += piece
    except OSError:  # Linux ends the reading of a closed terminal so
        pass
    os.close(own)
    if process.wait() != 0:
        raise subprocess.CalledProcessError(process.returncode, command, bytes(written))
    lines = written.decode().replace("\r\n", "\n").strip().split("\n")
    return [line.rpartition("\r")[2] for line in lines]
