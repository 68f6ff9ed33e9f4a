"""Shorten a failing trace by removing events (delta debugging, Zeller and Hildebrandt 2002)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tests.simulation.trace import Trace
from tests.simulation.world import World


def failure(trace: Trace) -> BaseException | None:
    """Play a trace; return its error, or None."""
    try:
        World(trace).play()
    except Exception as error:
        return error
    return None


def kind(error: BaseException | None) -> str | None:
    """Return an error's type and the start of its message without digits; shrinking must keep the kind of failure."""
    if error is None:
        return None
    return f"{type(error).__name__}: " + "".join(letter for letter in str(error) if not letter.isdigit())[:24]


def shrink(trace: Trace, most_plays: int = 600, find: Callable[[Trace], Any] = failure) -> Trace:
    """Return a trace with fewer events that fails in the same way, after at most `most_plays` plays.

    Raises ValueError if `trace` does not fail.
    """
    wanted = kind(find(trace))
    if wanted is None:
        raise ValueError("the trace does not fail")
    plays = 0

    def fails(events: list[list[Any]], num_turns: int) -> bool:
        nonlocal plays
        plays += 1
        return plays <= most_plays and kind(find(replace(trace, events=events, num_turns=num_turns))) == wanted

    events, num_turns = trace.events, trace.num_turns
    for shorter in (num_turns // 8, num_turns // 4, num_turns // 2, 3 * num_turns // 4):
        early = [event for event in events if event[0] < shorter]
        if fails(early, shorter):
            events, num_turns = early, shorter
            break
    size = max(1, len(events) // 2)
    while size and plays < most_plays:
        start = 0
        while start < len(events):
            fewer = events[:start] + events[start + size :]
            if fails(fewer, num_turns):
                events = fewer
            else:
                start += size
        size = size // 2 if size > 1 else 0
    return replace(trace, events=events, num_turns=num_turns)
