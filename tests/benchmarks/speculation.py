"""What prompt lookup gains: tokens a second of one row with and without it, on text that repeats and that does not.

`python -m tests.benchmarks.speculation`. Steps are of Qwen2.5-0.5B's shape, float32. Its weights are random, so that
what it samples never repeats, and what it likes best soon does. For text in between, how many drafts are kept is
measured with the embedded model, on summaries and code about its own world, step by step; what these steps would take
on the larger shape follows from the times of its programs. Engines take turns; medians are compared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxllm import LLM, SamplingParams
from jaxllm.embedded import MODEL_DIR
from jaxllm.scheduler.state import Plan
from tests.benchmarks import shapes
from tests.benchmarks.aims import require
from tests.benchmarks.sides import GEOMETRY, medians
from tests.benchmarks.verifying import job

DRAFTS = 4
LOOKUP = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
NEW = 96
LEAST_GAIN, LEAST_SPEED = 1.5, 0.95
# Texts that say again what they have said: a list that is copied, a table, code with one line for each of some names.
_NAMES = ("Ada", "Ben", "Cleo", "Dan")
_FACTS = "".join(f"{name} has a red ball and a small dog. " for name in _NAMES)
REPEATING = (
    f"{_FACTS}Say it again: {_FACTS[:40]}",
    "".join(f"{name} = Person(name='{name}', pet='dog', toy='ball')\n" for name in _NAMES) + "Ada = Person(",
    f"Text: {_FACTS}\nSummary: Ada has a red ball",
    "for name in names: print(name)\nfor pet in pets: print(pet)\nfor toy in toys: print(",
)


def generate(llm: LLM, prompt: Any, params: SamplingParams) -> float:
    """Return the seconds a token of one output."""
    began = time.perf_counter()
    llm.generate([prompt], params, use_tqdm=False)
    return (time.perf_counter() - began) / NEW


def steps_of(prompts: Sequence[str]) -> tuple[list[int], list[int]]:
    """Let the embedded model continue texts; return the tokens of each decode step and how many it yielded."""
    sizes: list[int] = []
    yielded: list[int] = []
    with LLM(str(MODEL_DIR), speculative_config=LOOKUP, max_num_seqs=1) as llm:
        scheduler = llm.engine.scheduler
        commit = scheduler.commit

        def noting(plan: Plan, *given: Any) -> Any:
            events = commit(plan, *given)
            if len(plan.slots) == plan.num_decodes and len(events.ids):
                sizes.append(plan.num_tokens)
                yielded.append(len(events.tokens))
            return events

        scheduler.commit = noting
        params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
        llm.generate(list(prompts), params, use_tqdm=False)
    return sizes, yielded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=24, help="of the shape")
    options = parser.parse_args()
    model = str(shapes.folder_of("qwen2.5-0.5b", "float32", options.layers))
    settings: dict[str, Any] = GEOMETRY | {"dtype": "float32", "precompile": "background"}
    params = {
        "repeats": SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True),
        "does not": SamplingParams(temperature=1.0, seed=1, max_tokens=NEW, ignore_eos=True),
    }
    prompt = {"prompt_token_ids": [7, 8, 9, 10] * 8}
    with LLM(model, **settings) as plain, LLM(model, speculative_config=LOOKUP, **settings) as drafting:
        engines = {"plain": plain, "drafting": drafting}
        for llm in engines.values():  # compiles what these need
            for each in params.values():
                for _ in range(2):
                    generate(llm, prompt, each)
            llm.engine.runner.programs.wait()
        jobs = {
            (text, name): partial(generate, llm, prompt, each)
            for text, each in params.items()
            for name, llm in engines.items()
        }
        seconds = medians(options.rounds, jobs)
        runner = drafting.engine.runner
        times = {drafts: [job(runner, 1, drafts)() for _ in range(options.rounds)] for drafts in range(DRAFTS + 1)}
    for text in params:
        gain = seconds[text, "plain"] / seconds[text, "drafting"]
        print(f"one row of text that {text}: {1 / seconds[text, 'drafting']:.1f} tokens a second, {gain:.2f} times")
    step = {1 + drafts: float(np.median(own)) for drafts, own in times.items()}
    print("steps of 1 to 5 tokens take", ", ".join(f"{step[size] * 1e3:.1f}" for size in step), "ms")
    gains = []
    for text in REPEATING:
        sizes, yielded = steps_of([text])
        gains.append(sum(yielded) * step[1] / sum(step[size] for size in sizes))
        print(f"{text[:40]!r}: {sum(yielded) / len(yielded):.2f} tokens a step, {gains[-1]:.2f} times as fast")
    gain = float(np.median(gains))
    print(f"median of these texts: {gain:.2f} times (at least {LEAST_GAIN})")
    slowest = seconds["does not", "plain"] / seconds["does not", "drafting"]
    require(gain >= LEAST_GAIN, "prompt lookup gains less than is promised on text that repeats")
    require(slowest >= LEAST_SPEED, "prompt lookup costs more than is promised on text that does not repeat")


if __name__ == "__main__":
    main()
