"""The held-out questions of the embedded model, and the score of a set of answers to them."""

import argparse
import itertools
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from training import corpus, facts, words
from training.corpus import Message
from training.holdout import is_small

Score = dict[str, dict[str, float | int]]


class Question(NamedTuple):
    """A chat to be answered; `answer` is the one right text, or None if the answer only has to end."""

    kind: str
    messages: list[Message]
    answer: str | None


def _asked(kind: str, turn: corpus.Turn) -> Question:
    """Make a question from one turn."""
    return Question(kind, [{"role": "user", "content": turn.question}], turn.answer)


def _remembered(rng: random.Random) -> Question:
    """Make a chat of three turns whose last question refers to the first."""
    given, asked = corpus.memory_turns(rng, rng.choice(words.PERSONS))
    between = corpus.sum_turn(rng, held_out=True)
    messages = []
    for question, answer in (given, between):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Question("history", [*messages, {"role": "user", "content": asked.question}], asked.answer)


def held_out_questions(seed: int, sums: int = 1000, others: int = 100) -> list[Question]:
    """Return the evaluation: held-out sums, every fact in its held-out phrasing, and `others` of each other kind."""
    rng = random.Random(f"evaluation {seed}")
    questions = [_asked("sums", corpus.sum_turn(rng, held_out=True)) for _ in range(sums)]
    for fact in facts.FACTS:
        asked = facts.capitalised(facts.held_out_phrasing(fact))
        questions.append(_asked("facts", corpus.Turn(asked, fact.answer)))
    questions += [_asked("json", corpus.json_turn(rng, held_out=True)) for _ in range(others)]
    questions += [_asked("backwards", corpus.backwards_turn(rng, held_out=True)) for _ in range(others)]
    questions += [_remembered(rng) for _ in range(others)]
    questions += [_asked("talk", corpus.talk_turn(rng)) for _ in range(others)]
    stories = [_asked("stories", corpus.story_turn(rng)) for _ in range(others)]
    return questions + [story._replace(answer=None) for story in stories]


def small_questions(first: int = 0, kind: str = "small") -> list[Question]:
    """Return all sums, then all differences, of a number below ten and one below a hundred, in either order.

    They are not held out. The phrasings rotate, starting with number `first`; number 0 is "What is 2 + 2?".
    """
    questions = []
    for operator, what in (("+", "sums"), ("-", "differences")):
        phrasings = corpus.ASKED_PHRASINGS[operator]
        small = [(a, b) for a, b in itertools.product(range(100), repeat=2) if is_small(a, b)]
        for number, (a, b) in enumerate(small, first):
            asked = phrasings[number % len(phrasings)].format(a=a, b=b)
            questions.append(_asked(f"{kind} {what}", corpus.Turn(asked, corpus.sum_answer(a, operator, b))))
    return questions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select the questions."""
    parser.add_argument("--seed", type=int, default=0, help="seed of the drawn questions")
    parser.add_argument("--limit", type=int, help="ask about this many questions only, spread over all kinds")


def chosen_questions(options: argparse.Namespace) -> list[Question]:
    """Return the held-out questions that the arguments select."""
    questions = held_out_questions(options.seed)
    return questions[:: max(1, len(questions) // options.limit)] if options.limit else questions


def report(
    scores: Score, options: argparse.Namespace, folder: Path, promised: Mapping[str, float], **noted: Any
) -> None:
    """Print the scores; without a limit, also write them to the folder's score.json, after the entries of `noted`.

    Raises:
        SystemExit: with a line for every rate below its guarantee.
    """
    for kind, value in scores.items():
        print(f"{kind:24} {value['rate']:8.4f}  ({value['right']} of {value['asked']})")
    if not options.limit:
        own = {"jax": jax.__version__, "questions_seed": options.seed, "scores": scores}
        (folder / "score.json").write_text(json.dumps(noted | own, indent=2) + "\n", encoding="utf-8")
    broken = [
        f"{kind}: {scores[kind]['rate']:.4f} is below {least}" for kind, least in promised.items()
        if kind in scores and scores[kind]["rate"] < least
    ]  # fmt: skip
    if broken:
        raise SystemExit("\n".join(broken))


def score(questions: list[Question], answers: list[str], finish_reasons: list[str]) -> Score:
    """Return for every kind how many answers are exactly right, and under "ends" how many turns ended by themselves."""
    tally: dict[str, list[bool]] = {}
    for question, answer, reason in zip(questions, answers, finish_reasons, strict=True):
        if question.answer is not None:
            tally.setdefault(question.kind, []).append(answer.strip() == question.answer)
        tally.setdefault("ends", []).append(reason == "stop")
    return {
        kind: {"rate": round(sum(hits) / len(hits), 4), "right": sum(hits), "asked": len(hits)}
        for kind, hits in sorted(tally.items())
    }
