"""Decoding beside the memory's speed: tokens a second of Qwen2.5-0.5B's shape, and what a long context adds.

`python -m tests.benchmarks.memory_speed`. Random weights, greedy; with the native kernels and with XLA's, in turns.
The bytes of all weights, times steps a second, are compared with what two threads read in the same round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from jaxllm import LLM
from jaxllm.model import weights
from tests.benchmarks import shapes
from tests.benchmarks.aims import require
from tests.benchmarks.bare import compile_greedy
from tests.benchmarks.sides import GEOMETRY, generate

XLA = ("linear=xla", "paged_decode=xla_lanes", "paged_prefill=xla")
KINDS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "int8": {"dtype": "float32", "quantization": "int8"},
}
LEAST_SHARE = {"bfloat16": 0.85, "int8": 0.75}  # of the memory's speed, at one row
LEAST_GAIN = 1.5  # at 16 rows of bfloat16
LEAST_PREFILL = 600  # tokens a second of bfloat16, of a prompt of 3,500
MOST_GROWTH = 0.012  # seconds that a step takes longer with 3,500 tokens of context than with 256
NEW = 16
READ = 1 << 28  # bytes that are read to measure the memory


def bandwidth(array: np.ndarray, threads: int) -> float:
    """Return the bytes a second at which so many threads read an array."""
    parts = np.array_split(array, threads)
    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        list(pool.map(np.max, parts))
        return array.nbytes / (time.perf_counter() - began)


def decode(llm: LLM, rows: int, context: int) -> float:
    """Return the seconds of a step."""
    return (generate(llm, rows, context, NEW + 1) - generate(llm, rows, context, 1)) / NEW


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24, help="of the shape")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--contexts", type=int, nargs="*", default=[256, 3500, 8192])
    parser.add_argument("--threads", type=int, default=2, help="that measure the memory")
    options = parser.parse_args()
    folder = str(shapes.folder_of("qwen2.5-0.5b", "bfloat16", options.layers))
    longest = max([1024, *options.contexts]) + 2 * NEW
    sizes = GEOMETRY | {"max_model_len": longest, "num_kv_blocks": longest // 16 + 64}
    array = np.ones(READ // 4, np.float32)
    behind = []
    for kind in options.kinds:
        engines = {}
        for name, kernels in (("native", ()), ("xla", XLA)):
            engines[name] = LLM(folder, precompile="covering", kernels=kernels, **sizes, **KINDS[kind])
            compile_greedy(engines[name].engine, [1, 2, 16], [16, 512])
        jobs = {(name, rows): partial(decode, llm, rows, 16) for rows in (1, 16) for name, llm in engines.items()}
        for context in options.contexts:
            jobs |= {(name, "decode", context): partial(decode, llm, 1, context) for name, llm in engines.items()}
            jobs |= {(name, "prompt", context): partial(generate, llm, 1, context, 1) for name, llm in engines.items()}
        num_bytes = weights.num_bytes(engines["native"].engine.runner._params)
        seconds: dict[Any, list[float]] = {job: [] for job in jobs}
        shares = []
        for _ in range(options.rounds):
            for job, run in jobs.items():
                before = bandwidth(array, options.threads)
                seconds[job].append(run())
                if job == ("native", 1):
                    near = (before + bandwidth(array, options.threads)) / 2
                    shares.append(num_bytes / seconds[job][-1] / near)
        median = {job: statistics.median(own) for job, own in seconds.items()}
        share = statistics.median(shares)
        print(f"{kind}: {1 / median['native', 1]:.1f} tokens a second at one row, {share:.0%} of the memory's speed")
        for rows in (1, 16):
            ours, other = median["native", rows], median["xla", rows]
            print(
                f"{kind}, {rows:2} rows: {ours * 1e3:.1f} ms a step, XLA's {other * 1e3:.1f}: {other / ours:.2f} times"
            )
        for context in options.contexts:
            for what in ("decode", "prompt"):
                ours, other = median["native", what, context], median["xla", what, context]
                per = context if what == "prompt" else 1
                print(f"{kind}, {what} at {context}: {per / ours:.1f} tokens a second, XLA's {per / other:.1f}")
        if share < LEAST_SHARE.get(kind, 0.0):
            behind.append(f"{kind} reads at {share:.0%}")
        if kind == "bfloat16":
            if median["xla", 16] / median["native", 16] < LEAST_GAIN:
                behind.append("16 rows")
            if {256, 3500} <= {*options.contexts}:
                if median["native", "decode", 3500] - median["native", "decode", 256] > MOST_GROWTH:
                    behind.append("decoding behind 3,500 tokens")
                if 3500 / median["native", "prompt", 3500] < LEAST_PREFILL:
                    behind.append("a prompt of 3,500 tokens")
        for llm in engines.values():
            llm.close()
    require(not behind, f"behind what is promised: {', '.join(behind)}")


if __name__ == "__main__":
    main()
