"""The cost of verifying k drafts: a step of 1 + k tokens per row against one token per row, of Qwen2.5-0.5B's shape.

`python -m benchmarks.verifying`. The programs alone, alternating; medians are compared. `Limits.token_cost` is
derived from it: the time of one more token, in thousandths of the part of a step that does not grow with tokens. It is
measured with one row, where drafts pay most.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import shapes
from benchmarks.sides import GEOMETRY, medians
from jaxllm import LLM
from jaxllm.runner import batch
from jaxllm.runner.batch import Shape
from jaxllm.runner.compiled_programs import Key
from jaxllm.runner.model_runner import Runner
from jaxllm.sampling.sampler import Variant
from jaxllm.scheduler.state import Plan
from tests.support import inspection

DRAFTS, ROWS, CONTEXT, STEPS = (1, 2, 4, 8), (1, 16), 128, 4


def plan_of(rows: int, drafts: int) -> Plan:
    """Return a plan of decode rows that verify `drafts` drafts each."""
    slots = np.arange(rows)
    lengths = np.full(rows, 1 + drafts, np.int32)
    return Plan(
        now=0.0,
        num_decodes=rows,
        slots=slots,
        epochs=np.ones(GEOMETRY["max_num_seqs"], np.int64),
        starts=np.full(rows, CONTEXT - 1, np.int32),
        lengths=lengths,
        samples=np.ones(rows, np.bool_),
        sample_numbers=np.ones(rows, np.int32),
        table=np.zeros((0, 3), np.int32),
        num_drafts=rows * drafts,
        proposes=drafts > 0,
        capacity=np.full(rows, 2 * CONTEXT, np.int32),
    )


def shape_of(runner: Runner, rows: int, drafts: int) -> Shape:
    """Return the shape of exactly that plan."""
    most = runner.limits.max_drafts if drafts else 0
    return Shape(tokens=rows * (1 + drafts), rows=rows, tiles=0, entries=rows, sampling_fields=0, drafts=most)


def job(runner: Runner, rows: int, drafts: int) -> Callable[[], float]:
    """Compile a program; return a function that times a step of it."""
    shape = shape_of(runner, rows, drafts)
    program = inspection.lowered(runner, Key(shape, Variant.GREEDY)).compile()
    buffer = batch.pack(plan_of(rows, drafts), shape, runner.geometry.num_slots)

    def run() -> float:
        state = inspection.state_of(runner)
        lengths = jnp.full_like(state.drafted.lengths, CONTEXT, device=state.drafted.lengths.sharding)
        inspection.set_state(runner, replace(state, drafted=replace(state.drafted, lengths=lengths)))
        began = time.perf_counter()
        jax.block_until_ready(inspection.dispatch(runner, [(program, buffer)] * STEPS))
        return (time.perf_counter() - began) / STEPS

    run()
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--layers", type=int, default=24, help="of the shape")
    options = parser.parse_args()
    for dtype in options.dtypes:
        model = str(shapes.folder_of("qwen2.5-0.5b", dtype, options.layers))
        lookup = {"method": "ngram", "num_speculative_tokens": max(DRAFTS)}
        settings = GEOMETRY | {"precompile": "covering", "speculative_config": lookup}
        with LLM(model, dtype=dtype, **settings) as llm:
            runner = llm.engine.runner
            cases = [(rows, drafts) for rows in ROWS for drafts in (0, *DRAFTS)]
            jobs = {case: job(runner, *case) for case in cases}
            seconds = medians(options.rounds, {case: partial(one) for case, one in jobs.items()})
        for rows in ROWS:
            base = seconds[rows, 0]
            ratios = ", ".join(f"{drafts}: {seconds[rows, drafts] / base:.2f}" for drafts in DRAFTS)
            print(f"{dtype}, {rows} rows: {base * 1e3:.1f} ms a step; with so many drafts each {ratios} times")
        each = np.mean([(seconds[1, drafts] / seconds[1, 0] - 1) / drafts for drafts in DRAFTS])
        print(f"{dtype}: at one row a draft takes {each:.2f} of a step: token_cost {1000 * each / (1 - each):.0f}")


if __name__ == "__main__":
    main()
