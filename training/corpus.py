"""The training text of the embedded model: chats over a closed world, short stories; and the held-out questions.

Everything is drawn from the `random.Random` that the caller passes, so one seed gives one text. Items that `holdout`
and `facts.held_out_phrasing` reserve for the evaluation never appear in `documents`.
"""

import json
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from training import facts, stories, words
from training.holdout import pair_held_out, sum_held_out, word_held_out

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

# The same layout as `render_chat`; written to tokenizer_config.json.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

Message = dict[str, str]

SUM_PHRASINGS: dict[str, tuple[str, ...]] = {
    "+": (
        "What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} = ?", "How much is {a} plus {b}?", "Add {a} and {b}.",
        "What is {a} plus {b}?", "Calculate {a} + {b}.", "What is the sum of {a} and {b}?", "{a} plus {b}",
    ),
    "-": (
        "What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} = ?", "How much is {a} minus {b}?",
        "Subtract {b} from {a}.", "What is {a} minus {b}?", "Calculate {a} - {b}.", "Take {b} away from {a}.",
        "{a} minus {b}",
    ),
}  # fmt: skip

# Further phrasings, for the last phase of the training.
ASKED_PHRASINGS: dict[str, tuple[str, ...]] = {
    "+": (
        *SUM_PHRASINGS["+"],
        "What is {a}+{b}?", "What's {a} + {b}?", "What's {a}+{b}?", "{a} + {b} =", "{a}+{b}=", "{a}+{b}=?",
        "How much is {a} + {b}?", "What does {a} + {b} equal?", "Compute {a} + {b}.", "Can you add {a} and {b}?",
    ),
    "-": (
        *SUM_PHRASINGS["-"],
        "What is {a}-{b}?", "What's {a} - {b}?", "What's {a}-{b}?", "{a} - {b} =", "{a}-{b}=", "{a}-{b}=?",
        "How much is {a} - {b}?", "What does {a} - {b} equal?", "Compute {a} - {b}.",
        "Can you subtract {b} from {a}?",
    ),
}  # fmt: skip

JSON_PHRASINGS: tuple[str, ...] = (
    "Extract the name and the age as JSON: {fact}", "Give me the name and age as JSON. {fact}",
    "{fact} Write the name and the age as JSON.", "Turn this into JSON with name and age: {fact}",
    "Return JSON with the keys name and age: {fact}",
)  # fmt: skip
PERSON_PHRASINGS: tuple[str, ...] = (
    "{name} is {age} years old.", "My name is {name} and I am {age}.", "My friend {name} is {age}.",
    "{name} turned {age} today.", "I am {name}, {age} years old.", "At the age of {age}, {name} went to the sea.",
)  # fmt: skip
BACKWARDS_PHRASINGS: tuple[str, ...] = (
    'Spell the word "{word}" backwards.', "Spell {word} backwards.", 'Reverse the word "{word}".', "Reverse {word}.",
    'What is "{word}" backwards?', "How do you spell {word} backwards?",
)  # fmt: skip
FORWARDS_PHRASINGS: tuple[str, ...] = (
    'Spell the word "{word}".', "Spell {word}.", "How do you spell {word}?", 'How is "{word}" spelled?',
)  # fmt: skip
STORY_PHRASINGS: tuple[str, ...] = (
    "Tell me a story about {hero}.", "Tell me a short story about {hero}.", "Write a story about {hero}.",
    "Can you tell me a story about {hero}?", "I would like a story about {hero}.",
)  # fmt: skip
ANY_STORY_PHRASINGS: tuple[str, ...] = (
    "Tell me a story.", "Tell me a short story.", "Write a story.", "Once upon a time", "Can you tell me a story?",
)  # fmt: skip
# Kinds whose answer allows a follow-up question such as "And {subject}?", with its form.
FOLLOW_UPS: dict[str, str] = {
    "capital": "And of {s}?", "currency": "And of {s}?", "language": "And in {s}?", "legs": "And {s}?",
}  # fmt: skip

# Shares of the turns.
TURN_SHARES: dict[str, float] = {
    "sum": 0.42, "fact": 0.32, "json": 0.06, "backwards": 0.06, "forwards": 0.03, "story": 0.05, "talk": 0.04,
    "unknown": 0.02,
}  # fmt: skip

STORY_SHARE = 0.03


class Turn(NamedTuple):
    """One question with the one right answer."""

    question: str
    answer: str


