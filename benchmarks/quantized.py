"""The gain of `--quantization int8`: decoding 1 and 16 rows of Qwen2.5-0.5B's shape, against bfloat16.

`python -m benchmarks.quantized`. Random weights, greedy. Rounds alternate between the engines, so that other load
affects both alike; medians are compared.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from benchmarks import shapes
from benchmarks.aims import require
from benchmarks.bare import compile_greedy
from benchmarks.sides import GEOMETRY, generate, medians
from jaxllm import LLM
from jaxllm.checkpoints import weights
from tests.support import inspection

ROWS, PROMPT, NEW = GEOMETRY["max_num_seqs"], 16, 12
PROMISED = {1: 1.3, 16: 1.2}  # times the speed of bfloat16, by rows


def make(layers: int | None, **settings: Any) -> LLM:
    """Start an engine with the programs of 1 and 16 greedy rows, and few others."""
    folder = str(shapes.folder_of("qwen2.5-0.5b", "bfloat16", layers))
    llm = LLM(folder, precompile="covering", **GEOMETRY, **settings)
    compile_greedy(llm.engine, [1, 2, ROWS], [])  # prompts are subtracted
    return llm


def decode(llm: LLM, rows: int) -> float:
    """Return the seconds of a step that decodes `rows` rows."""
    return (generate(llm, rows, PROMPT, NEW) - generate(llm, rows, PROMPT, 1)) / (NEW - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, help="of the shape (24)")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    engines = {
        "bfloat16": make(options.layers, dtype="bfloat16"),
        "int8": make(options.layers, dtype="float32", quantization="int8"),
    }
    jobs = {(name, rows): partial(decode, llm, rows) for rows in PROMISED for name, llm in engines.items()}
    seconds = medians(options.rounds, jobs)
    for name, llm in engines.items():
        print(f"{name}: weights of {weights.num_bytes(inspection.params_of(llm.engine.runner)) / 2**20:.0f} MiB")
        llm.close()
    reached = {}
    for rows, promised in PROMISED.items():
        other, ours = (seconds[name, rows] for name in engines)
        reached[rows] = other / ours
        print(
            f"{rows:2} rows: bfloat16 {other * 1e3:6.1f} ms a step, int8 (the rest float32) {ours * 1e3:6.1f} "
            f"ms: {other / ours:.2f} times as fast (aim {promised})"
        )
    require(all(reached[rows] >= aim for rows, aim in PROMISED.items()), "int8 stays behind what is promised")


if __name__ == "__main__":
    main()
