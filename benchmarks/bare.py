"""The engine's overhead over its compiled step: `LLM.generate` against a bare loop over the same program.

`python -m benchmarks.bare`. The 0.5B shape measures the overhead next to a real model's step; the embedded model,
with steps of milliseconds, measures the host. Rounds alternate; medians are compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import shapes
from benchmarks.aims import require
from benchmarks.sides import GEOMETRY, generate
from jaxllm import LLM
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.runner import batch
from jaxllm.runner.compiled_programs import VARIANTS, Key, Programs
from jaxllm.sampling.sampler import Variant
from jaxllm.scheduler.state import Plan
from tests.support import inspection

PROMPT, DTYPE = 16, "float32"
SMALL = {"max_num_seqs": 64, "num_kv_blocks": 2048, "max_model_len": 512}


class Case(NamedTuple):
    """Of a model: sizes that differ from other benchmarks', tokens, and promised ratios by number of rows."""

    sizes: dict[str, int]
    tokens: int
    promised: dict[int, float]
    turns: int  # per round: short steps need more


CASES = {"qwen2.5-0.5b": Case({}, 16, {1: 0.95, 16: 0.95}, turns=1), "embedded": Case(SMALL, 64, {64: 0.70}, turns=7)}


class Packed(NamedTuple):
    """A step as sent to the device."""

    plan: Plan
    key: Key
    buffer: np.ndarray


def narrowest(programs: Programs) -> Variant:
    """Return the variant of greedy steps: the narrowest of the table, since a GPU's table has no greedy one."""
    return min((key.variant for key in programs.rest if key.part == "step" and key.variant), key=VARIANTS.index)


@contextmanager
def packed_steps(engine: LLMEngine) -> Iterator[list[Packed]]:
    """Record every step that is packed in the context, with the program of a greedy step."""
    noted: list[Packed] = []
    pack, variant = batch.pack, narrowest(engine.runner.programs)

    def noting(plan: Plan, shape: batch.Shape, *given: Any) -> np.ndarray:
        buffer = pack(plan, shape, *given)
        noted.append(Packed(plan, Key(shape, variant), buffer))
        return buffer

    batch.pack = noting
    try:
        yield noted
    finally:
        batch.pack = pack


def replay(engine: LLMEngine, steps: Sequence[Packed]) -> float:
    """Return the seconds that the device takes for steps in sequence."""
    runner = engine.runner
    fitted = [(runner.programs[step.key], inspection.fitted(runner, step.buffer, step.key)) for step in steps]
    began = time.perf_counter()
    jax.block_until_ready(inspection.dispatch(runner, fitted))
    return time.perf_counter() - began


def compile_greedy(
    engine: LLMEngine,
    decode: Sequence[int] | None = None,
    ragged: Sequence[int] | None = None,
    variant: Variant | None = None,
    num_threads: int = 2,
) -> None:
    """Compile the programs of greedy steps with these numbers of rows and tokens (None: all sizes), and wait.

    Raises ValueError if the table has no programs of `variant`, or of any of the sizes.
    """
    programs = engine.runner.programs
    if all(key.part != "step" for key in programs.rest):
        return  # every step is two programs in deterministic mode
    variant = variant or narrowest(programs)

    def is_wanted(key: Key) -> bool:
        sizes = decode if key.shape.is_decode else ragged
        return key.part == "step" and key.variant is variant and (sizes is None or key.shape.tokens in sizes)

    wanted = [key for key in programs.rest if is_wanted(key)]
    if not wanted:
        raise ValueError(f"the engine's table has no {variant.value} program of {decode} rows or {ragged} tokens")
    ready = programs.ready()
    programs.begin([key for key in wanted if key not in ready], num_threads)
    programs.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, help="of the 0.5B shape (24)")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    behind = []
    for model, case in CASES.items():
        folder = str(shapes.folder_of(model, DTYPE, options.layers))
        with LLM(folder, dtype=DTYPE, precompile="covering", **GEOMETRY | case.sizes) as llm:
            compile_greedy(llm.engine, [2, *case.promised], [])
            for rows, share in case.promised.items():
                alone, step = measure(llm, rows, case.tokens, options.rounds * case.turns)
                print(
                    f"{model}, {DTYPE}, {rows:2} rows: a bare step {alone * 1e3:6.2f} ms, the engine's "
                    f"{step * 1e3:6.2f} ms: {alone / step:.1%} of the bare speed (aim {share:.0%})",
                    flush=True,
                )
                if alone / step < share:
                    behind.append(f"{model} at {rows} rows")
    require(not behind, f"behind what is promised: {', '.join(behind)}")


def measure(llm: LLM, rows: int, new: int, rounds: int) -> tuple[float, float]:
    """Return the seconds of a decode step of `rows` rows, in the bare loop and in the engine."""
    with packed_steps(llm.engine) as steps:
        generate(llm, rows, PROMPT, new)
    decodes = [step for step in steps if step.key.shape.is_decode and len(step.plan.slots) == rows]
    bare: list[float] = []
    engine: list[float] = []
    for _ in range(rounds):
        bare.append(replay(llm.engine, decodes) / len(decodes))
        first = generate(llm, rows, PROMPT, 1)
        engine.append((generate(llm, rows, PROMPT, new) - first) / (new - 1))
    return statistics.median(bare), statistics.median(engine)


if __name__ == "__main__":
    main()
