"""What the pure core costs: plan and commit at many running requests, `python -m tests.bench.scheduler`.

Two loads: *decode* only (every request gets a token, a sixteenth of them a new block), and *turnover* (requests end
after 64 to 256 tokens and others take their place). Prints medians and the 95th percentile in microseconds, and a line
of JSON.
"""

from __future__ import annotations

import json
import time
from array import array

import numpy as np

from jaxllm import scheduler
from jaxllm.state import Limits, Request, State, initial

STEPS, WARM_UP = 600, 100
TARGET_US = 250.0  # at 1,000 running requests


def request(number: int, random: np.random.Generator, ends: bool) -> Request:
    prompt = array("i", random.integers(0, 30000, int(random.integers(32, 256))).tolist())
    num_new = int(random.integers(64, 256)) if ends else 2_000
    return Request(number, prompt, len(prompt), len(prompt) + num_new, stop_ids=(30001,))


def measure(num_running: int, ends: bool) -> np.ndarray:
    """Return the microseconds of each step."""
    limits = Limits(
        num_slots=num_running, num_blocks=64 * num_running, block_size=16, max_step_tokens=8192, max_step_chunks=64
    )
    random = np.random.default_rng(0)
    state: State = initial(limits)
    number = 0
    seconds: list[float] = []
    sequences: dict[int, array[int]] = {}
    while len(seconds) < STEPS + WARM_UP:
        while state.num_running + len(state.waiting) < num_running:
            number += 1
            new = request(number, random, ends)
            sequences[number] = new.tokens
            state = scheduler.add(state, limits, [new])
        start = time.perf_counter()
        state, plan = scheduler.plan(state, limits, 0.0)
        planned = time.perf_counter() - start
        tokens = random.integers(0, 30000, len(plan.slots)).astype(np.int32)
        start = time.perf_counter()
        state, events = scheduler.commit(state, limits, plan, tokens)
        committed = time.perf_counter() - start
        for request_id, token in zip(events.ids.tolist(), events.tokens.tolist(), strict=True):
            sequences[request_id].append(token)
        if state.num_running > 0.9 * num_running:
            seconds.append(planned + committed)
    return np.asarray(seconds[WARM_UP:]) * 1e6


def main() -> None:
    print(f"{'running':>8} {'load':>9} {'median us':>10} {'mean us':>9} {'p95 us':>8}")
    figures = {}
    for num_running in (64, 256, 1000, 2048):
        for ends in (False, True):
            spent = measure(num_running, ends)
            load = "turnover" if ends else "decode"
            median, mean, p95 = float(np.median(spent)), float(spent.mean()), float(np.percentile(spent, 95))
            print(f"{num_running:8} {load:>9} {median:10.0f} {mean:9.0f} {p95:8.0f}")
            figures[f"{load}_{num_running}"] = {"median_us": median, "mean_us": mean, "p95_us": p95}
    print(json.dumps({"scheduler": figures}))
    median = figures["decode_1000"]["median_us"]
    print(f"decode at 1,000 running: {median:.0f} us a step, promised: under {TARGET_US:.0f}")


if __name__ == "__main__":
    main()
