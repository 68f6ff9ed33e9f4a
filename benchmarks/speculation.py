"""The gain of drafts: tokens per second of one row with and without them, on repetitive and other text.

`python -m benchmarks.speculation`. Steps have Qwen2.5-0.5B's shape, float32, with random weights: sampled outputs
never repeat, and greedy ones soon do. For realistic texts, summaries of notes and code about the embedded model's
world, the logits of a greedy request are replaced by ones that prefer the text's next token, and the engine drafts,
verifies and adapts as if the model had written it. For an EAGLE-3 head the embedded model and its head are grown to
that shape (grown.py); the small ones are measured too. Engines alternate; medians are compared.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from benchmarks import grown, shapes
from benchmarks.aims import require
from benchmarks.sides import GEOMETRY, medians
from jaxllm import LLM, SamplingParams
from jaxllm.embedded import MODEL_DIR
from jaxllm.sampling import sampler
from jaxllm.sampling.sampler import Sampled, SamplingRows
from jaxllm.text.tokenizer import load_tokenizer
from training.facts import COUNTRIES
from training.questions import held_out_questions

LOOKUP = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
NEW = 96  # tokens of an output
HEAD = {"method": "eagle3", "num_speculative_tokens": 3}
EVERY = 200  # of the held-out questions is used
Case = tuple[list[list[int]], list[SamplingParams]]  # one of this many held-out questions is used
LEAST_GAIN, LEAST_GAIN_OF_HEAD, LEAST_SPEED = 1.5, 1.3, 0.95


class Text(NamedTuple):
    """A text to write: tokens of its prompt and of its continuation, and its sampling parameters."""

    tokens: list[int]
    num_prompt: int
    params: SamplingParams


def summary(draws: random.Random) -> tuple[str, str]:
    """Return notes, and a summary that repeats some of their sentences."""
    chosen = draws.sample(COUNTRIES, 8)
    notes = [f"The capital of {name} is {capital}, and people pay in {money}." for name, capital, _, _, money in chosen]
    said = draws.sample(notes, 6)
    return "Notes: " + " ".join(notes) + "\nSummary:", " In short: " + " Also: ".join(said)


def code(draws: random.Random) -> tuple[str, str]:
    """Return the records of a table: equal names, different values."""
    lines = [
        f'    Country(name="{name}", capital="{capital}", continent="{continent}", language="{language}"),\n'
        for name, capital, continent, language, _ in draws.sample(COUNTRIES, 12)
    ]
    return "COUNTRIES = [\n" + "".join(lines[:2]), "".join(lines[2:])


def texts(count: int) -> dict[str, list[Text]]:
    """Return `count` texts of each kind."""
    tokenizer, made = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")), {}
    number = 1
    for kind in (summary, code):
        made[kind.__name__] = []
        for seed in range(count):
            prompt, rest = (tokenizer.encode(part).ids for part in kind(random.Random(seed)))
            params = SamplingParams(temperature=0.0, seed=number, max_tokens=NEW, ignore_eos=True)
            made[kind.__name__].append(Text((prompt + rest)[: len(prompt) + NEW], len(prompt), params))
            number += 1
    return made


@contextmanager
def written(made: dict[str, list[Text]]) -> Iterator[None]:
    """Make a greedy request write the text whose number is its seed; 0 is unused.

    A logits processor could do this too, but would bring penalties, log-probabilities and all other sampling along.
    """
    longest = max(len(text.tokens) for own in made.values() for text in own)
    table = np.array([[*text.tokens, *[0] * (longest - len(text.tokens))] for own in made.values() for text in own])
    plain = sampler.sample

    def sample(logits: jax.Array, rows: SamplingRows, positions: jax.Array, *rest: Any) -> Sampled:
        number = rows.key[:, 1].astype(jnp.int32)
        due = jnp.asarray(table).at[number - 1, positions].get(mode="clip")
        is_due = (jnp.arange(logits.shape[-1]) == due[:, None]).astype(logits.dtype)
        is_written = (rows.temperature == 0.0) & (number > 0)
        return plain(jnp.where(is_written[:, None], is_due, logits), rows, positions, *rest)

    sampler.sample = sample
    try:
        yield
    finally:
        sampler.sample = plain


def questions() -> Case:
    """Return held-out questions for the embedded model and its head, some of each kind."""
    tokenizer = load_tokenizer(MODEL_DIR)
    prompts = [tokenizer.encode_chat(question.messages)[1] for question in held_out_questions(0)[::EVERY]]
    return prompts, [SamplingParams(temperature=0.0, max_tokens=NEW)] * len(prompts)


def generate(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> float:
    """Return the seconds per token, one output after the other."""
    began = time.perf_counter()
    count = 0
    for prompt, own in zip(prompts, params, strict=True):
        (output,) = llm.generate([{"prompt_token_ids": prompt}], own, use_tqdm=False)
        count += len(output.outputs[0].token_ids)
    return (time.perf_counter() - began) / count


def gains(
    model: str, config: dict[str, Any], settings: dict[str, Any], cases: dict[str, Case], rounds: int
) -> dict[str, float]:
    """Measure and print the gain of drafts in each case: tokens per second with them relative to without."""
    with LLM(model, **settings) as plain, LLM(model, speculative_config=config, **settings) as drafting:
        engines = {"plain": plain, "drafting": drafting}
        for llm in engines.values():
            for case in cases.values():  # queues its programs
                generate(llm, *case)
            llm.engine.runner.programs.wait()
        jobs = {
            (kind, name): partial(generate, llm, *case) for kind, case in cases.items() for name, llm in engines.items()
        }
        seconds = medians(rounds, jobs)
    found = {kind: seconds[kind, "plain"] / seconds[kind, "drafting"] for kind in cases}
    for kind, gain in found.items():
        per_second = 1 / seconds[kind, "drafting"]
        print(f"{kind}: {per_second:.1f} tokens a second, {gain:.2f} times as many as without drafts", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=24, help="of the shape")
    parser.add_argument("--texts", type=int, default=3, help="of each kind")
    options = parser.parse_args()
    model = str(shapes.folder_of("qwen2.5-0.5b", "float32", options.layers))
    made = texts(options.texts)
    settings: dict[str, Any] = GEOMETRY | {"dtype": "float32"}
    plain_params = {
        "random": SamplingParams(temperature=1.0, seed=1, max_tokens=NEW, ignore_eos=True),
        "loops": SamplingParams(temperature=0.0, seed=0, max_tokens=NEW, ignore_eos=True),
    }
    cases: dict[str, Case] = {name: ([[7, 8, 9, 10] * 8], [own]) for name, own in plain_params.items()}
    cases |= {
        kind: ([text.tokens[: text.num_prompt] for text in own], [text.params for text in own])
        for kind, own in made.items()
    }
    with written(made):
        found = gains(model, LOOKUP, settings, cases, options.rounds)
    settings |= {"max_model_len": 512}
    large, its_head = grown.folders()
    head = {}
    for name, target, drafter in (("small", MODEL_DIR, "jaxllm-eagle"), ("grown", large, str(its_head))):
        case = {f"answers, a head, {name}": questions()}
        head |= gains(str(target), HEAD | {"model": drafter}, settings, case, options.rounds)
    require(min(found["summary"], found["code"]) >= LEAST_GAIN, "prompt lookup gains less than is promised")
    require(head["answers, a head, grown"] >= LEAST_GAIN_OF_HEAD, "the head gains less than is promised")
    require(found["random"] >= LEAST_SPEED, "prompt lookup costs more than is promised on text that does not repeat")


if __name__ == "__main__":
    main()
