"""The progress of one output through its grammar."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor, LLMatcher

from jaxllm.errors import printable
from jaxllm.structured_output.slow_masks import SLOW_SECONDS, Job, Pace

_MOST_SAID = 300
_GUESS = 0.001  # seconds, of the first mask
_RELEASE_SECONDS = 0.002  # tokens after longer masks are consumed without the GIL: 50 us more
_MANY_TOKENS = 2**31 - 1
_of_thread = threading.local()


@dataclass(frozen=True)
class Preamble:
    """Text that may precede the constrained part of an output."""

    # Texts, and the grammars after each; before a mark all tokens but ends are allowed. Empty: constrained throughout.
    marks: tuple[tuple[bytes, tuple[LLMatcher, ...]], ...] = ()
    # Prefixes of an unconstrained part.
    openings: tuple[bytes, ...] = ()


class Constraint:
    """Constrains one output to one of several grammars. Not thread-safe."""

    def __init__(
        self,
        origins: Sequence[LLMatcher],
        way: Preamble,
        allowed: np.ndarray,
        bytes_of: Callable[[int], bytes],
        eos_ids: Collection[int],
        pace: Pace,
    ) -> None:
        self.pace = pace
        self.job: Job | None = None
        self.again: int | None = None  # dropped token that the thread consumes: the only one allowed next …
        self.due: list[int] = []  # … and forced tokens after it
        self.num_late = 0
        self._seconds = _GUESS
        self.origins = (*origins, *(each for _, found in way.marks for each in found))
        self.allowed = allowed  # union over all grammars: int32[W]
        self._marks = way.marks
        self.openings = way.openings  # remainders that match so far
        self.matchers: list[LLMatcher] = []
        self._is_free = bool(way.marks) and not way.openings
        if not self._is_free:
            self._begin(origins)
        self._bytes_of = bytes_of
        self._eos_ids = eos_ids
        self.expected: list[int] = []
        self._end = b""
        self._error: str | None = None

    def _begin(self, origins: Sequence[LLMatcher]) -> None:
        self.matchers = [each.deep_copy() for each in origins]

    @property
    def is_active(self) -> bool:
        return not self._is_free

    @property
    def error(self) -> str | None:
        return self._error

    @property
    def turn(self) -> float:
        """The sort key of masks in a step: a mask's duration, halved per step waited."""
        return self._seconds / (1 << self.num_late)

    def note_filled(self, seconds: float) -> None:
        self.num_late, self._seconds = 0, seconds
        if seconds > SLOW_SECONDS or self.pace.is_slow:
            self.pace.note(seconds)

    def fail(self, reason: str) -> None:
        self._error = self._error or one_line(reason)

    def check(self) -> None:
        """Drop failed matchers, with which llguidance would let the output end.

        Sets `error` if no matcher or opening is left.
        """
        failed = [] if self._error is not None else [each for each in self.matchers if each.is_error()]
        if failed:
            self.matchers = [each for each in self.matchers if each not in failed]
            if not self.matchers and not self.openings:
                self.fail(failed[0].get_error() or "The grammar allows no further token.")

    def consume(self, token: int) -> None:
        """Advance by a sampled token; a forbidden one sets `error`."""
        if self._error is not None:
            return
        if self._is_free:
            self._look_for_mark(token)
            return
        if self.expected and self.expected.pop(0) != token:
            self.expected = []
        if self.openings and self._opens(token):
            return
        try:
            if self._seconds > _RELEASE_SECONDS:
                consume_released(self.matchers, token)
            else:
                for matcher in self.matchers:
                    matcher.consume_token(token)
        except (OverflowError, TypeError, ValueError) as error:  # an invalid token id
            self.fail(str(error))
        self.check()

    def forced(self) -> list[int]:
        """Return the forced next tokens, up to an end."""
        if self._is_free or self.openings or len(self.matchers) != 1 or self._error is not None:
            return []
        tokens = self.matchers[0].compute_ff_tokens()
        self.check()
        if self._error is not None:
            return []
        end = next((number for number, token in enumerate(tokens) if token in self._eos_ids), len(tokens))
        return tokens[:end]

    def _opens(self, token: int) -> bool:
        """Advance the openings by a token; return whether one is complete: until a mark, the output is free."""
        text = b"" if token in self._eos_ids else self._bytes_of(token)
        self.openings = tuple(each[len(text) :] for each in self.openings if text and each.startswith(text))
        if b"" not in self.openings:
            return False
        self.openings, self.matchers, self._is_free = (), [], True
        return True

    def _look_for_mark(self, token: int) -> None:
        text = self._end + self._bytes_of(token)
        found = [(text.index(mark), origins) for mark, origins in self._marks if mark in text]
        if found:
            self._is_free, self._end = False, b""
            self._begin(min(found, key=lambda each: each[0])[1])
        else:
            longest = max(len(mark) for mark, _ in self._marks)
            self._end = text[max(0, len(text) - longest + 1) :]


def consume_released(matchers: Sequence[LLMatcher], token: int) -> None:
    """Let matchers consume a token without the GIL, which `LLMatcher.consume_token` holds for up to 0.1 s.

    `LLExecutor` releases it only for two matchers or more.
    """
    if not matchers:
        return
    if not hasattr(_of_thread, "executor"):  # so that no other work delays it
        _of_thread.executor = LLExecutor(1)
    work = [(matcher, token) for matcher in matchers]
    if len(work) == 1:
        failed = matchers[0].deep_copy()
        failed.rollback(_MANY_TOKENS)  # fails; consuming then costs nothing
        work.append((failed, token))
    _of_thread.executor.consume_token_par(work)


def one_line(said: str) -> str:
    text = said.split("<backtrace>")[0].split("\n<state>")[0].replace("<non-verbose/>", "").replace("\n", " ")
    text = " ".join(printable(text).split())
    return text if len(text) <= _MOST_SAID else f"{text[: _MOST_SAID - 1]}…"
