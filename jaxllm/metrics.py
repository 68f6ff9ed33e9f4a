"""What an engine counts: plain numbers, read by whoever reports them. Knows nothing of how they are exported."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Metrics:
    """Counters since the engine started."""

    programs_compiled: int = 0  # ahead of time, by the engine's own threads
    programs_failed: int = 0  # in the background; larger ones serve in their place
    compile_seconds: float = 0.0  # spent on them, added up over threads
    compilations_after_ready: int = 0  # in front of a request, which must never happen
    steps: int = 0
    padded_tokens: int = 0  # rows of the programs that ran, padding included
    computed_tokens: int = 0  # rows of them that were somebody's tokens
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    generated_tokens: int = 0
    preemptions: int = 0
    recoveries: int = 0  # steps that failed and took the cache with them
    finished: dict[str, int] = field(default_factory=dict)  # requests by finish reason
