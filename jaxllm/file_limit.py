"""Raise the process's limit of open files."""

from __future__ import annotations

import contextlib

_MACOS = 10_240  # OPEN_MAX; macOS reports no limit but accepts no more


def raise_file_limit() -> None:
    """Raise this process's limit of open files as far as permitted, for thousands of connections."""
    try:
        import resource
    except ImportError:  # Windows
        return
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (most, _MACOS):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, wanted), most))
            return
