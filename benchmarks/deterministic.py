"""The cost of `--deterministic`: decoding 1 and 16 rows and reading a prompt, against an engine without it.

`python -m benchmarks.deterministic`. The embedded model and Qwen2.5-0.5B's shape, float32. Rounds alternate
between the engines, so that other load affects both alike; medians are compared.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from benchmarks import shapes
from benchmarks.bare import compile_greedy
from benchmarks.sides import generate, medians
from jaxllm import LLM

PROMPT, LONG_PROMPT = 16, 256
NEW = {"embedded": 64, "qwen2.5-0.5b": 8}  # tokens, by model
SIZES: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 16, "num_kv_blocks": 512, "enable_prefix_caching": False}
JOBS = ("1 row", "16 rows", "a prompt")


def make(model: str, **settings: Any) -> LLM:
    """Start an engine with steps of the default size."""
    folder = str(shapes.folder_of(model, "bfloat16"))
    llm = LLM(folder, dtype="float32", precompile="covering", **SIZES, **settings)
    if "deterministic" not in settings:
        compile_greedy(llm.engine, [1, 2, 16], [16, 96, 160])  # the programs of the jobs
    return llm


def tokens_per_second(llm: LLM, job: str, new: int) -> float:
    """Do a job; return the tokens made, or read, per second."""
    if job == "a prompt":
        return LONG_PROMPT / generate(llm, 1, LONG_PROMPT, 1)
    rows = int(job.split()[0])
    step = (generate(llm, rows, PROMPT, new) - generate(llm, rows, PROMPT, 1)) / (new - 1)
    return rows / step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for model in NEW:
        engines = {"usual": make(model), "deterministic": make(model, deterministic=True)}
        speed = partial(tokens_per_second, new=NEW[model])
        jobs = {(job, name): partial(speed, llm, job) for job in JOBS for name, llm in engines.items()}
        speeds = medians(options.rounds, jobs)
        for llm in engines.values():
            llm.close()
        for job in JOBS:
            usual, ours = (speeds[job, name] for name in engines)
            print(
                f"{model}, {job}: {usual:.0f} tokens/s as usual, {ours:.0f} in deterministic mode: "
                f"{usual / ours:.2f} times the time",
                flush=True,
            )


if __name__ == "__main__":
    main()
