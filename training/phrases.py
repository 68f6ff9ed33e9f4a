"""The phrases that the recogniser learns to write: digits, numbers, sums, orders to a house, timers, words at random.

All words are lower-case, numbers are written as they are spoken. A phrase follows from a generator's state.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

from training.holdout import phrase_held_out

DIGITS: tuple[str, ...] = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEENS: tuple[str, ...] = (
    "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS: tuple[str, ...] = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
SCALES: tuple[str, ...] = ("hundred", "thousand", "point")
SIGNS: tuple[str, ...] = ("plus", "minus", "times")
ROOMS: tuple[str, ...] = ("kitchen", "bedroom", "bathroom", "garden", "office", "hall")
DEVICES: tuple[str, ...] = ("light", "lamp", "heating", "radio", "fan", "music")
COLOURS: tuple[str, ...] = ("red", "orange", "yellow", "green", "blue", "purple", "white")
WAYS: tuple[str, ...] = ("left", "right", "up", "down", "forward", "back")
DAYS: tuple[str, ...] = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
OTHERS: tuple[str, ...] = (
    "equals", "turn", "switch", "open", "close", "make", "set", "play", "stop", "go", "please", "yes", "no", "on",
    "off", "the", "a", "in", "next", "last", "song", "door", "window", "timer", "alarm", "for", "minutes", "seconds",
    "hours", "what", "time", "day", "is", "it", "today", "tomorrow",
)  # fmt: skip
WORDS: tuple[str, ...] = (
    *DIGITS, *TEENS, *TENS, *SCALES, *SIGNS, *ROOMS, *DEVICES, *COLOURS, *WAYS, *DAYS, *OTHERS,
)  # fmt: skip
# Homophone of "four", so it is spoken between other words only.
NOT_AT_RANDOM = ("for",)


class Phrase(NamedTuple):
    """A kind and words."""

    kind: str
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.words)


def number(value: int) -> str:
    """Return a number from 0 to 9999 in words."""
    if value < 10:
        return DIGITS[value]
    if value < 20:
        return TEENS[value - 10]
    for size, name in ((1000, " thousand"), (100, " hundred")):
        if value >= size:
            head, rest = divmod(value, size)
            return number(head) + name + (f" {number(rest)}" if rest else "")
    tens, rest = divmod(value, 10)
    return TENS[tens - 2] + (f" {number(rest)}" if rest else "")


def _digits(rng: random.Random) -> str:
    return " ".join(rng.choices(DIGITS, k=rng.randint(1, 7)))


def _number(rng: random.Random) -> str:
    if rng.random() < 0.25:
        return f"{number(rng.randrange(100))} point {' '.join(rng.choices(DIGITS, k=rng.randint(1, 3)))}"
    return number(rng.randrange(10 ** rng.randint(1, 4)))


def _sum(rng: random.Random) -> str:
    a, b = (rng.randrange(rng.choice((10, 100))) for _ in range(2))
    asked = f"{number(a)} {rng.choice(SIGNS)} {number(b)}"
    return f"what is {asked}" if rng.random() < 0.4 else f"{asked} equals {number(rng.randrange(100))}"


def _order(rng: random.Random) -> str:
    room, device, other = rng.choice(ROOMS), rng.choice(DEVICES), rng.choice(("door", "window"))
    turn, onoff = rng.choice(("turn", "switch")), rng.choice(("on", "off"))
    made = rng.choice(
        (
            f"{turn} the {room} {device} {onoff}",
            f"{turn} {onoff} the {device} in the {room}",
            f"{turn} {onoff} the {device}",
            f"{rng.choice(('open', 'close'))} the {room} {other}",
            f"make the {room} {rng.choice(('light', 'lamp'))} {rng.choice(COLOURS)}",
            f"turn the {device} {rng.choice(('up', 'down'))}",
            f"play the {rng.choice(('next', 'last'))} song",
            f"go {rng.choice(WAYS)} {number(rng.randrange(1, 100))}",
            f"stop the {device}",
        )
    )
    ends = rng.random()
    return f"please {made}" if ends < 0.15 else f"{made} please" if ends < 0.3 else made


def _timer(rng: random.Random) -> str:
    count, unit = number(rng.randrange(2, 60)), rng.choice(("minutes", "seconds", "hours"))
    hour, minute = number(rng.randrange(1, 13)), number(rng.choice((10, 15, 20, 30, 40, 45, 50)))
    return rng.choice(
        (
            f"set a timer for {count} {unit}",
            f"set a timer for {count} {unit} please",
            f"set the alarm for {hour} {minute} {rng.choice(('today', 'tomorrow'))}",
            f"set the alarm for {hour} {minute} on {rng.choice(DAYS)}",
            f"what {rng.choice(('time', 'day'))} is it {rng.choice(('today', 'tomorrow', 'please'))}",
        )
    )


def _random_words(rng: random.Random) -> str:
    return " ".join(rng.choices([word for word in WORDS if word not in NOT_AT_RANDOM], k=rng.randint(1, 6)))


# Shares of the phrases.
KINDS: dict[str, tuple[Callable[[random.Random], str], float]] = {
    "digits": (_digits, 0.25),
    "numbers": (_number, 0.15),
    "sums": (_sum, 0.12),
    "orders": (_order, 0.2),
    "timers": (_timer, 0.1),
    "words at random": (_random_words, 0.18),
}


def draw_phrase(rng: random.Random, held_out: bool = False, kind: str | None = None) -> Phrase:
    """Return a phrase of the training or, with `held_out`, of the evaluation; the two have no text in common."""
    while True:
        own = kind or rng.choices([*KINDS], [share for _, share in KINDS.values()])[0]
        text = KINDS[own][0](rng)
        if phrase_held_out(text) == held_out:
            return Phrase(own, tuple(text.split()))


def word_errors(due: str, found: str) -> int:
    """Return the least number of words to replace, insert or delete to turn one text into the other."""
    words, errors = found.split(), list(range(len(found.split()) + 1))
    for row, word in enumerate(due.split(), 1):
        before, errors[0] = errors[0], row
        for column, own in enumerate(words, 1):
            least = min(before + (word != own), errors[column] + 1, errors[column - 1] + 1)
            before, errors[column] = errors[column], least
    return errors[-1]
