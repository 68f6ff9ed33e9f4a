"""Python's regular expressions over the names of modules, in bounded time.

Python's own matcher backtracks: a pattern of ten characters in a stranger's file could hold a server up for hours. Here
a set of positions, the bits of an integer, goes through the expression as Python's parser gives it, and each step is
counted. Texts in, verdicts out.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

_parser: Any = vars(re)["_parser"]  # that `re` is made of since Python 3.11; type stubs do not list it

_PLAIN = re.compile(r"[\w.-]+", re.ASCII)
_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda character: character.isalnum() or character == "_",
}


class Budget:
    """What the patterns of one file may cost together; a step takes one to three microseconds."""

    def __init__(self, steps: int = 1_500_000) -> None:
        self._left = steps

    def spend(self, steps: int = 1) -> None:
        """Count steps; beyond the budget this is a ValueError."""
        self._left -= steps
        if self._left < 0:
            raise ValueError("takes too long to match")


@dataclass(frozen=True)
class _Text:
    length: int
    places: dict[str, int]  # of each character that is in it, as bits

    @property
    def ends(self) -> int:
        """Every position, that behind the last character included, as bits."""
        return (2 << self.length) - 1

    def where(self, holds: Callable[[str], bool]) -> int:
        """Give the places of the characters for which something holds."""
        return reduce(or_, (places for character, places in self.places.items() if holds(character)), 0)


class Pattern:
    """One expression; what cannot be followed is a ValueError that says why."""

    def __init__(self, pattern: str, budget: Budget) -> None:
        budget.spend(len(pattern))
        self._budget = budget
        self._plain = pattern if _PLAIN.fullmatch(pattern) else None  # which is many times faster
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._parsed = _parser.parse(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"is no regular expression ({error})") from None
        if self._parsed.state.flags & ~re.UNICODE:
            raise ValueError("has flags, which are not supported")
        self.matches("-")  # so that what cannot be followed is refused whatever the names are

    def matches(self, text: str) -> bool:
        """Say whether it matches the whole text, which is not empty."""
        return self._reaches_end(text, [0])

    def matches_end(self, text: str) -> bool:
        """Say whether it matches the whole text, or what stands behind one of its dots."""
        return self._reaches_end(text, [0, *(place + 1 for place, each in enumerate(text) if each == ".")])

    def _reaches_end(self, text: str, starts: list[int]) -> bool:
        self._budget.spend()
        if self._plain is not None:
            start = len(text) - len(self._plain)
            return start in starts and all(
                own in (".", each) for own, each in zip(self._plain, text[start:], strict=True)
            )
        places: dict[str, int] = {}
        for place, character in enumerate(text):
            places[character] = places.get(character, 0) | 1 << place
        try:
            ends = self._sequence(self._parsed, sum(1 << start for start in starts), _Text(len(text), places))
        except RecursionError:
            raise ValueError("is nested too deeply") from None
        return bool(ends >> len(text) & 1)

    def _sequence(self, items: Iterable[Any], positions: int, text: _Text) -> int:
        for op, value in items:
            positions = self._step(str(op), value, positions, text)
        return positions

    def _step(self, op: str, value: Any, positions: int, text: _Text) -> int:
        """Say where the text can go on behind one part of the expression, given where it can go on before it."""
        self._budget.spend()
        if op == "LITERAL":
            return (positions & text.places.get(chr(value), 0)) << 1
        if op in ("NOT_LITERAL", "ANY"):
            other = chr(value) if op == "NOT_LITERAL" else "\n"
            return (positions & ~text.places.get(other, 0) & text.ends >> 1) << 1
        if op == "IN":
            self._budget.spend(len(value))
            return (positions & text.where(lambda character: _is_in(value, character))) << 1
        if op == "BRANCH":
            return reduce(or_, [self._sequence(each, positions, text) for each in value[1]])
        if op == "SUBPATTERN" and not value[1] and not value[2]:
            return self._sequence(value[3], positions, text)
        if op in ("MAX_REPEAT", "MIN_REPEAT"):  # of a whole text, the lazy one matches the same
            least, most, inner = value
            return self._repeat(least, most, inner, positions, text)
        if op == "AT":
            return positions & _boundaries(str(value), text)
        if op in ("ASSERT", "ASSERT_NOT") and value[0] == 1:
            each = (1 << place for place in range(text.length + 1) if positions >> place & 1)
            return sum(bit for bit in each if bool(self._sequence(value[1], bit, text)) == (op == "ASSERT"))
        if op == "FAILURE":
            return 0
        raise ValueError("has a construct that is not supported: flags, a reference, a lookbehind or an atomic group")

    def _repeat(self, least: Any, most: Any, inner: Any, positions: int, text: _Text) -> int:
        longest = text.length + 1  # after as many rounds no position is new
        for _ in range(min(int(least), longest)):
            positions = self._sequence(inner, positions, text)
        reached = positions
        for _ in range(min(int(most) - int(least), longest)):
            positions = self._sequence(inner, positions, text) & ~reached
            if not positions:
                break
            reached |= positions
        return reached


def _is_in(items: Sequence[tuple[Any, Any]], character: str) -> bool:
    is_negated = str(items[0][0]) == "NEGATE"
    return any(_is_one(str(kind), value, character) for kind, value in items[is_negated:]) != is_negated


def _is_one(kind: str, value: Any, character: str) -> bool:
    if kind == "CATEGORY":
        name = str(value)
        return _CATEGORIES[name.replace("_NOT_", "_")](character) != ("_NOT_" in name)
    low, high = (value, value) if kind == "LITERAL" else value
    return low <= ord(character) <= high


def _boundaries(name: str, text: _Text) -> int:
    if name.startswith("AT_BEGINNING"):
        return 1
    if name.startswith("AT_END"):
        return 1 << text.length
    words = text.where(_CATEGORIES["CATEGORY_WORD"])
    borders = words ^ words << 1  # a word character on one side only
    return borders if name == "AT_BOUNDARY" else ~borders & text.ends
