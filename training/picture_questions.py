"""Questions about a picture of shapes and their only right answers, in turns of a chat.

A question about the only shape of a name, in a picture with several or without any, gets their number as its answer:
"There are 2 circles."
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from PIL.Image import Image

from training import facts
from training.scenes import COLOURS, KINDS, PLACES, Item, held_out_picture

Items = tuple[Item, ...]

SIDES: dict[str, tuple[str, int]] = {  # the coordinate, and the sign of the order along it
    "on the left": ("x", 1), "on the right": ("x", -1), "at the top": ("y", 1), "at the bottom": ("y", -1),
}  # fmt: skip
RELATIONS: dict[str, tuple[str, int]] = {
    "left of": ("x", 1), "to the left of": ("x", 1), "right of": ("x", -1), "to the right of": ("x", -1),
    "above": ("y", 1), "below": ("y", -1),
}  # fmt: skip
CLEAR = 0.12  # least difference of coordinates in a question
MIDDLE = 0.08  # a shape nearer to the middle is on no side
NO_PICTURE = "I see no picture. Attach one of coloured shapes."
OTHER = "I can only answer questions about pictures of coloured shapes."
GREETING = "Hello! Ask me about the shapes in a picture."
GREETINGS: tuple[str, ...] = ("Hello!", "Hi!", "Hello, who are you?", "Who are you?", "What can you do?", "Help")
PHRASINGS: dict[str, tuple[str, ...]] = {
    "counts": (
        "How many {s} are there?", "How many {s} do you see?", "How many {s} are in the picture?", "Count the {s}.",
        "How many {s} can you see in this picture?", "What is the number of {s}?",
    ),
    "colours": (
        "What colour is the {s}?", "Which colour is the {s}?", "What is the colour of the {s}?",
        "What colour does the {s} have?",
    ),
    "kinds": (
        "What is {s}?", "What shape is {s}?", "Which shape is {s}?", "What do you see {s}?", "What can you see {s}?",
    ),
    "the one of a colour": ("What shape is the {s} one?", "What is the {s} shape?", "Which shape is {s}?"),
    "presence": (
        "Is there {a} {s}?", "Is there {a} {s} in the picture?", "Do you see {a} {s}?", "Can you see {a} {s}?",
        "Are there any {p}?", "Does the picture have {a} {s}?",
    ),
    "places": ("Where is the {s}?", "Where do you see the {s}?", "Where in the picture is the {s}?"),
    "relations": ("Is the {s} {r} the {t}?",),
    "descriptions": (
        "Describe the picture.", "Describe this image.", "What is in the picture?", "What do you see?",
        "What is this?", "Which shapes are there?", "What shapes are in the picture?", "What is in this image?",
    ),
}  # fmt: skip


class Turn(NamedTuple):
    """A question, its answer, and its kind."""

    kind: str
    question: str
    answer: str


def with_article(words: str) -> str:
    """Return the words after "a" or "an"."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def noun(colour: str | None, kind: str | None, count: int = 1) -> str:
    """Return a name of shapes; None means any colour or kind."""
    return (f"{colour} " if colour else "") + (kind or "shape") + ("" if count == 1 else "s")


def amount(colour: str | None, kind: str | None, count: int) -> str:
    """Return the sentence with a number of shapes."""
    if count == 0:
        return f"There are no {noun(colour, kind, 2)}."
    return f"There {'is' if count == 1 else 'are'} {count} {noun(colour, kind, count)}."


def chosen(items: Items, colour: str | None, kind: str | None) -> Items:
    """Return the shapes of a colour and a kind; None means any."""
    return tuple(item for item in items if colour in (None, item.colour) and kind in (None, item.kind))


def ask(rng: random.Random, kind: str, items: Items) -> Turn | None:
    """Return a question of a kind about shapes; None if these allow none."""
    found = TRAINED[kind](rng, items)
    return None if found is None else Turn(kind, *found)


def _phrase(rng: random.Random, kind: str, **words: str) -> str:
    return rng.choice(PHRASINGS[kind]).format(**words)


def _attributes(rng: random.Random, items: Items) -> tuple[str | None, str | None]:
    """Draw a colour and a kind; None means any. Half of the draws are attributes of one shape."""
    if rng.random() < 0.5:
        item = rng.choice(items)
        colour, kind = item.colour, item.kind
    else:
        colour, kind = rng.choice(tuple(COLOURS)), rng.choice(KINDS)
    named = rng.random()
    return (None if named < 0.3 else colour), (None if 0.3 <= named < 0.55 else kind)


def _counts(rng: random.Random, items: Items) -> tuple[str, str]:
    colour, kind = (None, None) if rng.random() < 0.15 else _attributes(rng, items)
    return _phrase(rng, "counts", s=noun(colour, kind, 2)), amount(colour, kind, len(chosen(items, colour, kind)))


