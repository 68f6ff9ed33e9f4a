"""Temporary folders that are deleted even after `kill -9`, by the next process that creates one."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "jaxllm-run-"
_MOST_TRIES = 8


class OwnFolder:
    """A process's temporary folder, until `remove` or the end of a `with` block."""

    def __init__(self, parent: str | Path | None = None) -> None:
        parent = tempfile.gettempdir() if parent is None else str(parent)
        _sweep(parent)
        for _ in range(_MOST_TRIES):
            path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
            self._lock = _locked(path)
            if self._lock is not None and os.path.isdir(path):
                break
            # Deleted by another process, or no locks here.
            self._unlock()
            with suppress(OSError):
                os.rmdir(path)
        else:
            path = tempfile.mkdtemp(prefix="jaxllm-", dir=parent)
        self.path = Path(path)
        self._pid = os.getpid()
        atexit.register(self.remove)

    def remove(self) -> None:
        """Delete the folder; no effect in forked processes."""
        if os.getpid() == self._pid:
            shutil.rmtree(self.path, ignore_errors=True)
            self._unlock()
            atexit.unregister(self.remove)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _sweep(parent: str) -> None:
    with suppress(OSError):
        for name in os.listdir(parent):
            path = os.path.join(parent, name)
            lock = _locked(path) if name.startswith(_PREFIX) else None
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _locked(path: str) -> int | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
    except OSError:
        pass  # its process is running
    os.close(descriptor)
    return None
