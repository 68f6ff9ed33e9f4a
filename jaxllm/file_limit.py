"""How many files and sockets this process may hold."""

from __future__ import annotations

import contextlib


def raise_file_limit() -> None:
    """Allow as many as the system lets us: a thousand connections at once are more than many shells' limit."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS may call it infinite and refuse it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
