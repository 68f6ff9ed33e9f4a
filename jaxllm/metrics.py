"""What an engine counts and reports about itself: plain numbers. Knows nothing of how they are exported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple, Protocol

from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams


@dataclass
class Metrics:
    """Counters since the engine started. Written by its thread; single numbers may be read by any."""

    programs_awaited: int = 0  # those that the start waits for
    programs_compiled: int = 0  # ahead of time, by the engine's threads, or read whole
    programs_failed: int = 0  # tries, in the background; each program has two, and larger ones serve in its place
    compile_seconds: float = 0.0  # spent on them, added up over threads
    trace_seconds: float = 0.0  # of these, on tracing
    compilations_after_ready: int = 0  # in front of a request, which must never happen
    steps: int = 0
    padded_tokens: int = 0  # rows of the programs that ran, padding included
    computed_tokens: int = 0  # rows of them that were tokens of requests
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    chunk_tokens: int = 0  # of prompts, computed in steps that have ended; those found in the cache are not
    generated_tokens: int = 0
    forced_tokens: int = 0  # of them, those that a grammar forced, which were not sampled
    drafting_rows: int = 0  # rows that verified drafts
    draft_tokens: int = 0  # drafts that they verified
    accepted_tokens: list[int] = field(default_factory=list)  # those that were kept, by their place in the row
    adapter_loads: int = 0  # adapters put on the devices
    preemptions: int = 0
    recoveries: int = 0  # steps that failed and took the cache with them
    finished: dict[str, int] = field(default_factory=dict)  # sequences by finish reason

    def note_drafts(self, drafted: Sequence[int], counts: Sequence[int]) -> None:
        """Count the drafts of a step: how many each row had, and how many tokens it sampled."""
        self.drafting_rows += sum(had > 0 for had in drafted)
        self.draft_tokens += sum(drafted)
        most = max(counts, default=1) - 1
        self.accepted_tokens += [0] * (most - len(self.accepted_tokens))
        for place in range(most):
            self.accepted_tokens[place] += sum(count > place + 1 for count in counts)

    def note_finished(self, reason: str, count: int = 1) -> None:
        """Count sequences that have ended."""
        self.finished[reason] = self.finished.get(reason, 0) + count


def summed(counted: Iterable[Metrics]) -> Metrics:
    """Add up what several engines have counted."""
    total = Metrics()
    for one in counted:
        for each in fields(Metrics):
            own, more = getattr(total, each.name), getattr(one, each.name)
            if isinstance(own, list):
                longest = max(len(own), len(more))
                own, more = ([*values, *[0] * (longest - len(values))] for values in (own, more))
                setattr(total, each.name, [left + right for left, right in zip(own, more, strict=True)])
            elif isinstance(own, dict):
                setattr(total, each.name, {key: own.get(key, 0) + more.get(key, 0) for key in {**own, **more}})
            else:
                setattr(total, each.name, own + more)
    return total


class Load(NamedTuple):
    """How busy an engine was after its last step."""

    running: int = 0  # sequences that own a slot
    waiting: int = 0  # sequences in the queue
    waiting_tokens: int = 0  # of their prompts
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    max_running: int = 0
    generated_tokens_per_second: float = 0.0  # over the last seconds
    prefix_hit_rate: float = 0.0  # share of all prompt tokens so far that were cached
    step_seconds: float = 0.0  # of the last step
    running_adapters: tuple[str, ...] = ()  # names of those that the requests which run have, …
    waiting_adapters: tuple[str, ...] = ()  # … and those which wait
    deferred: int = 0  # of `waiting`, sequences that lack only a place for their adapter, not a slot


class DeviceReport(NamedTuple):
    """What is compiled, and the memory of the devices."""

    programs_ready: int
    programs_compiling: int  # threads that compile beside requests
    programs_possible: int
    memory: Mapping[str, Mapping[str, int]]  # by device id: JAX's `memory_stats`; empty for a CPU


class StepReport(NamedTuple):
    """What one step was."""

    seconds: float
    num_tokens: int  # of prompts that it computed, and sampled by it, as vLLM counts an iteration
    num_rows: int  # requests that took part
    num_sampled: int


class Observer(Protocol):
    """Called by an asynchronous engine on its event loop; see jaxllm_server/observability/prometheus.py."""

    def step(self, report: StepReport) -> None:
        """A step has ended."""

    def tokens(self, seconds: float, count: int, is_first: bool) -> None:
        """A request's `count` new tokens came, `seconds` after its arrival (its first tokens) or after the last."""

    def finished(self, output: RequestOutput, params: SamplingParams) -> None:
        """A request has ended; `output` holds all of it."""
