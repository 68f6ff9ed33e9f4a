"""The share of idle stage-ticks with pipeline stages: `python -m benchmarks.pipeline_bubble`.

The real scheduler's plans for conversations on a simulated H100 (see padding.py), on 2 and on 4 stages. A step with
prompts is cut into micro-batches (runner/pipeline.py); in a decode step one stage computes at a time.
"""

from __future__ import annotations

import json
from collections import Counter

from benchmarks import padding
from benchmarks.aims import require
from jaxllm.runner import pipeline

STAGES = (2, 4)
AIM = 0.05  # of a full step with prompts


def idle_shares(rate: float, num_stages: int, count: int = 250) -> dict[str, float]:
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
        for rate in padding.MACHINES["gpu"].rates:
            shares = idle_shares(rate, num_stages)
            print(f"{num_stages} stages, {rate:5.1f} requests/s:", {kind: f"{of:.1%}" for kind, of in shares.items()})
        # All requests at once: prompts fill steps.
        figures[num_stages] = idle_shares(1e6, num_stages)
        print(f"{num_stages} stages, saturated:", {kind: f"{of:.1%}" for kind, of in figures[num_stages].items()})
    print(json.dumps({"idle_stage_ticks": figures}))
    for num_stages, shares in figures.items():
        require(shares["full"] <= AIM, f"too many idle stage-ticks on {num_stages} stages")


if __name__ == "__main__":
    main()