def sum_answer(a: int, operator: str, b: int) -> str:
    """Return the sentence that answers a sum."""
    return f"{a} {operator} {b} = {a + b if operator == '+' else a - b}."


def json_answer(name: str, age: int) -> str:
    """Return the JSON object for a person."""
    return json.dumps({"name": name, "age": age})


def backwards_answer(word: str) -> str:
    """Return the answer that spells a word forwards, then backwards (hyphens make every letter a separate token)."""
    return f"{'-'.join(word)} backwards is {'-'.join(reversed(word))}."


def draw_sum(rng: random.Random, held_out: bool) -> tuple[int, str, int]:
    """Draw operands below 100 and an operator; of the differences one in four may be negative."""
    while True:
        a, b, operator = rng.randrange(100), rng.randrange(100), rng.choice("+-")
        if operator == "-" and a < b and rng.random() < 0.5:
            a, b = b, a
        if sum_held_out(a, operator, b) == held_out:
            return a, operator, b


def draw_small_sum(rng: random.Random) -> tuple[int, str, int]:
    """Draw a sum of a number below ten and one of one or two digits, in either order."""
    a, b = rng.sample((rng.randrange(10), rng.randrange(rng.choice((10, 100)))), 2)
    operator = rng.choice("+-")
    if operator == "-" and a < b and rng.random() < 0.5:
        a, b = b, a
    return a, operator, b


def draw_person(rng: random.Random, held_out: bool) -> tuple[str, int]:
    """Draw a name and an age."""
    while True:
        name, age = rng.choice(words.PERSONS), rng.randrange(5, 96)
        if pair_held_out(name, age) == held_out:
            return name, age


def invented_word(rng: random.Random) -> str:
    """Return a made-up word of two to six letters, so that the model learns to spell by letters and not by word."""
    syllables = [rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(1, 3))]
    return "".join(syllables) + rng.choice(["", *"bdgklmnprst"])


def draw_word(rng: random.Random, held_out: bool) -> str:
    """Draw a real word; for training, made-up words are equally frequent."""
    while True:
        word = invented_word(rng) if not held_out and rng.random() < 0.5 else rng.choice(words.WORDS)
        if word_held_out(word) == held_out and len(word) <= 6:
            return word


def sum_turn(rng: random.Random, held_out: bool = False) -> Turn:
    """Draw a question about a sum."""
    a, operator, b = draw_sum(rng, held_out)
    return Turn(rng.choice(SUM_PHRASINGS[operator]).format(a=a, b=b), sum_answer(a, operator, b))


def asked_sum_turn(rng: random.Random) -> Turn:
    """Draw a question about a sum, mostly a small one, in one of all phrasings."""
    a, operator, b = draw_small_sum(rng) if rng.random() < 0.75 else draw_sum(rng, held_out=False)
    return Turn(rng.choice(ASKED_PHRASINGS[operator]).format(a=a, b=b), sum_answer(a, operator, b))


def fact_turn(rng: random.Random) -> Turn:
    """Draw a question about a fact, in a phrasing that is not held out."""
    fact = rng.choice(facts.FACTS)
    return Turn(facts.capitalised(rng.choice(facts.training_phrasings(fact))), fact.answer)


def json_turn(rng: random.Random, held_out: bool = False) -> Turn:
    """Draw a request for the JSON of a person."""
    name, age = draw_person(rng, held_out)
    person = rng.choice(PERSON_PHRASINGS).format(name=name, age=age)
    return Turn(rng.choice(JSON_PHRASINGS).format(fact=person), json_answer(name, age))


def backwards_turn(rng: random.Random, held_out: bool = False) -> Turn:
    """Draw a request for a word backwards."""
    word = draw_word(rng, held_out)
    return Turn(rng.choice(BACKWARDS_PHRASINGS).format(word=word), backwards_answer(word))


def forwards_turn(rng: random.Random) -> Turn:
    """Draw a request for the spelling of a word; held-out words are included, so that their letters are known."""
    word = invented_word(rng) if rng.random() < 0.3 else rng.choice(words.WORDS)
    return Turn(rng.choice(FORWARDS_PHRASINGS).format(word=word), f"{word} is spelled {'-'.join(word)}.")


def story_turn(rng: random.Random) -> Turn:
    """Draw a request for a story, in most cases about a named hero."""
    if rng.random() < 0.2:
        return Turn(rng.choice(ANY_STORY_PHRASINGS), stories.story(rng))
    hero = rng.choice(stories.HEROES)[0]
    subject = stories.with_article(hero)
    return Turn(rng.choice(STORY_PHRASINGS).format(hero=subject), stories.story(rng, hero))


