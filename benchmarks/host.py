"""The host's work for a step of 256 running requests: plan, pack and dispatch, commit, and the rest of `step`.

`python -m benchmarks.host`. The embedded model decodes; each part's time is the processor time of the engine's
thread, because XLA's device threads use the same two cores. Medians over steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.aims import require
from benchmarks.bare import compile_greedy
from jaxllm import LLM, SamplingParams
from jaxllm.scheduler import scheduler

ROWS, STEPS, LIMIT_MS = 256, 160, 1.0


def main() -> None:
    spent: dict[str, list[float]] = {"plan": [], "pack and dispatch": [], "commit": []}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*given: Any) -> Any:
            began = time.thread_time()
            result = call(*given)
            spent[name].append(time.thread_time() - began)
            return result

        return measured

    with LLM(max_num_seqs=ROWS, num_kv_blocks=ROWS * 16, precompile="covering", enable_prefix_caching=False) as llm:
        engine = llm.engine
        compile_greedy(engine, [ROWS], [])  # else every step is two programs
        params = SamplingParams(temperature=0.0, max_tokens=STEPS + 200, ignore_eos=True)
        for number in range(ROWS):
            engine.add_request(str(number), [3 + number] * 16, params)
        while engine.load().waiting or engine.num_rows < ROWS:
            engine.step()
        plan, commit = scheduler.plan, scheduler.commit
        scheduler.plan, scheduler.commit = timed("plan", plan), timed("commit", commit)
        engine.runner.dispatch = timed("pack and dispatch", engine.runner.dispatch)
        whole, began = [], time.perf_counter()
        try:
            for _ in range(STEPS):
                before = time.thread_time()
                engine.step()
                whole.append(time.thread_time() - before)
        finally:
            scheduler.plan, scheduler.commit = plan, commit
        wall = (time.perf_counter() - began) / STEPS
        assert engine.num_rows == ROWS, "a request ended while it was measured"
    medians = {name: statistics.median(times) * 1e3 for name, times in spent.items()}
    total = sum(medians.values())
    print(
        f"{ROWS} running requests, embedded model, {wall * 1e3:.1f} ms a step; processor time of the engine's thread:"
    )
    for name, milliseconds in medians.items():
        print(f"  {name:18} {milliseconds:6.3f} ms")
    print(f"  {'together':18} {total:6.3f} ms (aim: under {LIMIT_MS} ms)")
    print(f"  {'all of a step':18} {statistics.median(whole) * 1e3:6.3f} ms, with detokenizing and outputs")
    require(total < LIMIT_MS, f"the host takes {total:.2f} ms a step")


if __name__ == "__main__":
    main()
