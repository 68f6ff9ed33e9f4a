"""The gain of overlap: decoding 64 rows of the embedded model, the engine against a bare loop over the same program.

`python -m benchmarks.overlap`. Rounds alternate between the bare loop and the engine with and without overlap;
medians are compared. The device (XLA's threads) idles between two steps if the first ended before the second was
dispatched. A step begins when the one before it is read, and takes as long as in the bare loop, so the idle time is
that between its end and the next dispatch.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.aims import require
from benchmarks.bare import compile_greedy, packed_steps, replay
from jaxllm import SamplingParams
from jaxllm.config import EngineArgs
from jaxllm.embedded import MODEL_DIR
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.runner.model_runner import StepInFlight

ROWS, STEPS = 64, 48
IDLE_LIMIT = 0.10  # of a step


def make(is_on: bool, model: Path = MODEL_DIR) -> LLMEngine:
    engine = LLMEngine(EngineArgs(model=str(model), precompile="covering", async_scheduling=is_on))
    compile_greedy(engine, [ROWS])
    return engine


def measure(engine: LLMEngine, bare: float) -> tuple[float, float]:
    """Return the seconds of a step, and its seconds of an idle device; `bare`: time of a step alone."""
    params = SamplingParams(temperature=0.0, max_tokens=STEPS + 16, ignore_eos=True)
    for number in range(ROWS):
        engine.add_request(str(number), [3 + number] * 16, params)
    for _ in range(8):
        engine.step()
    dispatch, read = engine.runner.dispatch, StepInFlight.result
    newest = last = None  # dispatched; read
    idle, last_read = 0.0, time.perf_counter()

    def dispatching(*given: Any) -> StepInFlight:
        nonlocal idle, newest
        before, newest = newest, dispatch(*given)
        if before is not None and before.joined.is_ready():
            ended = last_read if before is last else last_read + bare
            idle += max(0.0, time.perf_counter() - ended)
        return newest

    def reading(flight: StepInFlight) -> Any:
        nonlocal last, last_read
        result = read(flight)
        last, last_read = flight, time.perf_counter()
        return result

    engine.runner.dispatch, StepInFlight.result = dispatching, reading  # pyright: ignore[reportAttributeAccessIssue]
    try:
        began = time.perf_counter()
        for _ in range(STEPS):
            engine.step()
        seconds = (time.perf_counter() - began) / STEPS
    finally:
        del engine.runner.dispatch
        StepInFlight.result = read  # pyright: ignore[reportAttributeAccessIssue]
    while engine.has_unfinished_requests():
        engine.step()
    engine.reset_prefix_cache()
    return seconds, idle / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    engines = {"overlapped": make(True), "one after the other": make(False)}
    with packed_steps(engines["overlapped"]) as steps:
        measure(engines["overlapped"], bare=0.0)
    decodes = [step for step in steps if step.key.shape.is_decode and len(step.plan.slots) == ROWS]
    seconds: dict[str, list[float]] = {name: [] for name in ("bare", *engines)}
    idle: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        bare = replay(engines["overlapped"], decodes) / len(decodes)
        if number:
            seconds["bare"].append(bare)
        for name, engine in engines.items():
            taken, waited = measure(engine, bare)
            if number:  # the first round warms up
                seconds[name].append(taken)
                idle[name].append(waited / taken)
    bare = statistics.median(seconds["bare"])
    print(f"embedded model, {ROWS} rows: a bare step takes {bare * 1e3:.2f} ms")
    for name in engines:
        step = statistics.median(seconds[name])
        print(
            f"  {name:19} {step * 1e3:6.2f} ms a step ({bare / step:4.0%} of bare speed), "
            f"the device idles {statistics.median(idle[name]):5.1%} of the time"
        )
    share = statistics.median(idle["overlapped"])
    require(share < IDLE_LIMIT, f"the device idles {share:.0%} of a step")


if __name__ == "__main__":
    main()
