"""Parse calls from constrained outputs, compared with their JSON, at every cut and at great length."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm_server.parsers.forced_calls import NamedCall, RequiredCalls
from jaxllm_server.parsers.tool_parsers import ToolCallDelta
from tests.support.linear import pushes_in_linear_time

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def _read(make: Callable[..., Any], pieces: Sequence[str]) -> tuple[str, list[tuple[str, str, str]]]:
    """Return the content and the calls; check that ids and names are sent first, once, and in order."""
    numbers = itertools.count()
    parser = make(lambda name: f"id-{next(numbers)}")
    content, calls = "", []
    for text, deltas in [*(parser.push(piece) for piece in pieces), parser.finish()]:
        content += text
        for delta in deltas:
            if delta.name is not None:
                assert delta.index == len(calls) and delta.id == f"id-{len(calls)}"
                calls.append((delta.id, delta.name, delta.arguments))
            else:
                assert delta.index == len(calls) - 1 and delta.id is None and delta.arguments
                calls[-1] = (*calls[-1][:2], calls[-1][2] + delta.arguments)
    return content, calls


@settings(max_examples=200, deadline=None)
@given(
    calls=st.lists(st.tuples(st.text(min_size=1, max_size=8), _JSON), min_size=1, max_size=4),
    indent=st.sampled_from([None, 0, 2]),
    ascii_only=st.booleans(),
    cuts=st.lists(st.integers(0, 400), max_size=8),
)
def test_calls_are_those_of_the_list(calls: list[Any], indent: int | None, ascii_only: bool, cuts: list[int]) -> None:
    whole = [{"name": name, "parameters": value} for name, value in calls]
    text = json.dumps(whole, indent=indent, ensure_ascii=ascii_only)
    ends = sorted(min(cut, len(text)) for cut in cuts)
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *ends, len(text)])]
    content, read = _read(RequiredCalls, pieces)
    assert content == ""
    assert [(name, json.loads(arguments)) for _, name, arguments in read] == calls


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ("", "", []),
        ("[", "[", []),
        ('[{"name": "f", "par', '[{"name": "f", "par', []),
        ('[{"name": "f", "parameters": {"a', "", ['{"a']),
        ('[{"name": "f", "parameters": {}}', "", ["{}"]),
        ('[{"name": "f", "parameters": {}}, ', "", ["{}"]),
        ('[{"name": "f", "parameters": {}}, {"na', ', {"na', ["{}"]),
        ("I would rather not.", "I would rather not.", []),
        ('{"name": "f", "parameters": {}}', '{"name": "f", "parameters": {}}', []),
        ("[]", "[]", []),
        ('[{"name": "f", "parameters": {}}] and more', "] and more", ["{}"]),
    ],
)
@pytest.mark.parametrize("is_whole", [True, False])
def test_an_output_that_was_cut_off_keeps_what_it_has(
    text: str, content: str, arguments: list[str], is_whole: bool
) -> None:
    got, calls = _read(RequiredCalls, [text] if is_whole else list(text))
    assert (got, [written for *_, written in calls]) == (content, arguments)


def test_arguments_go_out_while_they_are_written() -> None:
    parser = RequiredCalls(lambda name: "x")
    assert parser.push('[{"name": "get_weather", "param') == ("", [])
    assert parser.push('eters": ') == ("", [])
    assert parser.push('{"ci') == ("", [ToolCallDelta(0, "x", "get_weather", '{"ci')])
    assert parser.push('ty": "Pa') == ("", [ToolCallDelta(0, None, None, 'ty": "Pa')])
    assert parser.push('ris"}}]') == ("", [ToolCallDelta(0, None, None, 'ris"}')])
    assert parser.finish() == ("", [])
    named = NamedCall(lambda name: "y", "f")
    assert named.push("") == named.finish() == ("", [])
    assert named.push('{"a') == ("", [ToolCallDelta(0, "y", "f", '{"a')])
    assert named.push('": 1}') == ("", [ToolCallDelta(0, None, None, '": 1}')])


@pytest.mark.ci
@pytest.mark.parametrize("repeated", [" ", '{"name":"f","parameters":{}},', '{"name":"f","parameters":[', "x"])
@pytest.mark.parametrize("piece", [1, 2**20])
def test_a_megabyte_takes_linear_time(repeated: str, piece: int) -> None:
    assert pushes_in_linear_time(lambda: RequiredCalls(lambda name: "x"), "[", repeated, piece)