def _where(rng: random.Random, item: Item, among: Items) -> str | None:
    """Return words that single out a shape among others, if possible."""
    found = [] if PLACES[item.place] in SIDES else [PLACES[item.place]]
    for words, (axis, sign) in SIDES.items():
        own = getattr(item, axis)
        others = [getattr(other, axis) for other in among if other is not item]
        if sign * (own - 0.5) < -MIDDLE and all(sign * (other - own) >= CLEAR for other in others):
            found.append(words)
    return rng.choice(found) if found else None


def _colours(rng: random.Random, items: Items) -> tuple[str, str] | None:
    if rng.random() < 0.15:
        kind = rng.choice(KINDS)
        among = chosen(items, None, kind)
    else:
        item = rng.choice(items)
        kind = rng.choice((None, item.kind, item.kind))
        among = chosen(items, None, kind)
        where = _where(rng, item, among) if len(among) > 1 or rng.random() < 0.4 else None
        if where is not None:
            return _phrase(rng, "colours", s=f"{noun(None, kind)} {where}"), f"It is {item.colour}."
    answer = f"It is {among[0].colour}." if len(among) == 1 else amount(None, kind, len(among))
    return _phrase(rng, "colours", s=noun(None, kind)), answer


def _kinds(rng: random.Random, items: Items) -> tuple[str, str] | None:
    if rng.random() < 0.4:
        colour = rng.choice((rng.choice(items).colour, rng.choice(tuple(COLOURS))))
        among = chosen(items, colour, None)
        answer = f"It is {with_article(among[0].kind)}." if len(among) == 1 else amount(colour, None, len(among))
        return _phrase(rng, "the one of a colour", s=colour), answer
    if rng.random() < 0.2:
        place = rng.choice([number for number, words in enumerate(PLACES) if words not in SIDES])
        if all(item.place != place for item in items):
            return _phrase(rng, "kinds", s=PLACES[place]), "Nothing is there."
    item = rng.choice(items)
    where = _where(rng, item, items)
    if where is None:
        return None
    return _phrase(rng, "kinds", s=where), f"It is {with_article(noun(item.colour, item.kind))}."


def _presence(rng: random.Random, items: Items) -> tuple[str, str]:
    """Ask for a shape of the picture, or for a missing one, which may share a colour or a kind with the others."""
    is_there = rng.random() < 0.5
    while True:
        item, other = rng.choice(items), rng.choice(items)
        named = rng.random()
        colour = None if named < 0.2 else item.colour if is_there or rng.random() < 0.5 else rng.choice(tuple(COLOURS))
        kind = None if 0.2 <= named < 0.4 else item.kind if is_there else rng.choice((other.kind, rng.choice(KINDS)))
        if bool(chosen(items, colour, kind)) == is_there:
            break
    words = noun(colour, kind)
    question = _phrase(rng, "presence", s=words, p=noun(colour, kind, 2), a=with_article(words).split()[0])
    return question, "Yes." if is_there else "No."


def _places(rng: random.Random, items: Items) -> tuple[str, str]:
    item = rng.choice(items)
    colour, kind = item.colour, item.kind
    if rng.random() < 0.1:
        colour, kind = rng.choice(tuple(COLOURS)), rng.choice(KINDS)
    named = rng.random()
    colour, kind = (None if named < 0.3 else colour), (None if 0.3 <= named < 0.5 else kind)
    among = chosen(items, colour, kind)
    answer = f"It is {PLACES[among[0].place]}." if len(among) == 1 else amount(colour, kind, len(among))
    return _phrase(rng, "places", s=noun(colour, kind)), answer


def _related(rng: random.Random, items: Items) -> tuple[str, Item, Item, bool, bool] | None:
    """Return a question about two shapes, these, whether it is true, and whether their places show that."""
    names = [(item.colour, item.kind) for item in items]
    unique = [item for item in items if names.count((item.colour, item.kind)) == 1]
    words, (axis, sign) = rng.choice(tuple(RELATIONS.items()))
    if len(unique) < 2:
        return None
    one, other = rng.sample(unique, 2)
    difference = sign * (getattr(other, axis) - getattr(one, axis))
    if abs(difference) < CLEAR:
        return None
    first, second = (noun(item.colour, item.kind) for item in (one, other))
    question = _phrase(rng, "relations", s=first, r=words, t=second)
    return question, one, other, difference > 0, int(getattr(one, axis) * 3) != int(getattr(other, axis) * 3)


def _yes_or_no(rng: random.Random, items: Items) -> tuple[str, str] | None:
    """Ask for a relation, for a bare answer."""
    found = _related(rng, items)
    return None if found is None else (found[0], "Yes." if found[3] else "No.")


