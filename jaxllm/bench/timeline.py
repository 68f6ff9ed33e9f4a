"""Sample an engine's activity over time."""

from __future__ import annotations

import time

from jaxllm.metrics import Load, Metrics

MOST_SAMPLES = 2000  # then drop every second one and double the interval


class Timeline:
    """Samples of an engine's load and compiled programs."""

    def __init__(self, metrics: Metrics, interval: float = 0.02) -> None:
        self._metrics = metrics
        self._interval = interval
        self._began = time.monotonic()
        self._next = 0.0
        self._first = (metrics.generated_tokens, metrics.programs_compiled)
        self._rows: list[tuple[float, int, int, float, int, int]] = []

    def is_due(self) -> bool:
        return time.monotonic() - self._began >= self._next

    def add(self, load: Load) -> None:
        now = time.monotonic() - self._began
        self._next = now + self._interval
        tokens, programs = self._metrics.generated_tokens, self._metrics.programs_compiled
        used = load.kv_blocks_used / load.kv_blocks_total if load.kv_blocks_total else 0.0
        self._rows.append((now, load.running, load.waiting, used, tokens - self._first[0], programs - self._first[1]))
        if len(self._rows) > MOST_SAMPLES:
            del self._rows[1::2]
            self._interval *= 2

    def lists(self) -> dict[str, list[float]]:
        names = ("seconds", "running", "waiting", "kv_usage", "generated_tokens", "compilations")
        columns = zip(*self._rows, strict=True) if self._rows else ((),) * len(names)
        return {name: list(column) for name, column in zip(names, columns, strict=True)}
