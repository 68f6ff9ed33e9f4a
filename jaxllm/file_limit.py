"""Raise the process's limit of open files, for thousands of connections."""

from __future__ import annotations

import contextlib

_MACOS = 10_240  # OPEN_MAX, although macOS reports no limit


def raise_file_limit() -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (most, _MACOS):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, wanted), most))
            return
