"""Asks a server for its metrics during a run, once a while, from a thread; and reads Prometheus' text.

Knows the names that jaxllm and vLLM share. The server's part of the cost is a page of text for each time it is asked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

INTERVAL = 0.5  # seconds
# What a timeline has, and the families (without their prefix) that it is the sum of.
SERIES: Mapping[str, tuple[str, ...]] = {
    "running": ("num_requests_running",),
    "waiting": ("num_requests_waiting",),
    "kv_usage": ("kv_cache_usage_perc",),
    "generated_tokens": ("generation_tokens_total",),
    "compilations": ("programs_compiled_total", "compilations_after_ready_total"),
}
# What is counted beside it: names that jaxllm and vLLM share.
COUNTERS: Mapping[str, tuple[str, ...]] = {
    "prompt_tokens": ("prefix_cache_queries_total",),
    "cached_prompt_tokens": ("prefix_cache_hits_total",),
}
_COUNTED_FROM_START = ("generated_tokens", "compilations")
_PREFIXES = ("jaxllm:", "vllm:")


def read_metrics(page: str) -> dict[str, float] | None:
    """Read a page of metrics into the values of `SERIES` and `COUNTERS`; None if it holds none of the series."""
    totals: dict[str, float] = {}
    for line in page.splitlines():
        prefix = next((prefix for prefix in _PREFIXES if line.startswith(prefix)), None)
        if prefix is None:
            continue
        name = line[len(prefix) :].partition("{")[0].partition(" ")[0]
        totals[name] = totals.get(name, 0.0) + float(line.rpartition(" ")[2])
    if not any(name in totals for names in SERIES.values() for name in names):
        return None
    wanted = {**SERIES, **COUNTERS}.items()
    return {series: sum(totals.get(name, 0.0) for name in names) for series, names in wanted}


class Poller:
    """Polls from the start of a `with` block to its end, then `timeline` has what was seen, None if nothing was."""

    def __init__(self, fetch: Callable[[], str], start: float) -> None:
        self._fetch, self._start = fetch, start
        self._seen: list[tuple[float, dict[str, float]]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> Poller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(2 * INTERVAL)

    def timeline(self) -> dict[str, list[float]] | None:
        """Return the series: seconds after the start, and what the server said then; counters from 0 on."""
        if not self._seen:
            return None
        first = self._seen[0][1]
        series = {
            name: [row[name] - (first[name] if name in _COUNTED_FROM_START else 0.0) for _, row in self._seen]
            for name in SERIES
        }
        return {"seconds": [moment - self._start for moment, _ in self._seen], **series}

    def counted(self) -> dict[str, float]:
        """Return by how much each of `COUNTERS` rose; nothing where nothing was seen."""
        return {name: self._seen[-1][1][name] - self._seen[0][1][name] for name in COUNTERS} if self._seen else {}

    def _poll(self) -> None:
        pause, is_last = 0.0, False
        while not is_last:
            is_last = self._end.wait(pause)  # then once more: a short run has a value from before and one from after
            pause = INTERVAL
            try:
                row = read_metrics(self._fetch())
            except (OSError, ValueError):  # busy, or not there: the line has a gap
                row = None
            if row is not None:
                self._seen.append((time.perf_counter(), row))
