"""How many files and sockets this process may hold."""

from __future__ import annotations

import contextlib

_MACOS = 10_240  # its OPEN_MAX: it calls its limit infinite and takes no more than this


def raise_file_limit() -> None:
    """Allow as many as the system lets us: a thousand connections at once are more than many shells' limit."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (most, _MACOS):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, wanted), most))
            return
