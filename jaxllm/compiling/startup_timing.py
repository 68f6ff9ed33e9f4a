"""Measure the phases of an engine's start."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jax


class Phase(NamedTuple):
    """A phase of a start."""

    name: str
    seconds: float
    cause: str = ""
    is_beside: bool = False  # concurrent with other phases


class Phases:
    """Collects sequential phases, and concurrent ones added by `note_beside`."""

    def __init__(self) -> None:
        self._noted: list[Phase] = []
        self._began = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[list[str]]:
        start, causes = time.perf_counter(), list[str]()
        yield causes
        self._noted.append(Phase(name, time.perf_counter() - start, ", ".join(causes)))

    def note_beside(self, name: str, seconds: float, cause: str) -> None:
        self._noted.append(Phase(name, seconds, cause, is_beside=True))

    def finished(self) -> tuple[Phase, ...]:
        """Return all phases; the last, "other", is the time outside of sequential phases."""
        rest = time.perf_counter() - self._began - sum(phase.seconds for phase in self._noted if not phase.is_beside)
        return (*self._noted, Phase("other", rest))


def describe(phases: tuple[Phase, ...]) -> str:
    total = sum(phase.seconds for phase in phases if not phase.is_beside)
    lines = [f"ready in {total:.2f} s:"]
    for phase in phases:
        seconds = f"({phase.seconds:.2f} s)" if phase.is_beside else f"{phase.seconds:.2f} s "
        lines.append(f"  {phase.name:<12} {seconds:>10} {phase.cause}".rstrip())
    if any(phase.is_beside for phase in phases):
        lines.append("  in parentheses: on other threads, beside the others")
    return "\n".join(lines)


class Compilations:
    """Counts and times this process's compilations and JAX cache hits."""

    def __init__(self) -> None:
        self.num_compiled = self.num_found = 0
        self.compile_seconds = self.found_seconds = 0.0
        self._finding = threading.local()
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        return self.compile_seconds + self.found_seconds

    def begin(self) -> None:
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def end(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def __str__(self) -> str:
        return (
            f"{self.num_compiled} compiled in {self.compile_seconds:.2f} s, "
            f"{self.num_found} found in the cache in {self.found_seconds:.2f} s"
        )

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        # A cached program is reported twice on a thread: as retrieved, then as compiled.
        if event == "/jax/compilation_cache/cache_retrieval_time_sec":
            self._finding.is_found = True
        elif event == "/jax/core/compile/backend_compile_duration":
            is_found, self._finding.is_found = getattr(self._finding, "is_found", False), False
            with self._lock:
                if is_found:
                    self.num_found += 1
                    self.found_seconds += duration_secs
                else:
                    self.num_compiled += 1
                    self.compile_seconds += duration_secs
