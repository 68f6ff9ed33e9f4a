"""The end of a benchmark that misses its aim: a message instead of a traceback."""

from __future__ import annotations

import sys


def require(is_reached: bool, otherwise: str) -> None:
    """Exit with a message and code 1 unless an aim is reached."""
    if not is_reached:
        sys.exit(otherwise)
