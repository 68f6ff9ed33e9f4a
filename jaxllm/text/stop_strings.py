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
    # Every proper beginning of a stop string: made once, then handed on from state to state.
    beginnings: frozenset[str] = field(default=frozenset(), repr=False)
    longest: int = field(default=0, repr=False)

    @classmethod
    def of(cls, stops: Iterable[str]) -> StopMatcher:
        """Give the matcher before any text. Raises `UserError` for an empty stop string."""
        stops = tuple(stops)
        if "" in stops:
            raise UserError("stop cannot contain an empty string.", "stop")
        beginnings = frozenset(stop[:length] for stop in stops for length in range(1, len(stop)))
        return cls(stops, beginnings=beginnings, longest=max(map(len, beginnings), default=0))


def match_stops(matcher: StopMatcher, delta: str) -> tuple[StopMatcher, str]:
    """Take in more text; give the next state and the text that can be shown.

    The stop string that is complete first ends the text, before its first character; of several complete at the same
    character, the longest. So the result does not depend on how the text is cut into deltas, and no token has to be
    awaited to see whether a longer stop string would have begun earlier. Held back is the longest end of the text that
    a stop string begins with, so no part of a stop string is ever shown. At the end of a request `held` is to be shown.
    """
    if matcher.matched is not None or not delta:
        return matcher, ""
    if not matcher.stops:
        return matcher, delta
    text = matcher.held + delta
    found = [(start + len(stop), start, stop) for stop in matcher.stops if (start := text.find(stop)) >= 0]
    if found:
        _, start, stop = min(found)
        return replace(matcher, held="", matched=stop), text[:start]
    lengths = range(min(len(text), matcher.longest), 0, -1)
    held = next((length for length in lengths if text[-length:] in matcher.beginnings), 0)
    shown = text[: len(text) - held]
    return (matcher if not held and not matcher.held else replace(matcher, held=text[len(shown) :])), shown
