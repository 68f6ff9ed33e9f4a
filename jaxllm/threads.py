"""Threads with a large stack, for what recurses deeply: compiling programs and grammars. Standard library only."""

from __future__ import annotations

import threading
from collections.abc import Callable

STACK_BYTES = 64 << 20  # deep models overflow the usual 8 MiB, and systems differ
_starting = threading.Lock()


def start_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread whose stack is large enough to compile on."""
    with _starting:  # the size is the interpreter's, for all threads that begin
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=work, name=name, daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    return thread
