"""Run the load test of `bench serve`, and warn of invalid results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from tqdm import tqdm

from jaxllm.bench.clients import HEAD_START, LIMIT, ClientProcess, Cost, deal
from jaxllm.bench.environment import usable_cpus
from jaxllm.bench.outcome import Outcome
from jaxllm.bench.polling import Poller
from jaxllm.bench.target import Target
from jaxllm.bench.workload import Job
from jaxllm.errors import EngineError

_WAIT = 0.5  # seconds between checks for ^C, which may not interrupt a wait
_GRACE = 5.0  # seconds to cancel requests after ^C
_MOST_CACHED = 0.02  # share of prompt tokens cached by an earlier run
_MOST_PROMPT_ERROR = 0.02  # share of prompt tokens; above, the tokenizer is not the server's


@dataclass
class Measurement:
    """Outcomes by job, and cost per process."""

    start: float
    outcomes: list[Outcome] = field(default_factory=list)
    duration: float = 0.0
    costs: list[Cost] = field(default_factory=list)
    timeline: dict[str, list[float]] | None = None
    counted: dict[str, float] = field(default_factory=dict)  # of polling.COUNTERS
    was_interrupted: bool = False


def measure(
    target: Target,
    jobs: Sequence[Job],
    arrivals: Sequence[float],
    *,
    warmups: Sequence[Job] = (),
    max_concurrency: int | None = None,
    num_processes: int = 1,
    fetch_metrics: Callable[[], str] | None = None,
    has_bar: bool = False,
) -> Measurement:
    """Send each job at its arrival time and wait for all; ^C ends the run early.

    `max_concurrency` is the total. Raises `EngineError` if warm-ups or a process fail.
    """
    order = sorted(range(len(jobs)), key=lambda number: arrivals[number])
    shares = deal(
        target, [(number, jobs[number], arrivals[number]) for number in order], warmups, max_concurrency, num_processes
    )
    with _processes(shares) as processes:
        _check_ready(processes)
        measurement = Measurement(start=time.perf_counter() + HEAD_START)
        for process in processes:
            process.start(measurement.start)
        with ExitStack() as stack:
            poller = None if fetch_metrics is None else stack.enter_context(Poller(fetch_metrics, measurement.start))
            bar = stack.enter_context(tqdm(total=len(jobs), disable=not has_bar, unit="request"))
            _collect(processes, measurement, bar)
        if poller is not None:
            measurement.timeline, measurement.counted = poller.timeline(), poller.counted()
    if not measurement.was_interrupted:
        _add_lost(measurement, jobs)
    measurement.outcomes.sort(key=lambda outcome: outcome.number)
    return measurement


def half_of_cpus() -> int:
    return max(1, usable_cpus() // 2)


def count_tokens(outcomes: Sequence[Outcome], count: Callable[[str], int]) -> int:
    """Count output tokens that the server did not report; return for how many requests."""
    untold = [outcome for outcome in outcomes if outcome.output_tokens is None]
    for outcome in untold:
        outcome.output_tokens = count(outcome.text)
    return sum(not outcome.error for outcome in untold)


def client_cost(costs: Sequence[Cost], num_tokens: int) -> dict[str, Any]:
    messages = sum(cost.messages for cost in costs)
    cpu = sum(cost.cpu_seconds for cost in costs)
    return {
        "processes": len(costs),
        "cpu_seconds": cpu,
        "messages": messages,
        "microseconds_per_message": 1e6 * cpu / messages if messages else 0.0,
        "tokens_per_message": num_tokens / messages if messages else 0.0,
        "core_shares": [cost.core_share for cost in costs],
        "busiest_core_share": max((cost.core_share for cost in costs), default=0.0),
    }


def doubts(
    outcomes: Sequence[Outcome],
    client: dict[str, Any],
    *,
    ignores_eos: bool,
    compares_prompts: bool,
    num_counted: int,
) -> Iterator[str]:
    done = [outcome for outcome in outcomes if not outcome.error]
    if done and client["busiest_core_share"] > LIMIT:
        yield (
            f"the client was a limit: one of its processes was busy for {client['busiest_core_share']:.0%} of the run; "
            f"set --num-processes above {client['processes']}, or run the client on more machines"
        )
    short = sum((outcome.output_tokens or 0) < outcome.max_tokens for outcome in done)
    if ignores_eos and short:
        yield (
            f"{short} of {len(done)} answers are shorter than requested, though ignore_eos was set: this server does "
            "not support it, or its context is full"
        )
    long = sum((outcome.output_tokens or 0) > outcome.max_tokens for outcome in done)
    if long:
        yield f"{long} of {len(done)} answers are longer than requested"
    if num_counted:
        yield (
            f"the server reported no usage for {num_counted} of {len(done)} answers: their tokens are counted with the "
            "tokenizer, which may differ from what was generated"
        )
    reported = [outcome for outcome in done if outcome.seen_prompt_tokens is not None]
    wanted = sum(outcome.prompt_tokens for outcome in reported)
    seen = sum(outcome.seen_prompt_tokens or 0 for outcome in reported)
    if compares_prompts and abs(seen - wanted) > _MOST_PROMPT_ERROR * wanted:
        yield f"the server counts {seen} prompt tokens, the tokenizer {wanted}: use the model's --tokenizer"


def cache_doubt(counted: Mapping[str, float]) -> Iterator[str]:
    cached, total = counted.get("cached_prompt_tokens", 0.0), counted.get("prompt_tokens", 0.0)
    if cached > _MOST_CACHED * total:
        yield (
            f"{cached:.0f} of {total:.0f} prompt tokens came from the prefix cache: change --seed or restart "
            "the server to measure without it"
        )


@contextmanager
def _processes(shares: Sequence[Any]) -> Iterator[list[ClientProcess]]:
    processes: list[ClientProcess] = []
    try:
        for share in shares:
            processes.append(ClientProcess(share))
        yield processes
    finally:
        for process in processes:
            process.close()


def _check_ready(processes: Sequence[ClientProcess]) -> None:
    for process in processes:
        failures = process.wait_ready().failures
        if failures:
            raise EngineError(f"{len(failures)} warm-up requests failed: {failures[0]}")


def _collect(processes: Sequence[ClientProcess], measurement: Measurement, bar: Any) -> None:
    left = [process.connection for process in processes]
    end = float("inf")
    while left and time.perf_counter() < end:
        try:
            ready = wait(left, timeout=_WAIT)
            for connection in [connection for connection in left if connection in ready]:
                try:
                    message = connection.recv()
                except EOFError:
                    left.remove(connection)
                    continue
                if isinstance(message, Outcome):
                    measurement.outcomes.append(message)
                    bar.update()
                else:
                    measurement.costs.append(message)
                    left.remove(connection)
        except KeyboardInterrupt:
            if measurement.was_interrupted:
                raise
            measurement.was_interrupted = True
            measurement.duration = time.perf_counter() - measurement.start
            end = time.perf_counter() + _GRACE
            for process in processes:
                process.stop()
    if not measurement.was_interrupted:
        last = max((outcome.ended_at for outcome in measurement.outcomes), default=time.perf_counter())
        measurement.duration = last - measurement.start


def _add_lost(measurement: Measurement, jobs: Sequence[Job]) -> None:
    known = {outcome.number for outcome in measurement.outcomes}
    for number, job in enumerate(jobs):
        if number not in known:
            lost = Outcome(number, job.prompt_tokens, job.max_tokens, error="its client process died", output_tokens=0)
            lost.due_at = lost.sent_at = lost.ended_at = measurement.start
            measurement.outcomes.append(lost)
