"""The share of program time spent on padding, with the tables of `batch.py`: `python -m benchmarks.padding`.

The real scheduler serves requests with the lengths of conversations (log-normal, prompts of 220 tokens on average,
outputs of 200, as in ShareGPT), arriving at random at several rates, on a simulated device with a fixed time per step
and a time per row, or the longer of the two. Deterministic: no clock, seeded. A step's rows are those of the smallest
program that holds it.
"""

from __future__ import annotations

import json
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.aims import require
from jaxllm.runner import batch
from jaxllm.runner.batch import Extent, Shape
from jaxllm.scheduler import scheduler
from jaxllm.scheduler.state import Limits, Plan, Request, initial

MEAN_PROMPT, MEAN_OUTPUT, SPREAD = 220, 200, 1.0  # tokens; deviation of the logarithm
LONGEST = 2048  # tokens of prompt and output
PROMISED = 0.12  # of the rows, over all rates


@dataclass(frozen=True)
class Machine:
    """The default limits on a kind of device, and its simulated step times in seconds."""

    num_slots: int
    max_tokens: int
    step: float  # independent of its rows
    row: float
    rates: tuple[float, ...]  # requests a second
    measured: tuple[tuple[int, float], ...] = ((0, 0.0),)  # rows, and the least seconds of a step

    def cost(self, tokens: int) -> float:
        """Return the part of a step's seconds that depends on its tokens; padding costs the difference."""
        rows, seconds = zip(*self.measured, strict=True)
        return max(float(np.interp(tokens, rows, seconds)), self.row * tokens)


H100 = ((1, 6.16e-3), (16, 6.40e-3), (64, 6.99e-3), (128, 7.7e-3), (256, 9.0e-3))
MACHINES = {
    # A model of 0.5B on a laptop's cores. One of 8B on an H100, without attention, in which padding is free: a step of
    # one row took 6.16 ms, the products of 16, 64, 128 and 256 rows 0.24 to 2.8 ms more, 8,192 tokens 200 ms.
    "cpu": Machine(64, 160, 0.060, 0.004, (0.05, 0.1, 0.2, 0.4, 0.8, 2.0)),
    "gpu": Machine(256, 8192, 0.0, 24.4e-6, (0.5, 2, 8, 24, 48, 96), H100),
}


def lengths(count: int, seed: int) -> list[tuple[int, int]]:
    """Draw lengths of prompts and outputs."""
    random = np.random.default_rng(seed)
    drawn = np.exp(random.normal(0, SPREAD, (count, 2)) - SPREAD**2 / 2) * (MEAN_PROMPT, MEAN_OUTPUT)
    prompts, outputs = np.clip(drawn, 4, LONGEST // 2).astype(int).T
    return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


def simulate(machine: Machine, rate: float, count: int, decode: Sequence[Shape], ragged: Sequence[Shape]) -> np.ndarray:
    """Serve `count` requests; return the cost of decode steps without and with padding, and the same of ragged ones."""
    totals = np.zeros(4)
    for plan, shape in steps(machine, rate, count, decode, ragged):
        at = 0 if shape.is_decode else 2
        totals[at : at + 2] += machine.cost(plan.num_tokens), machine.cost(shape.tokens)
    return totals


def steps(
    machine: Machine, rate: float, count: int, decode: Sequence[Shape], ragged: Sequence[Shape], num_ticks: int = 1
) -> Iterator[tuple[Plan, Shape]]:
    """Serve `count` requests; yield each step's plan and its program's shape.

    With `num_ticks` pipeline stages that compute a batch each, yield each tick's plan and the shape of its batches.
    """
    limits = Limits(
        num_slots=machine.num_slots,
        num_blocks=machine.num_slots * LONGEST // 16,
        block_size=16,
        max_step_tokens=machine.max_tokens,
        max_step_chunks=batch.max_chunks(machine.max_tokens, machine.num_slots),
        num_ticks=num_ticks,
    )
    random = np.random.default_rng(1)
    arrivals = np.cumsum(random.exponential(1 / rate, count)).tolist()
    requests = [
        Request(
            sequence_id=number,
            tokens=array("i", [number] * (prompt + output)),
            num_prompt=prompt,
            limit=prompt + output,
            root=None,
        )
        for number, (prompt, output) in enumerate(lengths(count, 0))
    ]
    state, now, arrived, finished = initial(limits), 0.0, 0, 0
    plans, nothing = deque[Plan](maxlen=num_ticks), Extent(0, 0, 0)
    while finished < count:
        if not state.num_running and not state.waiting:
            now = max(now, arrivals[arrived])
        first = arrived
        while arrived < count and arrivals[arrived] <= now:
            arrived += 1
        if arrived > first:
            state = scheduler.add(state, limits, requests[first:arrived])
        state, plan = scheduler.plan(state, limits, now)
        plans.append(plan)
        size = Extent(*map(max, nothing[:3], *(batch.extent(each)[:3] for each in plans)))
        is_decode = not size.tiles
        shape = next(shape for shape in (decode if is_decode else ragged) if batch.fits(size, shape))
        yield plan, shape
        now += machine.step + machine.cost(shape.tokens) / num_ticks
        if len(plans) == num_ticks:
            state, events = scheduler.commit(state, limits, plans[0], np.zeros(len(plans[0].slots), np.int32))
            finished += len(events.finished)


def tables(name: str, machine: Machine) -> tuple[list[Shape], list[Shape]]:
    """Return the programs' sizes as in an engine."""
    ragged = batch.ragged_shapes(machine.max_tokens, machine.num_slots, 16, 40, name)
    return batch.decode_shapes(machine.num_slots, 1 if name == "cpu" else 2, name), ragged


def waste(totals: np.ndarray) -> float:
    """Return the share of padding in the totals of `simulate`."""
    return float(1 - (totals[0] + totals[2]) / (totals[1] + totals[3]))


def main() -> None:
    figures = {}
    for name, machine in MACHINES.items():
        decode, ragged = tables(name, machine)
        print(f"{name}: {len(decode)} decode and {len(ragged)} ragged sizes")
        everything = np.zeros(4)
        for rate in machine.rates:
            totals = simulate(machine, rate, 250, decode, ragged)
            everything += totals
            print(
                f"  {rate:6.2f} requests/s: padding {waste(totals):5.1%}, of decode steps "
                f"{1 - totals[0] / totals[1]:5.1%}, of ragged steps {1 - totals[2] / totals[3]:5.1%}"
            )
        figures[name] = waste(everything)
        print(f"  all: {figures[name]:.1%} (promised: under {PROMISED:.0%})")
    print(json.dumps({"padding": figures}))
    require(max(figures.values()) < PROMISED, "too much padding")


if __name__ == "__main__":
    main()
