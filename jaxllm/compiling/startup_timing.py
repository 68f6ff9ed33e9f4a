"""How long each part of a start took, and why. Knows JAX's events of compilation; knows no engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jax


class Phase(NamedTuple):
    """A part of a start."""

    name: str
    seconds: float
    cause: str = ""  # what it was spent on
    is_beside: bool = False  # on other threads, while other phases went on


class Phases:
    """Collects the phases of a start. Phases follow each other, except those noted as `beside`."""

    def __init__(self) -> None:
        self._noted: list[Phase] = []
        self._began = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[list[str]]:
        """Time the block; texts appended to the list explain the time."""
        start, causes = time.perf_counter(), list[str]()
        yield causes
        self._noted.append(Phase(name, time.perf_counter() - start, ", ".join(causes)))

    def note_beside(self, name: str, seconds: float, cause: str) -> None:
        """Add what other threads did at the same time."""
        self._noted.append(Phase(name, seconds, cause, is_beside=True))

    def finished(self) -> tuple[Phase, ...]:
        """Return all phases, then one with the rest of the time since the beginning."""
        rest = time.perf_counter() - self._began - sum(phase.seconds for phase in self._noted if not phase.is_beside)
        return (*self._noted, Phase("other", rest))


def describe(phases: tuple[Phase, ...]) -> str:
    """Write the phases of a start as a small table."""
    total = sum(phase.seconds for phase in phases if not phase.is_beside)
    lines = [f"ready in {total:.2f} s:"]
    for phase in phases:
        seconds = f"({phase.seconds:.2f} s)" if phase.is_beside else f"{phase.seconds:.2f} s "
        lines.append(f"  {phase.name:<12} {seconds:>10} {phase.cause}".rstrip())
    if any(phase.is_beside for phase in phases):
        lines.append("  in parentheses: on other threads, beside the others")
    return "\n".join(lines)


class Compilations:
    """Counts what JAX compiles and what it finds in its cache, in this process, from `begin` to `end`."""

    def __init__(self) -> None:
        self.num_compiled = self.num_found = 0
        self.compile_seconds = self.found_seconds = 0.0  # added up over threads
        self._finding = threading.local()
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        """Seconds of both, added up over threads."""
        return self.compile_seconds + self.found_seconds

    def begin(self) -> None:
        """Start to count."""
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def end(self) -> None:
        """Count no more."""
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def __str__(self) -> str:
        return (
            f"{self.num_compiled} compiled in {self.compile_seconds:.2f} s, "
            f"{self.num_found} found in the cache in {self.found_seconds:.2f} s"
        )

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        # JAX reports a cached program twice, on the same thread: as retrieved, then as if it had been compiled.
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
