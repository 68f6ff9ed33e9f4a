"""Start threads with a large stack, for compiling."""

from __future__ import annotations

import threading
from collections.abc import Callable

STACK_BYTES = 64 << 20  # deep models overflow 8 MiB
_starting = threading.Lock()


def start_thread(work: Callable[[], None], name: str) -> threading.Thread:
    with _starting:  # stack_size applies to all new threads
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=work, name=name, daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    return thread
