"""Requests of random lengths against the ideal schedule of the same work: `python -m benchmarks.random_serving`.

64 requests of 16 to 512 prompt tokens and 16 to 256 new ones, all at once and at a Poisson rate of 80 % of capacity.
The ideal runs every step in a batch of exactly its size, with no time between steps. Its step times are those of the
compiled programs alone, measured in the same process and interpolated linearly between sizes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks import shapes
from benchmarks.aims import require
from benchmarks.bare import compile_greedy, packed_steps, replay
from benchmarks.sides import generate, prompts_of
from jaxllm import LLM, SamplingParams
from jaxllm.sampling_params import RequestOutputKind

MODEL, DTYPE = "stories42M", "float32"
LOAD = 0.8
SHARE, TAIL = 0.85, 3.0  # least share of the ideal's tokens per second; most multiple of the median gap between tokens


class Job(NamedTuple):
    """One request: seconds after the first, tokens of its prompt and of its answer."""

    arrival: float
    prompt: int
    new: int


class Costs(NamedTuple):
    """Seconds on the device."""

    decode: Mapping[int, float]  # of a step, by rows
    token: float  # of a prompt


class Run(NamedTuple):
    """The result of serving jobs."""

    seconds: float
    gaps: list[float]  # between two tokens of a request

    @property
    def tail(self) -> float:
        """The 99th percentile of the gaps, relative to the median."""
        return float(np.percentile(self.gaps, 99) / np.median(self.gaps))


def jobs_of(count: int, seed: int, rate: float) -> list[Job]:
    """Draw jobs that arrive at `rate` per second, or all at once."""
    random = np.random.default_rng(seed)
    arrivals = np.zeros(count) if rate == np.inf else np.cumsum(random.exponential(1 / rate, count))
    prompts, news = random.integers(16, 513, count), random.integers(16, 257, count)
    return [Job(*job) for job in zip(arrivals.tolist(), prompts.tolist(), news.tolist(), strict=True)]


def measure_costs(llm: LLM, budget: int) -> Costs:
    """Measure the programs alone: decode steps of several sizes, and prompts that fill whole steps."""
    decode = {}
    slots = llm.engine.runner.geometry.num_slots
    for rows in sorted({min(rows, slots) for rows in (1, 2, 4, 8, 16, 32, 64)}):
        with packed_steps(llm.engine) as steps:
            generate(llm, rows, 256, 12 + rows * 256 // budget)  # the first continue until the last prompt is computed
        wanted = [step for step in steps if step.key.shape.is_decode and len(step.plan.slots) == rows]
        decode[rows] = statistics.median(replay(llm.engine, wanted) / len(wanted) for _ in range(3))
    with packed_steps(llm.engine) as steps:
        generate(llm, 4 + budget // 512, 512, 1)
    wanted = [step for step in steps if step.plan.num_tokens == budget]
    times = [replay(llm.engine, wanted) / len(wanted) / budget for _ in range(3)]
    return Costs(decode, statistics.median(times))


def ideal(jobs: Sequence[Job], costs: Costs, budget: int) -> float:
    """Return the seconds of the ideal schedule.

    It is first in, first out, with steps of at most `budget` tokens and a slot per job.
    """
    rows, seconds = zip(*costs.decode.items(), strict=True)
    now, waiting = 0.0, list(jobs)
    prompts: list[list[int]] = []  # tokens of the prompt left, tokens to generate
    running: list[int] = []  # tokens to generate
    while waiting or prompts or running:
        while waiting and waiting[0].arrival <= now:
            _, prompt, new = waiting.pop(0)
            prompts.append([prompt, new])
        if not prompts and not running:
            now = waiting[0].arrival
            continue
        left = budget - len(running)
        now += float(np.interp(len(running), rows, seconds)) if running else 0.0
        running = [tokens - 1 for tokens in running if tokens > 1]
        while prompts and left:
            taken = min(left, prompts[0][0])
            now += taken * costs.token
            left -= taken
            prompts[0][0] -= taken
            if not prompts[0][0]:
                _, new = prompts.pop(0)
                running += [new - 1] if new > 1 else []
    return now


def serve(llm: LLM, jobs: Sequence[Job]) -> Run:
    """Run jobs through the engine as they arrive."""
    engine, waiting = llm.engine, list(enumerate(jobs))
    prompts = prompts_of(len(jobs), 512)
    last: dict[str, float] = {}
    gaps: list[float] = []
    began = time.perf_counter()
    while waiting or engine.has_unfinished_requests():
        now = time.perf_counter() - began
        while waiting and waiting[0][1].arrival <= now:
            number, job = waiting.pop(0)
            params = SamplingParams(
                temperature=0.0,
                max_tokens=job.new,
                ignore_eos=True,
                output_kind=RequestOutputKind.DELTA,
                stream_interval=1,
            )
            engine.add_request(str(number), prompts[number][: job.prompt], params)
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, waiting[0][1].arrival - now))
            continue
        outputs = engine.step()
        now = time.perf_counter() - began
        for output in outputs:
            if output.request_id in last:
                gaps.append(now - last[output.request_id])
            last[output.request_id] = now
    return Run(time.perf_counter() - began, gaps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64, help="and slots")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-num-batched-tokens", type=int, help="default: the engine's")
    options = parser.parse_args()
    count = options.requests
    settings: dict[str, Any] = {"max_num_batched_tokens": options.max_num_batched_tokens, "max_model_len": 768}
    settings |= {"max_num_seqs": count, "num_kv_blocks": count * 48}
    folder = str(shapes.folder_of(MODEL, DTYPE))
    with LLM(folder, dtype=DTYPE, precompile="covering", **settings) as llm:
        compile_greedy(llm.engine)
        budget = llm.engine.runner.setup.max_num_batched_tokens
        llm.reset_prefix_cache()
        serve(llm, jobs_of(count, 0, np.inf))
        shares: dict[str, list[float]] = {"all at once": [], "Poisson, 80 % of capacity": []}
        tails: dict[str, list[float]] = {name: [] for name in shares}
        for number in range(options.rounds):
            costs = measure_costs(llm, budget)
            rate = np.inf
            for name in shares:
                jobs = jobs_of(count, 1 + number, rate)
                llm.reset_prefix_cache()
                run, least = serve(llm, jobs), ideal(jobs, costs, budget)
                rate = LOAD * count / ideal(jobs_of(count, 1 + number, np.inf), costs, budget)
                shares[name].append(least / run.seconds)
                tails[name].append(run.tail)
                print(f"{name}: {run.seconds:.1f} s, ideal {least:.1f} s, p99 gap {run.tail:.1f} medians", flush=True)
    print(f"{MODEL}, {DTYPE}, {budget} tokens a step; {count} requests, medians of {options.rounds}:")
    behind = []
    for name in shares:
        share, tail = statistics.median(shares[name]), statistics.median(tails[name])
        if share < SHARE or tail > TAIL:
            behind.append(name)
        print(f"  {name:26} {share:6.1%} of the ideal (aim {SHARE:.0%}), p99 gap {tail:.1f} medians (aim {TAIL})")
    require(not behind, f"behind the aims: {', '.join(behind)}")


if __name__ == "__main__":
    main()