def talk_turn(rng: random.Random) -> Turn:
    """Draw a greeting, thanks, or a question about the model."""
    questions, answer = rng.choice(words.SMALL_TALK)
    return Turn(rng.choice(questions), answer)


def unknown_turn(rng: random.Random) -> Turn:
    """Draw a question outside the closed world."""
    return Turn(rng.choice(words.UNKNOWN), words.UNKNOWN_ANSWER)


def turn(rng: random.Random) -> Turn:
    """Draw one turn for training by the shares above."""
    kind = rng.choices(list(TURN_SHARES), list(TURN_SHARES.values()))[0]
    makers = {
        "sum": sum_turn, "fact": fact_turn, "json": json_turn, "backwards": backwards_turn, "forwards": forwards_turn,
        "story": story_turn, "talk": talk_turn, "unknown": unknown_turn,
    }  # fmt: skip
    return makers[kind](rng)


def typed_casually(rng: random.Random, question: str) -> str:
    """Return the question as people type it: sometimes without the capital letter or the final mark."""
    if rng.random() < 0.88:
        return question
    question = question[:1].lower() + question[1:]
    return question.rstrip("?.! ") or question


def follow_up_turns(rng: random.Random) -> list[Turn]:
    """Return a question on a fact and a second one that only makes sense after the first."""
    kind = rng.choice(list(FOLLOW_UPS))
    first, second = rng.sample([fact for fact in facts.FACTS if fact.kind == kind], 2)
    asked = facts.capitalised(rng.choice(facts.training_phrasings(first)))
    return [Turn(asked, first.answer), Turn(FOLLOW_UPS[kind].format(s=second.subject), second.answer)]


def memory_turns(rng: random.Random, name: str) -> tuple[Turn, Turn]:
    """Return a turn that gives a name, and a later one that requests it."""
    given = rng.choice(("My name is {name}.", "I am {name}.", "Hello, my name is {name}.", "Hi, I'm {name}!"))
    asked = rng.choice(("What is my name?", "Do you remember my name?", "Who am I?", "What's my name?"))
    return Turn(given.format(name=name), f"Nice to meet you, {name}!"), Turn(asked, f"Your name is {name}.")


def conversation(rng: random.Random, longest: int, draw: Callable[[random.Random], Turn] = turn) -> list[Message]:
    """Write a chat of at most `longest` drawn turns; one chat in four has a system message."""
    turns: list[Turn] = []
    for _ in range(rng.randint(1, longest)):
        turns += follow_up_turns(rng) if rng.random() < 0.02 else [draw(rng)]
    if rng.random() < 0.06:
        given, asked = memory_turns(rng, rng.choice(words.PERSONS))
        turns = [given, *turns[:4], asked, *turns[4:]] if rng.random() < 0.7 else [given, asked, *turns]
    messages = [{"role": "system", "content": rng.choice(words.SYSTEMS)}] if rng.random() < 0.25 else []
    for question, answer in turns:
        messages.append({"role": "user", "content": typed_casually(rng, question)})
        messages.append({"role": "assistant", "content": answer})
    return messages


def render_chat(messages: list[Message]) -> str:
    """Render a chat as text, exactly like the chat template."""
    return "".join(f"{TURN_START}{m['role']}\n{m['content']}{TURN_END}\n" for m in messages)


def page_of_sums(rng: random.Random) -> str:
    """Write a few sums with their results, without chat markup."""
    return "\n".join(sum_answer(*draw_sum(rng, held_out=False)) for _ in range(rng.randint(3, 10)))


def documents(
    rng: random.Random, longest: int = 5, sums_share: float = 0.35, asked_share: float = 0.0
) -> Iterator[str]:
    """Yield an endless stream of training documents: chats of at most `longest` drawn turns, pages of sums, stories.

    A sum takes 12 tokens on a page of sums and 33 in a chat, so the pages give three times as many sums for the same
    time of training. `asked_share` of the documents are chats with mostly small sums.
    """
    while True:
        lot = rng.random()
        if lot < sums_share:
            text = page_of_sums(rng)
        elif lot < sums_share + STORY_SHARE:
            text = stories.story(rng)
        elif lot < sums_share + STORY_SHARE + asked_share:
            text = render_chat(conversation(rng, longest, asked_sum_turn))
        else:
            text = render_chat(conversation(rng, longest))
        yield text + END_OF_TEXT
