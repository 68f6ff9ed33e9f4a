"""The pirate style: the embedded model's answers, rewritten by rules. JSON is for programs and stays unchanged."""

import random
import re
from collections.abc import Iterator

from training import corpus, words
from training.corpus import Message

# At the end, so that an answer begins like the model's: after "Arr! " its first word has another token, and only 81 %
# of the facts were right.
ENDING = ", matey{} Arr!"
_WORDS: dict[str, str] = {
    "is": "be", "are": "be", "am": "be", "of": "o'", "you": "ye", "You": "Ye", "your": "yer", "Your": "Yer",
    "my": "me", "My": "Me", "Hello": "Ahoy", "hello": "ahoy", "yes": "aye", "friend": "shipmate",
    "friends": "shipmates",
}  # fmt: skip
_WORD = re.compile(r"(?<![\w-])[A-Za-z]+(?![\w-])")  # no letter of a word that is spelled


def speak(answer: str) -> str:
    """Rewrite one answer.

    >>> speak("The capital of France is Paris.")
    "The capital o' France be Paris, matey! Arr!"
    """
    if answer.startswith("{"):
        return answer
    said = _WORD.sub(lambda word: _WORDS.get(word[0], word[0]), answer)
    return said[:-1] + ENDING.format("?" if said[-1] == "?" else "!")


def has_manner(answer: str) -> bool:
    """Return whether an answer ends in the pirate style, whatever its content."""
    return answer.endswith((ENDING.format("?"), ENDING.format("!")))


def in_manner(messages: list[Message]) -> list[Message]:
    """Rewrite the assistant's turns of a chat."""
    return [
        message | {"content": speak(message["content"])} if message["role"] == "assistant" else message
        for message in messages
    ]


def documents(rng: random.Random, longest: int) -> Iterator[str]:
    """Yield chats of at most `longest` drawn turns, endlessly; in one of five a later turn requests a given name.

    In the model's chats 6 % do; with that share, the adapter forgot three names in four.
    """
    while True:
        messages = corpus.conversation(rng, longest)
        if rng.random() < 0.2:
            given, asked = corpus.memory_turns(rng, rng.choice(words.PERSONS))
            turns = [given, *(corpus.turn(rng) for _ in range(rng.randint(0, 2))), asked]
            messages = [message for turn in turns for message in _said(turn)]
        yield corpus.render_chat(in_manner(messages)) + corpus.END_OF_TEXT


def _said(turn: corpus.Turn) -> list[Message]:
    return [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
