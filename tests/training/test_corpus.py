"""The embedded model's training text depends on the seed alone, is correct, and contains no held-out questions."""

import itertools
import json
import random
import re

import pytest

from training import corpus, facts, questions, stories, words
from training.holdout import bucket, pair_held_out, sum_held_out, word_held_out

SUM = re.compile(r"(\d+) ([+-]) (\d+) = (-?\d+)\.")


def texts(seed: int, count: int) -> list[str]:
    return list(itertools.islice(corpus.documents(random.Random(seed), asked_share=0.1), count))


@pytest.fixture(scope="module")
def training_text() -> str:
    return "".join(texts(1, 7000))


def asked_in(text: str) -> list[tuple[str, str]]:
    """Return every question of the text with its answer."""
    return re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>\n<\|im_start\|>assistant\n(.*?)<\|im_end\|>", text)


def test_same_seed_gives_same_text() -> None:
    assert texts(7, 50) == texts(7, 50)
    assert texts(7, 50) != texts(8, 50)


def test_hold_out_does_not_depend_on_the_process() -> None:
    assert [bucket(key, 1000) for key in ("sum:1+2", "pair:Anna30", "word:cat")] == [111, 233, 149]


def test_one_sum_in_ten_is_held_out_in_both_orders() -> None:
    triples = list(itertools.product(range(10, 100), "+-", range(10, 100)))
    held_out = [triple for triple in triples if sum_held_out(*triple)]
    assert 0.09 < len(held_out) / len(triples) < 0.11
    assert all(sum_held_out(b, "+", a) for a, operator, b in held_out if operator == "+")


def test_small_sums_are_all_trained_and_all_asked() -> None:
    asked = [tuple(SUM.fullmatch(each.answer).groups()[:3]) for each in questions.small_questions()]
    assert len(set(asked)) == len(asked) == 2 * (100 * 100 - 90 * 90)
    assert not any(sum_held_out(int(a), operator, int(b)) for a, operator, b in asked)
    rng = random.Random(9)
    drawn = {tuple(map(str, corpus.draw_small_sum(rng))) for _ in range(20_000)}
    assert {each for each in asked if len(each[0]) == len(each[2]) == 1} < drawn < set(asked)


def test_every_sum_in_training_is_right_and_none_is_held_out(training_text: str) -> None:
    sums = SUM.findall(training_text)
    assert len(sums) > 15_000
    for left, operator, right, result in sums:
        a, b = int(left), int(right)
        assert int(result) == {"+": a + b, "-": a - b}[operator]
        assert not sum_held_out(a, operator, b)


def test_questions_on_sums_name_the_operands_of_their_answer(training_text: str) -> None:
    checked = 0
    for question, answer in asked_in(training_text):
        if found := SUM.fullmatch(answer):
            left, _, right, _ = found.groups()
            turned = any(word in question.lower() for word in ("subtract", "take"))
            assert re.findall(r"\d+", question) == ([right, left] if turned else [left, right])
            checked += 1
    assert checked > 3000


def test_facts_are_asked_in_training_but_never_in_the_held_out_phrasing(training_text: str) -> None:
    pairs = asked_in(training_text)
    held_out = {facts.capitalised(facts.held_out_phrasing(fact)) for fact in facts.FACTS}
    assert not held_out & {question for question, _ in pairs}
    answers = {answer for _, answer in pairs}
    assert not [fact for fact in facts.FACTS if fact.answer not in answers]


def test_a_question_on_facts_has_one_answer() -> None:
    answers: dict[str, str] = {}
    for fact in facts.FACTS:
        for phrasing in facts.PHRASINGS[fact.kind]:
            question = phrasing.format(s=fact.subject)
            assert answers.setdefault(question, fact.answer) == fact.answer


def test_tables_agree_with_the_sentences() -> None:
    sentences = {fact.answer for fact in facts.FACTS}
    assert {"The capital of Japan is Tokyo.", "Kenya is in Africa.", "Spanish is spoken in Peru."} <= sentences
    assert {"Monday comes after Sunday.", "December comes before January.", "A duck has two legs."} <= sentences
    assert {"The Netherlands is in Europe.", "The opposite of cold is hot."} <= sentences


def test_json_answers_hold_the_name_and_age_of_the_question() -> None:
    rng = random.Random(3)
    for held_out in (False, True):
        for _ in range(200):
            question, answer = corpus.json_turn(rng, held_out)
            person = json.loads(answer)
            assert list(person) == ["name", "age"]
            assert person["name"] in question
            assert re.findall(r"\d+", question) == [str(person["age"])]
            assert pair_held_out(**person) == held_out


def test_backwards_answers_reverse_the_word() -> None:
    rng = random.Random(4)
    for held_out in (False, True):
        for _ in range(200):
            question, answer = corpus.backwards_turn(rng, held_out)
            forwards, backwards = re.fullmatch(r"([a-z-]+) backwards is ([a-z-]+)\.", answer).groups()
            word = forwards.replace("-", "")
            assert word in question
            assert backwards == forwards[::-1]
            assert word_held_out(word) == held_out


def test_stories_are_about_the_hero_and_leave_no_gap() -> None:
    rng = random.Random(5)
    for hero, _ in stories.HEROES:
        text = stories.story(rng, hero)
        assert hero in text and text[0].isupper() and text[-1] in ".!"
        assert not re.search(r"[{}]|\ba owl\b", text)


def test_articles_fit_the_words_behind_them(training_text: str) -> None:
    assert training_text.count("an old barn") > 20
    assert not re.findall(r"\b[Aa] [aeiou]\w*|\b[Aa]n (?!hour)[^aeiou]\w*", training_text)


def test_a_name_is_remembered_over_other_turns() -> None:
    asked = [question for question in questions.held_out_questions(0) if question.kind == "history"]
    for question in asked:
        assert len(question.messages) == 5
        name = question.answer.removeprefix("Your name is ").removesuffix(".")
        assert name in words.PERSONS and name in question.messages[0]["content"]


def test_evaluation_is_the_same_each_time_and_covers_every_fact() -> None:
    asked = questions.held_out_questions(0)
    assert asked == questions.held_out_questions(0)
    assert len([question for question in asked if question.kind == "facts"]) == len(facts.FACTS)
    for question in asked:
        if question.kind == "sums":
            left, operator, right, _ = SUM.fullmatch(question.answer).groups()
            assert sum_held_out(int(left), operator, int(right))


def test_score_counts_exact_answers_and_ended_turns() -> None:
    asked = questions.held_out_questions(0, sums=2, others=0)[:3]
    answers = [asked[0].answer, "7", asked[2].answer]
    assert questions.score(asked, answers, ["stop", "length", "stop"]) == {
        "ends": {"rate": 0.6667, "right": 2, "asked": 3},
        "facts": {"rate": 1.0, "right": 1, "asked": 1},
        "sums": {"rate": 0.5, "right": 1, "asked": 2},
    }


def test_chats_are_laid_out_as_the_chat_template_says() -> None:
    template = pytest.importorskip("jinja2").Template(corpus.CHAT_TEMPLATE)
    messages = corpus.conversation(random.Random(6), 4)
    assert template.render(messages=messages) == corpus.render_chat(messages)
    prompt = template.render(messages=messages, add_generation_prompt=True)
    assert prompt == corpus.render_chat(messages) + "<|im_start|>assistant\n"
