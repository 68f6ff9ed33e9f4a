"""The share of idle stage-ticks with pipeline stages: `python -m benchmarks.pipeline_bubble`.

The real scheduler's plans for conversations on a simulated H100 (see padding.py), on 2 and on 4 stages. With batches in
flight each plan is a tick, in which stage s computes the plan of s ticks ago; a stage idles if that has no rows. With
drafts, adapters and other features that need one step through all stages, a step with prompts is cut into micro-batches
(runner/pipeline.py), and in a decode step one stage computes at a time.
"""

from __future__ import annotations

import json
from collections import Counter, deque

from benchmarks import padding
from benchmarks.aims import require
from jaxllm.runner import pipeline

STAGES = (2, 4)
AIM = 0.05  # of all stage-ticks while requests wait or all slots decode
COUNT = 250  # requests


def in_flight(rate: float, num_stages: int, count: int = COUNT) -> dict[str, float]:
    """Return the share of idle stage-ticks of all, and of those with at least as many requests as stages."""
    machine = padding.MACHINES["gpu"]
    busy, every = Counter[str](), Counter[str]()
    batches = deque([False] * num_stages, num_stages)
    for plan, _ in padding.steps(machine, rate, count, *padding.tables("gpu", machine), num_stages):
        batches.append(len(plan.slots) > 0)
        kinds = ["all", *(["saturated"] if (plan.epochs > 0).sum() >= num_stages else [])]
        for kind in kinds:
            busy[kind] += sum(batches)
            every[kind] += num_stages
    return {kind: 1 - busy[kind] / every[kind] for kind in every}


def one_step(rate: float, num_stages: int, count: int = COUNT) -> dict[str, float]:
    """Return the share of idle stage-ticks in decode steps, in steps with prompts, and in the full ones of these."""
    machine = padding.MACHINES["gpu"]
    busy, every = Counter[str](), Counter[str]()
    for plan, shape in padding.steps(machine, rate, count, *padding.tables("gpu", machine)):
        own, whole = pipeline.ticks(shape, num_stages)
        kinds = ["decode"] if shape.is_decode else ["prompts"]
        if plan.num_tokens == machine.max_tokens:
            kinds.append("full")
        for kind in kinds:
            busy[kind] += own
            every[kind] += whole
    return {kind: 1 - busy[kind] / every[kind] for kind in every}


def main() -> None:
    figures = {}
    for num_stages in STAGES:
        for name, shares in (("in flight", in_flight), ("one step", one_step)):
            # The last: all requests at once.
            for rate in (*padding.MACHINES["gpu"].rates, 1e6):
                found = shares(rate, num_stages)
                when = "saturated" if rate == 1e6 else f"{rate:5.1f} requests/s"
                print(f"{num_stages} stages, {name}, {when}:", {kind: f"{of:.1%}" for kind, of in found.items()})
                figures[f"{num_stages} stages, {name}"] = found
    print(json.dumps({"idle_stage_ticks": figures}))
    for num_stages in STAGES:
        idle = figures[f"{num_stages} stages, in flight"]["all"]
        require(idle <= AIM, f"too many idle stage-ticks on {num_stages} stages")


if __name__ == "__main__":
    main()
