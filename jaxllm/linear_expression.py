"""Match Python's regular expressions of adapters or model folders in linear time.

`re` backtracks, in exponential time for e.g. `(a+)+b`; this follows all alternatives at once (Thompson's algorithm).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

_parser: Any = vars(re)["_parser"]  # not in type stubs
_compiler: Any = vars(re)["_compiler"]

MOST_CHARS = 4096
MOST_PARTS = 4096  # with counted repetitions expanded
_FLAT = frozenset(("LITERAL", "NOT_LITERAL", "IN", "ANY"))
_BEGINNINGS = frozenset(("AT_BEGINNING", "AT_BEGINNING_STRING"))
_REFUSED = {
    "ASSERT": "a lookbehind",
    "ASSERT_NOT": "a negative lookbehind",
    "GROUPREF": "a backreference",
    "GROUPREF_EXISTS": "a conditional group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive quantifier",
}
_FLAGS = re.IGNORECASE | re.ASCII | re.DOTALL | re.VERBOSE | re.UNICODE


class StepBudget:
    """A work budget for several expressions, in visited states."""

    def __init__(self, most: int = 2_000_000) -> None:
        self.left = most

    def spend(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise ValueError("it takes too long")


class _Place(NamedTuple):
    """The context of an assertion in a text."""

    is_first: bool
    is_last: bool
    is_before_last_newline: bool
    is_boundary: bool
    ahead: tuple[bool, ...] = ()  # results of the automaton's lookaheads


class _State(NamedTuple):
    """An automaton state; at most one of the first four fields is set."""

    matches: Callable[[str], Any] | None = None  # tests the character that it consumes
    assertion: str = ""
    ahead: int | None = None  # of a lookahead
    is_end: bool = False
    follows: tuple[int, ...] = ()


class Expression:
    """A compiled expression; raises `ValueError` if refused or out of budget."""

    def __init__(self, pattern: str, work: StepBudget | None = None) -> None:
        if len(pattern) > MOST_CHARS:
            raise ValueError(f"it is longer than {MOST_CHARS} characters")
        self._work = StepBudget() if work is None else work
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                parsed = _parser.parse(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(str(error)) from None
        self._re = re.compile(pattern) if all(str(op) in _FLAT for op, _ in parsed) else None
        self._automaton = (
            None if self._re is not None else _Automaton(list(parsed), parsed.state.flags, self._work, begins=True)
        )

    def fullmatch(self, text: str) -> bool:
        return self._re.fullmatch(text) is not None if self._re is not None else self._follow(text, is_whole=True)

    def match(self, text: str) -> bool:
        return self._re.match(text) is not None if self._re is not None else self._follow(text, is_whole=False)

    def _follow(self, text: str, is_whole: bool) -> bool:
        assert self._automaton is not None
        return self._automaton.matches(text, is_whole)


class _Automaton:
    def __init__(self, items: list[Any], flags: int, work: StepBudget, begins: bool = False) -> None:
        """`begins`: matched at text starts only, where `^` always holds."""
        if flags & ~_FLAGS:
            raise ValueError("it has flags other than a, i, s, u and x")
        self._work = work
        self._states = [_State(is_end=True)]
        self._num_parts = 0
        self._ahead: list[tuple[_Automaton, bool]] = []  # initial lookaheads, wanted results
        self._later: dict[int, tuple[int, _Automaton, bool]] = {}  # other lookaheads: index, automaton, result by part
        self._kept: list[Any] = []  # so that parts' ids stay unique
        self._leaves: dict[tuple[str, str, int], Callable[[str], Any]] = {}
        self._closures: dict[tuple[frozenset[int], _Place], frozenset[int]] = {}
        self._steps: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        while begins and items and (str(items[0][0]), str(items[0][1])) in {("AT", each) for each in _BEGINNINGS}:
            items = items[1:]
        while items and str(items[0][0]) in ("ASSERT", "ASSERT_NOT") and items[0][1][0] == 1:
            op, (_, inner) = items[0]
            self._ahead.append((_Automaton(list(inner), flags, work), str(op) == "ASSERT"))
            items = items[1:]
        try:
            self._start = frozenset((self._sequence(items, 0, flags),))
        except RecursionError:
            raise ValueError("it is nested too deeply") from None

    # States are created from end to start, successors first.

    def _add(self, state: _State) -> int:
        self._states.append(state)
        return len(self._states) - 1

    def _sequence(self, items: Iterable[Any], follows: int, flags: int) -> int:
        for op, value in reversed(list(items)):
            follows = self._part(str(op), op, value, follows, flags)
        return follows

    def _part(self, op: str, code: Any, value: Any, follows: int, flags: int) -> int:
        self._num_parts += 1
        if self._num_parts > MOST_PARTS:
            raise ValueError(f"it has more than {MOST_PARTS} parts")
        if op in _FLAT:
            return self._add(_State(matches=self._leaf(code, value, flags), follows=(follows,)))
        if op == "AT":
            return self._add(_State(assertion=str(value), follows=(follows,)))
        if op == "BRANCH":
            return self._add(_State(follows=tuple(self._sequence(each, follows, flags) for each in value[1])))
        if op == "SUBPATTERN":
            _, added, removed, inner = value
            return self._sequence(inner, follows, (flags | added) & ~removed)
        if op in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, inner = value
            return self._repeat(least, most, inner, follows, flags)
        if op in ("ASSERT", "ASSERT_NOT") and value[0] == 1:
            return self._add(_State(ahead=self._lookahead(op == "ASSERT", value[1], flags), follows=(follows,)))
        raise ValueError(f"it has {_REFUSED.get(op, op)}, which cannot be followed")

    def _lookahead(self, wanted: bool, inner: Any, flags: int) -> int:
        if id(inner) not in self._later:
            self._kept.append(inner)
            self._later[id(inner)] = len(self._later), _Automaton(list(inner), flags, self._work), wanted
        return self._later[id(inner)][0]

    def _repeat(self, least: int, most: Any, inner: Any, follows: int, flags: int) -> int:
        if most is _parser.MAXREPEAT:
            again = self._add(_State())
            body = self._counted(inner, again, flags)
            self._states[again] = _State(follows=(body, follows))
            start = again
        else:
            start = follows
            for _ in range(most - least):
                start = self._add(_State(follows=(self._counted(inner, start, flags), follows)))
        for _ in range(least):
            start = self._counted(inner, start, flags)
        return start

    def _counted(self, inner: Any, follows: int, flags: int) -> int:
        self._num_parts += 1
        if self._num_parts > MOST_PARTS:
            raise ValueError(f"it has more than {MOST_PARTS} parts")
        return self._sequence(inner, follows, flags)

    def _leaf(self, code: Any, value: Any, flags: int) -> Callable[[str], Any]:
        key = str(code), str(value), flags
        if key not in self._leaves:
            state = _parser.State()
            state.flags = flags
            self._leaves[key] = _compiler.compile(_parser.SubPattern(state, [(code, value)])).fullmatch
        return self._leaves[key]

    def matches(self, text: str, is_whole: bool, start: int = 0) -> bool:
        if any(ahead.matches(text, False, start) != wanted for ahead, wanted in self._ahead):
            return False
        current = self._start
        for place in range(start, len(text)):
            closed = self._closed(current, self._place(text, place))
            if 0 in closed and not is_whole:
                return True
            current = self._step(closed, text[place])
            if not current:
                return False
        return 0 in self._closed(current, self._place(text, len(text)))

    def _place(self, text: str, place: int) -> _Place:
        found = _place(text, place)
        if not self._later:
            return found
        self._work.spend(len(self._later) * (16 + len(text) - place))
        ahead = (one.matches(text, False, place) == wanted for _, one, wanted in self._later.values())
        return found._replace(ahead=tuple(ahead))

    def _closed(self, states: frozenset[int], place: _Place) -> frozenset[int]:
        key = states, place
        if key not in self._closures:
            found, left = set(states), list(states)
            while left:
                state = self._states[left.pop()]
                if state.matches is None and _holds(state, place):
                    new = [each for each in state.follows if each not in found]
                    found.update(new)
                    left += new
            self._work.spend(len(found) + 16)
            self._closures[key] = frozenset(found)
        return self._closures[key]

    def _step(self, states: frozenset[int], character: str) -> frozenset[int]:
        key = states, character
        if key not in self._steps:
            reading = [self._states[each] for each in states]
            self._work.spend(len(states) + 16)
            self._steps[key] = frozenset(
                each.follows[0] for each in reading if each.matches is not None and each.matches(character)
            )
        return self._steps[key]


def _place(text: str, place: int) -> _Place:
    before, after = text[place - 1 : place] if place else "", text[place : place + 1]
    is_boundary = _is_word(before) != _is_word(after)
    return _Place(place == 0, place == len(text), after == "\n" and place == len(text) - 1, is_boundary)


def _is_word(character: str) -> bool:
    return character == "_" or character.isalnum()


def _holds(state: _State, place: _Place) -> bool:
    if state.ahead is not None:
        return place.ahead[state.ahead]
    assertion = state.assertion
    if assertion in _BEGINNINGS:
        return place.is_first
    if assertion == "AT_END":
        return place.is_last or place.is_before_last_newline
    if assertion == "AT_END_STRING":
        return place.is_last
    if assertion in ("AT_BOUNDARY", "AT_NON_BOUNDARY"):
        return place.is_boundary == (assertion == "AT_BOUNDARY")
    return True
