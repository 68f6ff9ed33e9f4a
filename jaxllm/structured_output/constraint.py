"""How far one output has come in its grammar. Knows tokens by their ids; knows no request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher

from jaxllm.errors import printable
from jaxllm.structured_output.slow_masks import SLOW_SECONDS, Job, Pace

_MOST_SAID = 300  # characters of an error
_GUESS = 0.001  # seconds that the first mask of an output takes: more than usual ones, and less than slow ones


@dataclass(frozen=True)
class Way:
    """The text that may precede the constrained part of an output. Without marks, the whole output is constrained."""

    # Each mark is a text, with the matchers of the grammars after it. Before a mark any token is allowed except an end.
    marks: tuple[tuple[bytes, tuple[LLMatcher, ...]], ...] = ()
    # Texts that an unconstrained part begins with. Any other output is constrained from its first token.
    openings: tuple[bytes, ...] = ()


class Constraint:
    """Follows one output, which obeys one of several grammars; belongs to one thread at a time."""

    def __init__(
        self,
        origins: Sequence[LLMatcher],
        way: Way,
        allowed: np.ndarray,
        bytes_of: Callable[[int], bytes],
        eos_ids: Collection[int],
        pace: Pace,
    ) -> None:
        self.pace = pace
        self.job: Job | None = None  # that makes its next mask in another thread
        self.num_late = 0  # steps since its last mask without time for the next
        self._seconds = _GUESS  # that its last mask took
        self.origins = (*origins, *(each for _, found in way.marks for each in found))
        self.allowed = allowed  # the mask of all tokens that a grammar can allow: int32[W]
        self._marks = way.marks
        self.openings = way.openings  # the rests of the openings that match the output so far
        self.matchers: list[LLMatcher] = []  # of the grammars that the output matches so far
        self._is_free = bool(way.marks) and not way.openings
        if not self._is_free:
            self._begin(origins)
        self._bytes_of = bytes_of
        self._eos_ids = eos_ids
        self.expected: list[int] = []  # forced tokens that come next, whether one by one or at once
        self._end = b""  # the last bytes of the output, where a mark may have begun
        self._error: str | None = None

    def _begin(self, origins: Sequence[LLMatcher]) -> None:
        self.matchers = [each.deep_copy() for each in origins]

    @property
    def is_active(self) -> bool:
        """Whether it constrains the next token by a grammar."""
        return not self._is_free

    @property
    def error(self) -> str | None:
        """Why it cannot go on, on one line."""
        return self._error

    @property
    def turn(self) -> float:
        """Return the place of its mask in a step: quick ones go first, and those that have waited."""
        return self._seconds / (1 << self.num_late)

    def note_filled(self, seconds: float) -> None:
        """Record the seconds that its mask took."""
        self.num_late, self._seconds = 0, seconds
        if seconds > SLOW_SECONDS or self.pace.is_slow:
            self.pace.note(seconds)

    def fail(self, reason: str) -> None:
        """Let it go no further."""
        self._error = self._error or one_line(reason)

    def check(self) -> None:
        """Drop matchers that have failed, after each use: a failed one allows the end, as a complete one does."""
        failed = [] if self._error is not None else [each for each in self.matchers if each.is_error()]
        if failed:
            self.matchers = [each for each in self.matchers if each not in failed]
            if not self.matchers and not self.openings:
                self.fail(failed[0].get_error() or "The grammar cannot be followed.")

    def consume(self, token: int) -> None:
        """Take in the token that was sampled. One that does not fit is an error of the constraint; none is raised."""
        if self._error is not None:
            return
        if self._is_free:
            self._look_for_mark(token)
            return
        if self.expected and self.expected.pop(0) != token:
            self.expected = []
        if self.openings and self._opens(token):
            return
        if len(self.matchers) > 1 or self.openings:
            self.matchers = [each for each in self.matchers if each.validate_tokens([token]) == 1]
        if not self.matchers:
            if not self.openings:
                self.fail("The token fits none of the grammars.")
            return
        for matcher in self.matchers:
            try:
                matcher.consume_token(token)
            except (OverflowError, TypeError, ValueError) as error:  # an id that is none
                self.fail(str(error))
        self.check()

    def forced(self) -> list[int]:
        """Give the tokens that must come next as far as they are certain, and consume none; no end among them."""
        if self._is_free or self.openings or len(self.matchers) != 1 or self._error is not None:
            return []
        tokens = self.matchers[0].compute_ff_tokens()
        self.check()
        if self._error is not None:
            return []
        end = next((number for number, token in enumerate(tokens) if token in self._eos_ids), len(tokens))
        return tokens[:end]

    def _opens(self, token: int) -> bool:
        """Advance the openings by a token; return whether one is complete, which ends the constraint until a mark."""
        text = b"" if token in self._eos_ids else self._bytes_of(token)
        self.openings = tuple(each[len(text) :] for each in self.openings if text and each.startswith(text))
        if b"" not in self.openings:
            return False
        self.openings, self.matchers, self._is_free = (), [], True
        return True

    def _look_for_mark(self, token: int) -> None:
        """Start the grammars after the token that completes a mark; the rest of that token is not constrained."""
        text = self._end + self._bytes_of(token)
        found = [(text.index(mark), origins) for mark, origins in self._marks if mark in text]
        if found:
            self._is_free, self._end = False, b""
            self._begin(min(found, key=lambda each: each[0])[1])
        else:
            longest = max(len(mark) for mark, _ in self._marks)
            self._end = text[max(0, len(text) - longest + 1) :]


def one_line(said: str) -> str:
    """Write what llguidance says on one line: it draws the place in the source, and repeats it."""
    text = said.split("<backtrace>")[0].split("\n<state>")[0].replace("<non-verbose/>", "").replace("\n", " ")
    text = " ".join(printable(text).split())
    return text if len(text) <= _MOST_SAID else f"{text[: _MOST_SAID - 1]}…"
