"""Stop strings in streamed text against a naive search of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import UserError
from jaxllm.text.stop_strings import StopMatcher, match_stops
from tests.support.naive import stop_at


def _matched(text: str, stops: list[str], cuts: list[int]) -> tuple[list[str], StopMatcher]:
    matcher, shown = StopMatcher.of(stops), []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        matcher, delta = match_stops(matcher, text[start:end])
        shown.append(delta)
    return shown, matcher


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("ab\n", max_size=14),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4),
    cuts=st.lists(st.integers(0, 14), max_size=6),
)
def test_stops_at_any_cuts_are_those_of_the_whole_text(text: str, stops: list[str], cuts: list[int]) -> None:
    expected, stop = stop_at(text, stops)
    shown, matcher = _matched(text, stops, sorted(min(cut, len(text)) for cut in cuts))
    assert matcher.matched == stop
    assert "".join(shown) + matcher.held == expected


def test_no_part_of_a_stop_string_is_shown_and_other_text_is_at_once() -> None:
    shown, matcher = _matched("hello wor<en<end>", ["<end>"], list(range(1, 17)))
    assert shown == [*"hello wor", "", "", "", "<en", "", "", "", ""]
    assert (matcher.held, matcher.matched) == ("", "<end>")
    matcher, delta = match_stops(matcher, "more")
    assert (delta, matcher.held) == ("", "")


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(UserError, match="stop cannot contain an empty string"):
        StopMatcher.of(["a", ""])
