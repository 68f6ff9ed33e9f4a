"""The cost of compiling for starts and for running requests: `python -m benchmarks.compiling`.

Ready: the time of a start with an empty cache, relative to only compiling its covering programs. Steps: the time of a
decode step while other programs are compiled in the background, relative to the time without; the same program and
lengths, alternating. On the embedded model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks.aims import require
from jaxllm import LLM, SamplingParams
from jaxllm.runner.compiled_programs import halves
from jaxllm.sampling.sampler import Variant

PROMISED_READY, PROMISED_STEP = 1.5, 1.2  # times
ROUND_SECONDS = 10.0
ROWS, PROMPT, OUTPUT = 64, 16, 64
COVERING_ALONE = """
import sys, time
from jaxllm.config import EngineConfig
from jaxllm.embedded import MODEL_DIR
from jaxllm.metrics import Metrics
from jaxllm.runner import Runner
from jaxllm.setup.model_setup import prepare
config = EngineConfig(model=str(MODEL_DIR), precompile="covering", compilation_cache_dir=sys.argv[1])
setup = prepare(config)
Runner._compile_small = Runner.renew = lambda self: None
start = time.time()
Runner(config, setup, Metrics(), needs_weights=False)
print(time.time() - start)
"""
READY = """
import sys, time
from jaxllm import LLM
import jaxllm.llm
start = time.time()
llm = LLM(compilation_cache_dir=sys.argv[1])
print(time.time() - start)
sys.stdout.flush()
import os
os._exit(0)
"""


def seconds_of(program: str) -> float:
    """Run a program with an empty cache in a separate process; return the seconds that it measured."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", program, folder]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure_ready(rounds: int) -> float:
    """Return the time of a cold start relative to compiling the covering programs; imports are excluded."""
    alone = statistics.median(seconds_of(COVERING_ALONE) for _ in range(rounds))
    ready = statistics.median(seconds_of(READY) for _ in range(rounds))
    print(f"covering programs alone {alone:.1f} s, ready after {ready:.1f} s: {ready / alone:.2f} times", end=" ")
    print(f"(promised: at most {PROMISED_READY})")
    return ready / alone


def measure_steps(rounds: int) -> float:
    """Return the mean time of a decode step during compilation, relative to the mean without."""
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(precompile="covering", compilation_cache_dir=folder)
        engine, programs = llm.engine, llm.engine.runner.programs
        shapes = [key.shape for key in programs.covering if key.part == "forward"]
        ragged, decode = (halves(shape, Variant.FULL) for shape in shapes)
        choose = programs.choose  # also records that a step runs

        def always_covering(*arguments: object) -> object:
            way = choose(*arguments)  # pyright: ignore[reportArgumentType]
            return decode if way[0].shape.is_decode else ragged

        programs.choose = always_covering  # pyright: ignore[reportAttributeAccessIssue]
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
        count = 0

        waiting = list(programs.rest)

        def steps(seconds: float, compiles: bool = False) -> list[float]:
            nonlocal count
            times, end = [], time.perf_counter() + seconds
            ready = 0
            while time.perf_counter() < end:
                if compiles and len(programs) != ready:
                    ready = len(programs)
                    programs.want(waiting.pop(0))
                if not engine.has_unfinished_requests():
                    for _ in range(ROWS):
                        engine.add_request(str(count), [5] * PROMPT, params)
                        count += 1
                before, start = engine.metrics.padded_tokens, time.perf_counter()
                engine.step()
                if engine.metrics.padded_tokens - before == decode[0].shape.tokens:
                    times.append(time.perf_counter() - start)
            return times

        steps(3.0)
        programs.follow(max(1, (os.cpu_count() or 2) // 2))
        quiet: list[float] = []
        busy: list[float] = []
        for _ in range(rounds):
            quiet += steps(ROUND_SECONDS)
            busy += steps(ROUND_SECONDS, compiles=True)
            programs.wait()
        compiled = engine.metrics.programs_compiled - len(programs.covering)
        ratio = statistics.mean(busy) / statistics.mean(quiet)
        print(
            f"a decode step of {ROWS} rows: {1e3 * statistics.mean(quiet):.2f} ms, while {compiled} programs were "
            f"compiled {1e3 * statistics.mean(busy):.2f} ms: {ratio:.2f} times (promised: at most {PROMISED_STEP})"
        )
        llm.close()
        assert compiled > 0, "nothing was compiled meanwhile"
        return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    rounds = parser.parse_args().rounds
    figures = {"ready": measure_ready(rounds), "step": measure_steps(rounds)}
    print(json.dumps({"compiling": figures}))
    require(figures["ready"] <= PROMISED_READY and figures["step"] <= PROMISED_STEP, "behind what is promised")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # without waiting for running compilations
