"""How a benchmark ends that stays behind what is promised: with a line that says so, and not with a traceback."""

from __future__ import annotations

import sys


def require(is_reached: bool, otherwise: str) -> None:
    """End the process with a message and the exit code 1 unless an aim is reached."""
    if not is_reached:
        sys.exit(otherwise)
