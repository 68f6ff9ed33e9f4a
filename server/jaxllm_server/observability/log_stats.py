"""Log lines of throughput in vLLM's format."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from jaxllm.metrics import Load, Metrics


class Engine(Protocol):
    """The engine's interface used here."""

    @property
    def metrics(self) -> Metrics: ...

    def get_load(self) -> Load: ...


class Counts(NamedTuple):
    """Counters at a time."""

    seconds: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


def counts_of(metrics: Metrics, now: float) -> Counts:
    return Counts(now, metrics.prompt_tokens, metrics.cached_tokens, metrics.generated_tokens)


def stats_line(before: Counts, after: Counts, load: Load) -> str | None:
    """Return the line, or None if the engine was idle.

    The hit rate covers prompts begun in the interval, else all.
    """
    prompts = after.prompt_tokens - before.prompt_tokens
    generated = after.generated_tokens - before.generated_tokens
    if not (prompts or generated or load.running or load.waiting):
        return None
    seconds = max(after.seconds - before.seconds, 1e-6)
    hit_rate = (after.cached_tokens - before.cached_tokens) / prompts if prompts else load.prefix_hit_rate
    return (
        f"Avg prompt throughput: {prompts / seconds:.1f} tokens/s, "
        f"Avg generation throughput: {generated / seconds:.1f} tokens/s, "
        f"Running: {load.running} reqs, Waiting: {load.waiting} reqs, "
        f"KV cache usage: {100 * load.kv_blocks_used / max(load.kv_blocks_total, 1):.1f}%, "
        f"Prefix cache hit rate: {100 * hit_rate:.1f}%"
    )


async def log_stats(engine: Engine, interval: float, log: Callable[[str], object]) -> None:
    """Log every `interval` seconds unless idle; 0 disables it."""
    before = counts_of(engine.metrics, time.monotonic())
    while interval > 0:
        await asyncio.sleep(interval)
        after = counts_of(engine.metrics, time.monotonic())
        line = stats_line(before, after, engine.get_load())
        if line is not None:
            log(line)
        before = after
