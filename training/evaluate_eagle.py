"""Measures the acceptance of the EAGLE-3 head's drafts: `python -m training.evaluate_eagle`.

The embedded model answers the held-out questions greedily. The head drafts after every token of the answers, and a
draft is accepted up to its first difference from the answer. The acceptance is counted without an engine and written to
the head's score.json: the rate at each position of a draft, and the tokens per step of the model with drafts of 1 to 4
tokens (the accepted ones plus one).
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxllm import LLM, SamplingParams
from jaxllm.checkpoints import eagle_files, weights
from jaxllm.embedded import HEADS, MODEL_DIR
from jaxllm.families.families import read_spec
from jaxllm.model.decoder import Params
from jaxllm.model.eagle import Head
from jaxllm.model.sharding import make_layout
from jaxllm.model.spec import Spec
from training import drafting
from training.export import write_json
from training.questions import Question, add_arguments, chosen_questions

LONGEST = 4  # tokens per draft
ROWS = 32
MOST_NEW_TOKENS = 200
# Guaranteed tokens per step over all questions, by length of the drafts; a lower number makes the command fail.
PROMISED: dict[int, float] = {1: 1.85, 4: 3.6}


def answered(questions: Sequence[Question]) -> list[tuple[list[int], list[int]]]:
    """Return each question's prompt and the model's greedy answer as tokens."""
    with LLM(str(MODEL_DIR)) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=MOST_NEW_TOKENS)
        outputs = llm.chat([question.messages for question in questions], greedy)
    return [(list(output.prompt_token_ids), list(output.outputs[0].token_ids)) for output in outputs]


def drafted_on_device(spec: Spec, head: Head, params: Params[Array], target: Params[Array], tokens: Array) -> Array:
    """Draft greedily after every token; return the token of each pass and entry, int32[rows, passes, time - 1]."""
    _, fused = drafting.read(spec, head, params, target, tokens)
    numbers = params.top["draft_ids"]
    ids = jnp.zeros(head.draft_vocab_size, jnp.int32).at[numbers].set(jnp.arange(len(numbers)), mode="drop")

    def choose(scores: Array) -> Array:
        return ids[jnp.argmax(scores, axis=-1)]

    scores = drafting.drafts(head, params, target, fused[:, :-1], tokens[:, 1:], LONGEST, choose)
    return jnp.stack([choose(each) for each in scores], axis=1)


def drafted(folder: Path, texts: list[list[int]]) -> list[np.ndarray]:
    """Return the drafts after every token of each text, int32[time, LONGEST]: the draft of entry t begins at t + 1."""
    spec, family = read_spec(weights.read_config(MODEL_DIR))
    layout = make_layout(jax.devices("cpu"), 1)
    target = weights.load(MODEL_DIR, spec, family, layout, "float32")
    head = eagle_files.read(folder, spec)
    params = eagle_files.load(folder, head, layout, "float32")
    on_device = jax.jit(partial(drafted_on_device, spec, head))
    found: dict[int, np.ndarray] = {}
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
    for start in range(0, len(order), ROWS):
        some = order[start : start + ROWS]
        # The last entries of a draft need LONGEST further tokens.
        time = -(-(len(texts[some[-1]]) + LONGEST) // 32) * 32
        rows = np.zeros((ROWS, time), np.int32)
        for row, number in enumerate(some):
            rows[row, : len(texts[number])] = texts[number]
        guesses = np.asarray(on_device(params, target, rows))
        for row, number in enumerate(some):
            found[number] = diagonals(guesses[row], len(texts[number]))
    return [found[number] for number in range(len(texts))]


def diagonals(guesses: np.ndarray, length: int) -> np.ndarray:
    """Rearrange passes [LONGEST, time - 1] as drafts [length, LONGEST]: the draft of token t began at entry t - 1."""
    begins = np.arange(length)[:, None] - 1
    passes = np.arange(len(guesses))
    return np.where(begins >= 0, guesses[passes, np.maximum(begins, 0) + passes], -1)


def accepted(text: list[int], first: int, drafts: np.ndarray, most: int) -> list[int]:
    """Replay a text from token `first` with drafts of `most` tokens; return the number accepted in each step."""
    counts, known = [], first  # the newest token, which the model gave and has not read
    while known < len(text) - 1:
        draft, right = drafts[known, :most], text[known + 1 : known + 1 + most]
        wrong = np.flatnonzero(draft[: len(right)] != right)
        counts.append(int(wrong[0]) if len(wrong) else len(right))
        known += counts[-1] + 1
    return counts


def measure(answers: list[tuple[list[int], list[int]]], drafts: list[np.ndarray]) -> dict[str, Any]:
    """Return the tokens per step for each length of a draft, and the acceptance rate of the longest by position."""
    found: dict[str, Any] = {}
    texts = [(prompt + answer, len(prompt)) for prompt, answer in answers]
    for most in range(1, LONGEST + 1):
        counts = [
            each for (text, first), own in zip(texts, drafts, strict=True) for each in accepted(text, first, own, most)
        ]
        # The prompt's step yields the first token. A step whose draft includes the last token yields none after it.
        written = sum(len(text) - first - 1 for text, first in texts)
        found[f"tokens per step, {most}"] = round(written / max(len(counts), 1), 3)
    found["accepted by place"] = [
        round(sum(each > place for each in counts) / max(len(counts), 1), 4) for place in range(LONGEST)
    ]
    found["steps"] = len(counts)
    return found


def main() -> None:
    """Draft, print and write the score; exit with 1 if a number is below its guarantee."""
    parser = argparse.ArgumentParser(prog="python -m training.evaluate_eagle", description="Measure the EAGLE-3 head.")
    parser.add_argument("--head", type=Path, default=HEADS.get("jaxllm-eagle"), help="folder of the head")
    add_arguments(parser)
    options = parser.parse_args()
    questions = chosen_questions(options)
    answers = answered(questions)
    drafts = drafted(options.head, [prompt + answer for prompt, answer in answers])
    kinds = {question.kind: None for question in questions}
    scores = {"all": measure(answers, drafts)}
    for kind in kinds:
        own = [number for number, question in enumerate(questions) if question.kind == kind]
        scores[kind] = measure([answers[number] for number in own], [drafts[number] for number in own])
    head = f"{'':10}" + "".join(f"{f'k = {most}':>8}" for most in range(1, LONGEST + 1))
    print(head + "   accepted by place, k = 4")
    for kind, value in scores.items():
        lengths = [value[f"tokens per step, {most}"] for most in range(1, LONGEST + 1)]
        places = " ".join(f"{share:6.1%}" for share in value["accepted by place"])
        print(f"{kind:10}" + "".join(f"{length:8.3f}" for length in lengths) + f"   {places}")
    if not options.limit:
        write_json(options.head / "score.json", {"jax": jax.__version__, "questions_seed": options.seed} | scores)
    broken = [
        f"k = {most}: {scores['all'][f'tokens per step, {most}']} tokens per step are below {least}"
        for most, least in PROMISED.items()
        if scores["all"][f"tokens per step, {most}"] < least
    ]
    if broken:
        raise SystemExit("\n".join(broken))


if __name__ == "__main__":
    main()
