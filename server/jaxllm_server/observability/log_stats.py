"""A line about the engine's speed every few seconds while there is traffic, in vLLM's words. Knows no log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from jaxllm.metrics import Load, Metrics


class Engine(Protocol):
    """An engine, as far as the line reads it."""

    @property
    def metrics(self) -> Metrics:
        """Its counters."""
        ...

    def get_load(self) -> Load:
        """Say how busy the engine is."""
        ...


class Counts(NamedTuple):
    """The counters that a line is made of, at one moment."""

    seconds: float  # of a monotonic clock
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


def counts_of(metrics: Metrics, now: float) -> Counts:
    """Read the counters."""
    return Counts(now, metrics.prompt_tokens, metrics.cached_tokens, metrics.generated_tokens)


def stats_line(before: Counts, after: Counts, load: Load) -> str | None:
    """Describe what happened between two moments, and how busy the engine is now; None if nothing did and it is idle.

    The hit rate is that of the prompts which began in between, or of all before where none did.
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
    """Call `log` with a line every `interval` seconds in which there was traffic, until cancelled; never with 0."""
    before = counts_of(engine.metrics, time.monotonic())
    while interval > 0:
        await asyncio.sleep(interval)
        after = counts_of(engine.metrics, time.monotonic())
        line = stats_line(before, after, engine.get_load())
        if line is not None:
            log(line)
        before = after
