"""Engine counters and load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple, Protocol

from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams


@dataclass
class Metrics:
    """Counters since the engine's start; its thread writes, any may read single numbers."""

    programs_awaited: int = 0  # required before ready
    programs_compiled: int = 0  # or loaded from the cache
    programs_failed: int = 0  # background attempts, two per program
    compile_seconds: float = 0.0  # summed over threads
    trace_seconds: float = 0.0  # of compile_seconds
    compilations_after_ready: int = 0  # while a request waited; must stay 0
    steps: int = 0
    padded_tokens: int = 0  # rows, including padding
    computed_tokens: int = 0  # rows with tokens of requests
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of prompts, from the prefix cache
    chunk_tokens: int = 0  # of prompts, in completed steps
    generated_tokens: int = 0
    forced_tokens: int = 0  # by a grammar, not sampled
    drafting_rows: int = 0
    draft_tokens: int = 0
    accepted_tokens: list[int] = field(default_factory=list)  # by position
    adapter_loads: int = 0
    images_encoded: int = 0
    sounds_encoded: int = 0  # or pieces of sounds
    sources_encoded: int = 0
    offloaded_blocks: int = 0  # KV blocks copied to the host's tier
    offload_failures: int = 0
    loaded_tokens: int = 0  # of prompts, from the host's tier
    sent_blocks: int = 0  # KV blocks kept for other engines
    received_blocks: int = 0
    transfer_failures: int = 0  # requests that lack another engine's blocks
    disk_stored_blocks: int = 0
    disk_read_blocks: int = 0  # KV blocks read into the host's tier
    disk_failures: int = 0  # writes and reads, missing blocks aside
    preemptions: int = 0
    recoveries: int = 0  # of failed steps that lost the cache
    finished: dict[str, int] = field(default_factory=dict)

    def note_drafts(self, drafted: Sequence[int], counts: Sequence[int]) -> None:
        self.drafting_rows += sum(had > 0 for had in drafted)
        self.draft_tokens += sum(drafted)
        most = max(counts, default=1) - 1
        self.accepted_tokens += [0] * (most - len(self.accepted_tokens))
        for place in range(most):
            self.accepted_tokens[place] += sum(count > place + 1 for count in counts)

    def note_finished(self, reason: str, count: int = 1) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + count


def summed(counted: Iterable[Metrics]) -> Metrics:
    total = Metrics()
    for metrics in counted:
        for counter in fields(Metrics):
            before, more = getattr(total, counter.name), getattr(metrics, counter.name)
            if isinstance(before, list):
                longest = max(len(before), len(more))
                before, more = ([*values, *[0] * (longest - len(values))] for values in (before, more))
                setattr(total, counter.name, [left + right for left, right in zip(before, more, strict=True)])
            elif isinstance(before, dict):
                setattr(total, counter.name, {key: before.get(key, 0) + more.get(key, 0) for key in {**before, **more}})
            else:
                setattr(total, counter.name, before + more)
    return total


class Load(NamedTuple):
    """An engine's load after its last step."""

    running: int = 0  # sequences in slots
    waiting: int = 0
    waiting_tokens: int = 0  # their prompt tokens
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    max_running: int = 0
    generated_tokens_per_second: float = 0.0  # recent average
    prefix_hit_rate: float = 0.0  # cached share of prompt tokens
    step_seconds: float = 0.0
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
    deferred: int = 0  # waiting sequences that lack only an adapter slot


class DeviceReport(NamedTuple):
    """Compiled programs and device memory."""

    programs_ready: int
    programs_compiling: int
    programs_possible: int
    memory: Mapping[str, Mapping[str, int]]  # JAX's `memory_stats` by device id; empty for a CPU


class StepReport(NamedTuple):
    """Statistics of a step."""

    seconds: float
    num_tokens: int  # prompt tokens plus sampled ones, as in vLLM
    num_rows: int
    num_sampled: int


class Observer(Protocol):
    """Receives events of an asynchronous engine on its event loop."""

    def step(self, report: StepReport) -> None:
        """Called after a step."""

    def tokens(self, seconds: float, count: int, is_first: bool) -> None:
        """Receive a request's new tokens, `seconds` after its arrival or previous tokens."""

    def finished(self, output: RequestOutput, params: SamplingParams) -> None:
        """Receive the complete output of a finished request."""