def _relations(rng: random.Random, items: Items) -> tuple[str, str] | None:
    """Ask for a relation of shapes in different rows or columns, from whose places the answer follows."""
    found = _related(rng, items)
    if found is None or not found[4]:
        return None
    question, one, other, is_true, _ = found
    first, second = (noun(item.colour, item.kind) for item in (one, other))
    places = f"The {first} is {PLACES[one.place]}, the {second} {PLACES[other.place]}"
    return question, f"{places}, so {'yes' if is_true else 'no'}."


def _descriptions(rng: random.Random, items: Items) -> tuple[str, str]:
    parts = [f"{with_article(noun(item.colour, item.kind))} {PLACES[item.place]}" for item in items]
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return _phrase(rng, "descriptions"), f"There is {listed}."


ASKED: dict[str, Callable[[random.Random, Items], tuple[str, str] | None]] = {
    "counts": _counts, "colours": _colours, "kinds": _kinds, "presence": _presence, "places": _places,
    "relations": _relations, "descriptions": _descriptions,
}  # fmt: skip
TRAINED = ASKED | {"yes or no": _yes_or_no}
# Shares of the training: a description has most tokens. Bare answers about relations are asked first: they are short,
# and need both shapes.
FIRST_SHARES: dict[str, float] = {
    "counts": 0.18, "colours": 0.16, "kinds": 0.13, "presence": 0.09, "places": 0.16, "yes or no": 0.2,
    "descriptions": 0.08,
}  # fmt: skip
COMPARING_SHARES: dict[str, float] = {
    "counts": 0.12, "colours": 0.08, "kinds": 0.1, "presence": 0.05, "places": 0.15, "relations": 0.45,
    "descriptions": 0.05,
}  # fmt: skip
SHARES: dict[str, float] = {
    "counts": 0.22, "colours": 0.13, "kinds": 0.13, "presence": 0.09, "places": 0.2, "relations": 0.15,
    "descriptions": 0.08,
}  # fmt: skip


class Question(NamedTuple):
    """A chat about a picture, or without one: the earlier turns, and the turn to be answered."""

    kind: str
    image: Image | None
    before: tuple[Turn, ...]
    turn: Turn

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages of the chat, without the answer."""
        messages: list[dict[str, Any]] = []
        for turn in self.before:
            messages += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
        messages.append({"role": "user", "content": self.turn.question})
        if self.image is not None:
            parts = [{"type": "image", "image": self.image}, {"type": "text", "text": messages[0]["content"]}]
            messages[0]["content"] = parts
        return messages


def held_out_questions(seed: int, pictures: int) -> list[Question]:
    """Return a question of each possible kind about each of some held-out pictures.

    Further kinds are the fourth question of a chat, and a question without a picture.
    """
    asked = []
    for number in range(pictures):
        drawn, rng = held_out_picture(seed, number), random.Random(f"asked {seed} {number}")
        for kind in ASKED:
            turn = next(filter(None, (ask(rng, kind, drawn.items) for _ in range(20))), None)
            asked += [] if turn is None else [Question(kind, drawn.image, (), turn)]
        *before, last = itertools.islice(turns(rng, drawn.items), 4)
        asked.append(Question("fourth questions", drawn.image, tuple(before), last))
        asked.append(Question("without a picture", None, (), next(blind_turns(rng, drawn.items))))
    return asked


def turns(rng: random.Random, items: Items, shares: Mapping[str, float] = SHARES) -> Iterator[Turn]:
    """Yield questions about a picture as people may type them; a few are about something else."""
    while True:
        (kind,) = rng.choices(tuple(shares), tuple(shares.values()))
        turn = other_turn(rng) if rng.random() < 0.02 else ask(rng, kind, items)
        if turn is not None:
            yield turn._replace(question=as_typed(rng, turn.question))


def other_turn(rng: random.Random) -> Turn:
    """Return a greeting, or a question that no picture answers."""
    if rng.random() < 0.3:
        return Turn("others", rng.choice(GREETINGS), GREETING)
    fact = rng.choice(facts.FACTS)
    return Turn("others", facts.capitalised(rng.choice(facts.PHRASINGS[fact.kind]).format(s=fact.subject)), OTHER)


def blind_turns(rng: random.Random, items: Items) -> Iterator[Turn]:
    """Yield questions of a chat without a picture; `items` are those that they presuppose."""
    for turn in turns(rng, items, FIRST_SHARES):
        yield turn if turn.kind == "others" else Turn("others", turn.question, NO_PICTURE)


def as_typed(rng: random.Random, question: str) -> str:
    """Return a question, at times in American spelling, in lower case, or without its last mark."""
    if rng.random() < 0.4:
        question = question.replace("colour", "color")
    if rng.random() < 0.15:
        question = question[0].lower() + question[1:]
    return question.rstrip("?.") if rng.random() < 0.15 else question
