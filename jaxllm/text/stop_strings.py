"""Stop strings: where a growing text ends, and what of it can be shown before that is known.

A pure step over a frozen state, so that an engine can keep one state per request and roll back. Knows text only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from jaxllm.errors import UserError


@dataclass(frozen=True, slots=True)
class StopMatcher:
    """Where the search for stop strings stands: the text not yet shown, and the stop string found, if any."""

    stops: tuple[str, ...]
    held: str = ""
    matched: str | None = None
    progress: tuple[int, ...] = ()  # of each stop string: how many of its characters the text ends with
    # Made once, then handed on from state to state.
    borders: tuple[tuple[int, ...], ...] = field(default=(), repr=False)  # of each stop string, see `_borders`
    firsts: frozenset[str] = field(default=frozenset(), repr=False)  # characters that stop strings begin with

    @classmethod
    def of(cls, stops: Iterable[str]) -> StopMatcher:
        """Give the matcher before any text. Raises `UserError` for an empty stop string."""
        stops = tuple(stops)
        if "" in stops:
            raise UserError("stop cannot contain an empty string.", "stop")
        return cls(
            stops,
            progress=(0,) * len(stops),
            borders=tuple(map(_borders, stops)),
            firsts=frozenset(stop[0] for stop in stops),
        )


def match_stops(matcher: StopMatcher, delta: str) -> tuple[StopMatcher, str]:
    """Take in more text; give the next state and the text that can be shown.

    The stop string that is complete first ends the text, before its first character; of several complete at the same
    character, the longest. So the result does not depend on how the text is cut into deltas, and no token has to be
    awaited to see whether a longer stop string would have begun earlier. Held back is the longest end of the text that
    a stop string begins with, so no part of a stop string is ever shown. At the end of a request `held` is to be shown.

    Knuth, Morris and Pratt's search, one for each stop string: at most two comparisons of a character on average,
    however long the stop strings are and whatever the text repeats.
    """
    if matcher.matched is not None or not delta:
        return matcher, ""
    if not matcher.held and matcher.firsts.isdisjoint(delta):
        return matcher, delta
    text = matcher.held + delta
    progress = list(matcher.progress)
    for end, character in enumerate(delta, len(matcher.held) + 1):
        found = ""
        for number, stop in enumerate(matcher.stops):
            length = progress[number]
            while length and stop[length] != character:
                length = matcher.borders[number][length]
            length += stop[length] == character
            progress[number] = length
            if len(found) < length == len(stop):
                found = stop
        if found:
            return replace(matcher, held="", matched=found), text[: end - len(found)]
    held = max(progress)
    return replace(matcher, held=text[len(text) - held :], progress=tuple(progress)), text[: len(text) - held]


def _borders(stop: str) -> tuple[int, ...]:
    """Return for each length the longest shorter beginning of `stop` that its first `length` characters end with.

    >>> _borders("abab!")
    (0, 0, 0, 1, 2)
    """
    borders = [0, 0]
    length = 0
    for character in stop[1:-1]:
        while length and stop[length] != character:
            length = borders[length]
        length += stop[length] == character
        borders.append(length)
    return tuple(borders[: len(stop)])
