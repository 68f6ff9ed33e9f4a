"""The savings of the prefix cache, and its cost without repeats: `python -m benchmarks.prefix_cache`.

200 requests, each with one of 10 prefixes of 512 tokens and 16 distinct tokens, one after another: the time to the
first token with the cache on, relative to off. Then prompts without common prefixes, in alternating rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

from benchmarks import shapes
from benchmarks.aims import require
from benchmarks.bare import compile_greedy
from jaxllm import LLM, SamplingParams

MODEL, DTYPE = "stories42M", "float32"
PREFIX, OWN = 512, 16
REPEATS = 20  # requests per prefix, of which the first misses
SHARE, LOSS = 0.2, 0.02
FIRST = SamplingParams(temperature=0.0, max_tokens=1)


def shared_prompts(count: int) -> list[list[int]]:
    """Return prompts that begin with one of the prefixes, in random order."""
    random = np.random.default_rng(0)
    prefixes = random.integers(5, 1000, (count // REPEATS, PREFIX)).tolist()
    return [prefixes[random.integers(len(prefixes))] + random.integers(5, 1000, OWN).tolist() for _ in range(count)]


def first_tokens(llm: LLM, prompts: list[list[int]]) -> float:
    """Return the mean seconds to the first token of consecutive prompts."""
    llm.reset_prefix_cache()
    began = time.perf_counter()
    for prompt in prompts:
        llm.generate(prompt, FIRST, use_tqdm=False)
    return (time.perf_counter() - began) / len(prompts)


def without_repeats(llm: LLM, seed: int) -> float:
    """Return the seconds for prompts without common prefixes."""
    prompts = np.random.default_rng(seed).integers(5, 1000, (16, 256)).tolist()
    began = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True), use_tqdm=False)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    settings: dict[str, Any] = {"max_model_len": 768, "num_kv_blocks": 512, "max_num_seqs": 16}
    folder = str(shapes.folder_of(MODEL, DTYPE))
    engines = {
        is_on: LLM(folder, dtype=DTYPE, enable_prefix_caching=is_on, precompile="covering", **settings)
        for is_on in (True, False)
    }
    for llm in engines.values():
        compile_greedy(llm.engine, [16], [16, 32, 64, 160])
        without_repeats(llm, 0)
    prompts = shared_prompts(options.requests)
    # Without the cache every request costs the same, so a fifth of them suffice.
    on, off = first_tokens(engines[True], prompts), first_tokens(engines[False], prompts[: len(prompts) // 5])
    print(
        f"{MODEL}: {len(prompts)} requests, {len(prompts) // REPEATS} prefixes of {PREFIX}: first token after "
        f"{on * 1e3:.1f} ms with the cache, {off * 1e3:.1f} ms without: {on / off:.2f} (aim {SHARE})"
    )
    ratios = []
    for number in range(options.rounds):
        order = (True, False) if number % 2 else (False, True)
        taken = {is_on: without_repeats(engines[is_on], 1 + number) for is_on in order}
        ratios.append(taken[True] / taken[False])
    loss = statistics.median(ratios) - 1
    print(f"  where nothing repeats the cache costs {loss:+.1%} (median of {options.rounds} pairs, aim {LOSS:.0%})")
    for llm in engines.values():
        llm.close()
    require(on / off <= SHARE, f"the first token takes {on / off:.2f} of what it takes without the cache")
    require(loss <= LOSS, f"the cache costs {loss:.1%}")


if __name__ == "__main__":
    main()
