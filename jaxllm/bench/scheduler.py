"""Benchmark the scheduler: microseconds of `plan` plus `commit`.

Loads: *decode*, a token per request and step, a block for a sixteenth of requests; *turnover*, requests end after 64 to
256 tokens and are replaced.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxllm.scheduler import scheduler
from jaxllm.scheduler.state import Limits, Request, initial

Load = Literal["decode", "turnover"]
VOCABULARY = 30_000  # excludes the stop id
LEAST_RUNNING = 0.9  # of the requests, in measured steps
STEP_TOKENS, STEP_CHUNKS, BLOCK = 8192, 64, 16
LEAST_BLOCKS = 64  # per request


def measure(
    num_requests: int, load: Load, num_steps: int, num_warmups: int, seed: int, advance: Callable[[], object]
) -> np.ndarray:
    total = num_steps + num_warmups
    limits = Limits(
        num_slots=num_requests,
        num_blocks=num_requests * max(LEAST_BLOCKS, (total + 256) // BLOCK),
        block_size=BLOCK,
        max_step_tokens=max(STEP_TOKENS, num_requests),
        max_step_chunks=STEP_CHUNKS,
    )
    random = np.random.default_rng(seed)
    state = initial(limits)
    tokens_of: dict[int, array[int]] = {}
    seconds: list[float] = []
    number = 0
    while len(seconds) < total:
        while state.num_running + len(state.waiting) < num_requests:
            number += 1
            new = _request(number, random, load, total)
            tokens_of[number] = new.tokens
            state = scheduler.add(state, limits, [new])
        began = time.perf_counter()
        state, plan = scheduler.plan(state, limits, 0.0)
        planned = time.perf_counter() - began
        sampled = random.integers(0, VOCABULARY, len(plan.slots)).astype(np.int32)
        began = time.perf_counter()
        state, events = scheduler.commit(state, limits, plan, sampled)
        committed = time.perf_counter() - began
        # The scheduler reads these to hash blocks.
        for request_id, token in zip(events.ids.tolist(), events.tokens.tolist(), strict=True):
            tokens_of[request_id].append(token)
        for request_id in events.finished:
            del tokens_of[request_id]
        if state.num_running > LEAST_RUNNING * num_requests:
            seconds.append(planned + committed)
            advance()
    return np.asarray(seconds[num_warmups:]) * 1e6


def result(samples: Mapping[str, np.ndarray]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, spent in samples.items():
        figures[f"median_{name}_us"] = float(np.median(spent))
        figures[f"mean_{name}_us"] = float(np.mean(spent))
        figures[f"p99_{name}_us"] = float(np.percentile(spent, 99))
    figures["samples"] = {f"{name}_us": np.round(spent, 2).tolist() for name, spent in samples.items()}
    return figures


def table(figures: Mapping[str, Any], cases: Sequence[tuple[int, Load]]) -> str:
    lines = [f"{'requests':>8} {'load':>9} {'median us':>10} {'mean us':>9} {'p99 us':>9}"]
    for size, load in cases:
        median, mean, p99 = (figures[f"{kind}_{load}_{size}_us"] for kind in ("median", "mean", "p99"))
        lines.append(f"{size:8} {load:>9} {median:10.0f} {mean:9.0f} {p99:9.0f}")
    return "\n".join(lines)


def _request(number: int, random: np.random.Generator, load: Load, num_steps: int) -> Request:
    prompt = array("i", random.integers(0, VOCABULARY, int(random.integers(32, 256))).tolist())
    num_new = int(random.integers(64, 256)) if load == "turnover" else 2 * num_steps + 256
    return Request(
        sequence_id=number,
        tokens=prompt,
        num_prompt=len(prompt),
        limit=len(prompt) + num_new,
        stop_ids=(VOCABULARY + 1,),
    )
