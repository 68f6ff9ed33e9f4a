"""The host's time to dispatch a decode step: `Runner.dispatch` until it returns, with an idle device.

`python -m benchmarks.dispatch`. Steps of the embedded model are recorded and dispatched again, each after the
previous one has ended; and steps with the number of arrays of an 8B model. A call returns while the device computes.
The processor time of the dispatching thread is measured, because XLA's device threads use the same cores. Prints
medians and lowest tenths. The aim is for two rows: after a step of several milliseconds the same calls take two to
eight times as long, because the thread's data have left the processor's caches (as after `time.sleep`), and the step
hides them.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from benchmarks.aims import require
from benchmarks.bare import compile_greedy
from jaxllm import LLM, SamplingParams
from jaxllm.embedded import MODEL_DIR
from jaxllm.runner import batch
from tests.support import inspection

ROWS, STEPS, LIMIT_US = (2, 16, 64), 300, 150.0
SIZES: dict[str, Any] = {"max_num_seqs": 64, "num_kv_blocks": 2048, "max_model_len": 512, "precompile": "covering"}
LAYERS = 32


class Spent:
    """Seconds by call."""

    def __init__(self) -> None:
        """Begin without any measurements."""
        self.seconds: dict[str, list[float]] = {}

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call that also records its time."""

        def measured(*given: Any) -> Any:
            began = time.thread_time()
            result = call(*given)
            self.seconds.setdefault(name, []).append(time.thread_time() - began)
            return result

        return measured

    def median(self, name: str) -> float:
        """Return the median in microseconds."""
        return statistics.median(self.seconds[name]) * 1e6

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {self.median(name):.0f} ({sorted(times)[len(times) // 10] * 1e6:.0f})"
            for name, times in self.seconds.items()
        )


def measure(llm: LLM, rows: int) -> Spent:
    """Measure the dispatch of decode steps of `rows` rows, whole and then in parts."""
    runner, noted = llm.engine.runner, []
    compile_greedy(llm.engine, [rows], [])
    dispatch = runner.dispatch

    def noting(*given: Any) -> Any:
        noted.append(given)
        return dispatch(*given)

    runner.dispatch = noting
    prompts = [{"prompt_token_ids": [3 + number] * 16} for number in range(rows)]
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), use_tqdm=False)
    del runner.dispatch
    steps = [given for given in noted if len(given[0].plan.slots) == given[0].plan.num_decodes == rows]
    spent, programs, pack = Spent(), runner.programs, batch.pack
    whole = spent.timed("dispatch", dispatch)
    for number in range(STEPS):
        jax.block_until_ready(inspection.arrays_of(runner))
        whole(*steps[number % len(steps)]).result()
    choose, ready = programs.choose, programs.ready()
    programs.choose, batch.pack = spent.timed("choose", choose), spent.timed("pack", pack)
    inspection.exchange_programs(programs, {key: spent.timed("call", program) for key, program in ready.items()})
    try:
        for number in range(STEPS):
            jax.block_until_ready(inspection.arrays_of(runner))
            dispatch(*steps[number % len(steps)]).result()
    finally:
        del programs.choose
        batch.pack = pack
        inspection.exchange_programs(programs, ready)
    return spent


def deep(folder: Path) -> str:
    """Write the embedded model's shape with the layers of an 8B model; return its folder."""
    config = json.loads((MODEL_DIR / "config.json").read_text()) | {"num_hidden_layers": LAYERS}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def main() -> None:
    taken = 0.0
    with LLM(**SIZES, enable_prefix_caching=False) as llm:
        for rows in ROWS:
            spent = measure(llm, rows)
            print(f"embedded model, {rows:2} rows: {spent} us", flush=True)
            if rows == ROWS[0]:
                taken = spent.median("dispatch")
    with tempfile.TemporaryDirectory() as folder:
        sizes = SIZES | {"tokenizer": str(MODEL_DIR), "load_format": "dummy"}
        with LLM(deep(Path(folder)), **sizes, enable_prefix_caching=False) as llm:
            arrays = [len(of(llm.engine.runner)) for of in (inspection.params_of, inspection.arrays_of)]
            print(f"{LAYERS} layers, {arrays[0]} weights, {arrays[1]} arrays of state: {measure(llm, 2)} us")
    require(taken < LIMIT_US, f"the dispatch of {ROWS[0]} rows takes {taken:.0f} us, more than {LIMIT_US:.0f}")


if __name__ == "__main__":
    main()
