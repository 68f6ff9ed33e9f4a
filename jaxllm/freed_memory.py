"""Returns freed memory to the system: glibc keeps it for the threads that freed it. Standard library only."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress


def return_freed_memory() -> None:
    """Give back what is free; it takes some 30 ms, in which a thread that allocates may wait."""
    if sys.platform == "linux":
        with suppress(AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
