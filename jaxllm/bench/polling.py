"""Poll a server's Prometheus metrics on a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

INTERVAL = 0.5
# Timeline series, and the metrics (without prefix) that each sums.
SERIES: Mapping[str, tuple[str, ...]] = {
    "running": ("num_requests_running",),
    "waiting": ("num_requests_waiting",),
    "kv_usage": ("kv_cache_usage_perc",),
    "generated_tokens": ("generation_tokens_total",),
    "compilations": ("programs_compiled_total", "compilations_after_ready_total"),
}
# Counters common to jaxllm and vLLM.
COUNTERS: Mapping[str, tuple[str, ...]] = {
    "prompt_tokens": ("prefix_cache_queries_total",),
    "cached_prompt_tokens": ("prefix_cache_hits_total",),
}
_COUNTED_FROM_START = ("generated_tokens", "compilations")
_PREFIXES = ("jaxllm:", "vllm:")


def read_metrics(page: str) -> dict[str, float] | None:
    """Sum a page's samples by series and counter; return None without such."""
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
    """Polls Prometheus metrics every `INTERVAL` seconds in a `with` block; `start` is of `time.perf_counter`."""

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
        """Return the series over seconds after the start, counters relative to it; None without data."""
        if not self._seen:
            return None
        first = self._seen[0][1]
        series = {
            name: [row[name] - (first[name] if name in _COUNTED_FROM_START else 0.0) for _, row in self._seen]
            for name in SERIES
        }
        return {"seconds": [moment - self._start for moment, _ in self._seen], **series}

    def counted(self) -> dict[str, float]:
        return {name: self._seen[-1][1][name] - self._seen[0][1][name] for name in COUNTERS} if self._seen else {}

    def _poll(self) -> None:
        pause, is_last = 0.0, False
        while not is_last:
            is_last = self._end.wait(pause)  # once more after the end, for short runs
            pause = INTERVAL
            try:
                row = read_metrics(self._fetch())
            except (OSError, ValueError):  # a gap
                row = None
            if row is not None:
                self._seen.append((time.perf_counter(), row))
