"""Traces of an engine's steps by JAX's profiler, for Perfetto."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import jax

from jaxllm.errors import UserError

DEFAULT_STEPS = 64  # the profiler keeps a million events, some thousand steps of a small model
_log = logging.getLogger(__name__)
span = jax.profiler.TraceAnnotation  # half a microsecond without a trace


class Profile:
    """A running trace. JAX allows one per process."""

    def __init__(self, folder: str | Path, num_steps: int = DEFAULT_STEPS) -> None:
        """Begin a trace; raises UserError if one is running."""
        if num_steps < 1:
            raise UserError(f"num_steps must be at least 1, got {num_steps}.", "num_steps")
        self.path: Path | None = None
        self._folder = Path(folder).expanduser()
        self._steps_left = num_steps
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(str(self._folder), create_perfetto_trace=True, profiler_options=options)
        except OSError as error:
            raise UserError(f"no trace can be written to {folder}: {error.strerror}.", "folder") from error
        except RuntimeError as error:
            raise UserError("a trace is running already; stop it first.", "folder") from error

    def note_step(self) -> None:
        self._steps_left -= 1
        if self._steps_left <= 0:
            self.stop()

    def stop(self) -> Path:
        """End the trace and return its file. Idempotent. Takes about as long as the steps."""
        if self.path is None:
            jax.profiler.stop_trace()
            files = self._folder.glob("plugins/profile/*/perfetto_trace.json.gz")
            self.path = max(files, key=lambda file: file.stat().st_mtime_ns)
            _log.info("%s", where(self.path))
        return self.path


class Profiled(Protocol):
    """An engine that can trace its steps."""

    def start_profile(self, folder: str | Path, num_steps: int = DEFAULT_STEPS) -> Profile: ...


@contextmanager
def profiled(engine: Profiled, folder: str | None, num_steps: int = DEFAULT_STEPS) -> Iterator[None]:
    """Trace `num_steps` steps inside the block and print the path, unless `folder` is None."""
    if folder is None:
        yield
        return
    profile = engine.start_profile(folder, num_steps)
    try:
        yield
    finally:
        print(where(profile.stop()), file=sys.stderr)


def where(path: Path) -> str:
    return f"trace: {path} (open it at https://ui.perfetto.dev, or the folder in xprof)"
