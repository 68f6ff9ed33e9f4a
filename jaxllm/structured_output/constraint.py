"""How far one output has come in its grammar. Knows tokens by their ids; knows no request."""

from __future__ import annotations

from collections.abc import Callable, Collection

from llguidance import LLMatcher

from jaxllm.errors import printable

_MOST_SAID = 300  # characters of an error


class Constraint:
    """Follows one output; belongs to one thread at a time."""

    def __init__(
        self, origin: LLMatcher, begin_after: str | None, bytes_of: Callable[[int], bytes], eos_ids: Collection[int]
    ) -> None:
        self.origin = origin  # the matcher of all outputs of the grammar, at its beginning
        self.matcher = origin.deep_copy()  # for Grammars.fill
        self._marker = (begin_after or "").encode()
        self._bytes_of = bytes_of
        self._eos_ids = eos_ids
        self.expected: list[int] = []  # forced tokens that come next, whether one by one or at once
        self._end = b""  # of the text so far, while the marker may still begin in it
        self._error: str | None = None

    @property
    def is_active(self) -> bool:
        """Whether it constrains the next token: not until what it begins after has been written."""
        return not self._marker

    @property
    def error(self) -> str | None:
        """Why it cannot go on, on one line."""
        return self._error

    def fail(self, reason: str) -> None:
        """Let it go no further."""
        self._error = self._error or one_line(reason)

    def check(self) -> None:
        """Ask the matcher whether it has failed, after each use: one that has failed allows the end, as if complete."""
        if self._error is None and self.matcher.is_error():
            self.fail(self.matcher.get_error() or "The grammar cannot be followed.")

    def consume(self, token: int) -> None:
        """Take in the token that was sampled. One that does not fit is an error of the constraint; none is raised."""
        if self._error is not None:
            return
        if self._marker:
            self._look_for_marker(token)
            return
        if self.expected and self.expected.pop(0) != token:
            self.expected = []
        try:
            self.matcher.consume_token(token)
        except (OverflowError, TypeError, ValueError) as error:  # an id that is none
            self.fail(str(error))
        self.check()

    def forced(self) -> list[int]:
        """Give the tokens that must come next as far as they are certain, and consume none; no end among them."""
        if self._marker or self._error is not None:
            return []
        tokens = self.matcher.compute_ff_tokens()
        self.check()
        if self._error is not None:
            return []
        end = next((number for number, token in enumerate(tokens) if token in self._eos_ids), len(tokens))
        return tokens[:end]

    def _look_for_marker(self, token: int) -> None:
        """Begin behind the token in which the marker ends: what follows in the same token is not constrained."""
        text = self._end + self._bytes_of(token)
        if self._marker in text:
            self._marker = self._end = b""
        else:
            self._end = text[max(0, len(text) - len(self._marker) + 1) :]


def one_line(said: str) -> str:
    """Write what llguidance says on one line: it draws the place in the source, and repeats it."""
    text = said.split("<backtrace>")[0].replace("<non-verbose/>", "").replace("\n", " ")
    text = " ".join(printable(text).split())
    return text if len(text) <= _MOST_SAID else f"{text[: _MOST_SAID - 1]}…"
