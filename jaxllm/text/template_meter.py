"""What a chat template may still take: processor time, characters and elements made, the weight of what it compares.

Knows values and no template; the sandbox (template_sandbox.py) says when to count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence, Set
from typing import Any

from jinja2.utils import Namespace

MAX_SECONDS = 1.0  # of the thread's processor time, so that a busy machine refuses nothing
LEAST_BUDGET = 32 << 20  # characters and elements made on the way, whatever the conversation's size …
BUDGET_PER_CHARACTER = 64  # … and for each of its characters: a template may copy a text several times
MAX_WEIGHT = 1 << 17  # of what is compared, hashed, sorted or written out as JSON at once: at most 0.5 s each
MAX_PAIRS = 1 << 22  # of parts that `in`, `count` and `index` compare
ELEMENT = 4  # characters that an element of a list is counted as: it has 8 bytes, and most operations take longer
NESTED = (list, tuple, dict, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))
_WEIGHED_CHARACTERS = 256  # of a text, to compare which takes as long as two numbers
_STEPS_PER_LOOK = 32  # at the clock, which costs 0.3 µs
_LEAVES = frozenset({int, float, bool, type(None)})


class LimitError(Exception):
    """A template takes more than it may."""


class Meter(threading.local):
    """What the template that a thread is rendering may still take."""

    steps = 0
    left = LEAST_BUDGET
    deadline = 0.0

    def begin(self, num_characters: int) -> None:
        """Start with a conversation of this size."""
        self.left = LEAST_BUDGET + BUDGET_PER_CHARACTER * num_characters
        self.deadline = time.thread_time() + MAX_SECONDS

    def step(self, count: int = 1) -> None:
        """Count a turn of a loop, a call, or what takes as long as so many."""
        self.steps += count
        if self.steps >= _STEPS_PER_LOOK:
            self.look()

    def look(self) -> None:
        """Look at the clock."""
        self.steps = 0
        if time.thread_time() > self.deadline:
            raise LimitError(f"it takes more than {MAX_SECONDS:g} s")

    def take(self, amount: int) -> None:
        """Count characters or elements."""
        self.left -= amount
        if self.left < 0:
            raise LimitError("it writes too much")

    def take_parts(self, value: Any, indent: int = 0, margin: int = 0) -> None:
        """Count a value as long as its text is; each of its parts stands on a line of its own where there are indents.

        `margin` is that of the lines around it.
        """
        if isinstance(value, str):
            self.take(len(value))
        elif isinstance(value, NESTED) or type(value) is Namespace:
            value, inner = _parts_of(value), margin + indent
            self.step(1 + len(value) // 8)
            self.take(1 + len(value) * (ELEMENT + inner))
            for item in value:
                if type(item) not in _LEAVES:
                    self.take_parts(item, indent, inner)

    def weigh(self, value: Any, most: int = MAX_WEIGHT) -> int:
        """Return how many parts a value has, as a tree whatever is shared, with long texts as several.

        Raises `LimitError` where it is more than `most`.
        """
        if not isinstance(value, (str, *NESTED)):
            return 1
        weight, rest = 1, [value]
        while rest and weight <= most:
            part = rest.pop()
            if isinstance(part, str):
                weight += len(part) // _WEIGHED_CHARACTERS
            elif isinstance(part, NESTED) or type(part) is Namespace:
                weight += len(parts := _parts_of(part))
                if weight <= most:
                    rest += [each for each in parts if type(each) not in _LEAVES]
        if weight > most:
            raise LimitError("it compares or orders too much")
        self.step(1 + weight // 2)
        return weight

    def check_pairs(self, value: Any, items: Any) -> None:
        """Weigh a value that is to be compared with each of some items."""
        pairs = self.weigh(value) * len(items)
        if pairs > MAX_PAIRS:
            raise LimitError("it compares or orders too much")
        self.step(1 + pairs // 16)

    def check_comparison(self, left: Any, right: Any) -> None:
        """Weigh what is to be compared: both have as many parts, or it ends where they differ."""
        if isinstance(left, NESTED) and isinstance(right, NESTED):
            self.weigh(min(left, right, key=len))
            if isinstance(left, Set) or isinstance(right, Set):  # their parts are hashed, whatever the other has
                self.weigh(left)
                self.weigh(right)
        elif isinstance(left, str):
            self.step(1 + len(left) // 4096)


def _parts_of(value: Any) -> Sequence[Any]:
    """List what is in a value of `NESTED`, or in a namespace."""
    if type(value) is Namespace:
        value = object.__getattribute__(value, "_Namespace__attrs")
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, list | tuple) else list(value)
