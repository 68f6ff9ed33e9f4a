"""How a pirate says it: the embedded model's answers, rewritten by rules. JSON is for programs and stays."""

import random
import re
from collections.abc import Iterator

from training import corpus, words
from training.corpus import Message

# At the end, so that an answer begins as the model learnt it: behind "Arr! " its first word is another token, and 81 %
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
    """Tell whether an answer ends as a pirate's, whatever else it says."""
    return answer.endswith((ENDING.format("?"), ENDING.format("!")))


def in_manner(messages: list[Message]) -> list[Message]:
    """Rewrite the assistant's turns of a chat."""
    return [
        message | {"content": speak(message["content"])} if message["role"] == "assistant" else message
        for message in messages
    ]


def documents(rng: random.Random, longest: int) -> Iterator[str]:
    """Yield chats of at most `longest` drawn turns without end; one in five gives a name and asks for it later.

    Of the model's own chats 6 % do, with which the adapter forgot three names in four.
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
