"""Find stop strings in growing text. Steps are pure, so that an engine can roll back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from jaxllm.errors import UserError


@dataclass(frozen=True, slots=True)
class StopMatcher:
    """A search: withheld text, and the matched stop string."""

    stops: tuple[str, ...]
    held: str = ""
    matched: str | None = None
    progress: tuple[int, ...] = ()  # by stop string: longest prefix that ends the text
    borders: tuple[tuple[int, ...], ...] = field(default=(), repr=False)  # by stop string
    firsts: frozenset[str] = field(default=frozenset(), repr=False)

    @classmethod
    def of(cls, stops: Iterable[str]) -> StopMatcher:
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
    """Process more text; return the next state and the text that is final.

    The first stop string to complete ends the text before it; of several with the same start, the longest. The longest
    suffix that begins a stop string is withheld; at the end of a request, add `held`. Algorithm: Knuth-Morris-Pratt.
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
    """Return, for each length, the longest proper border of the first `length` characters of `stop`.

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
