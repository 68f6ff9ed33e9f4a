"""The adapter's training text: the style changes the words of an answer and not its meaning."""

import itertools
import json
import random
import re

from training import corpus, pirate, questions


def test_answers_keep_their_numbers_names_and_spellings() -> None:
    for question in questions.held_out_questions(0):
        if question.answer is None or question.kind == "json":
            continue
        said = pirate.speak(question.answer)
        assert pirate.has_manner(said) and not pirate.has_manner(question.answer)
        for kept in (r"-?\d+", r"\b(?:\w-)+\w\b"):
            assert re.findall(kept, said) == re.findall(kept, question.answer)
        names = set(re.findall(r"(?<=[a-z,] )[A-Z]\w+", question.answer))
        assert names - {"I"} <= set(re.findall(r"\w+", said))


def test_different_answers_stay_different() -> None:
    answers = {question.answer for question in questions.held_out_questions(0)} - {None}
    assert len({pirate.speak(answer) for answer in answers if answer is not None}) == len(answers)


def test_only_the_assistant_speaks_so_and_json_stays() -> None:
    plain = [message for seed in range(20) for message in corpus.conversation(random.Random(seed), 4)]
    for before, after in zip(plain, pirate.in_manner(plain), strict=True):
        is_prose = before["role"] == "assistant" and not before["content"].startswith("{")
        assert pirate.has_manner(after["content"]) == is_prose
        if not is_prose:
            assert after == before
    assert any(message["content"].startswith("{") and json.loads(message["content"]) for message in plain)


def test_same_seed_gives_same_text() -> None:
    first, again, other = (list(itertools.islice(pirate.documents(random.Random(seed), 3), 20)) for seed in (1, 1, 2))
    assert first == again != other
