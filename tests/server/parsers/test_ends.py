"""Truncated outputs, and calls before the end of the reasoning: no part of a marker or of a call becomes text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm_server.generation.output_reader import Splitter
from jaxllm_server.parsers.reasoning import TaggedReasoning
from jaxllm_server.parsers.table import REASONING_PARSERS, TOOL_PARSERS
from tests.server.parsers.test_call_forms import _CALLS, TOOLS, TRANSCRIPTS, WRITERS, Calls, _tools
from tests.support.naive import distinct

TAGGED = {
    name: form
    for name in distinct(REASONING_PARSERS)
    if isinstance(form := REASONING_PARSERS[name].form, TaggedReasoning)
}
_THOUGHT = "So < it [is].\n"


def read(
    style: str, reasoning: str | None, pieces: Sequence[str], end: str, tools: Any = ()
) -> tuple[str, str, list[list[str]]]:
    """Return the content, the reasoning, and the calls' names and arguments of an output that finishes with `end`."""
    numbers = count()
    parsers = [TOOL_PARSERS[style].parser(lambda name: f"id-{next(numbers)}", tools) for _ in range(2)]
    form = None if reasoning is None else REASONING_PARSERS[reasoning].form.parser(TAGGED[reasoning].starts[0])
    splitter = Splitter(form, parsers[0], parsers[1], None)
    content, thought, calls = "", "", list[list[str]]()
    for piece, reason in [*((piece, None) for piece in pieces), ("", end)]:
        new, new_thought, deltas = splitter.push(piece, reason)
        content, thought = content + new, thought + new_thought
        for delta in deltas:
            if delta.name is not None:
                assert delta.index == len(calls) and delta.id
                calls.append([delta.name, ""])
            assert delta.index == len(calls) - 1
            calls[-1][1] += delta.arguments
    assert splitter.num_calls == len(calls)
    return content, thought, calls


def check_cut(style: str, reasoning: str | None, text: str, cut: int, told: tuple[str, str, Calls], tools: Any) -> None:
    content, thought, calls = read(style, reasoning, [text[:cut]], "length", tools)
    assert read(style, reasoning, list(text[:cut]), "length", tools) == (content, thought, calls)
    assert told[0].startswith(content) and told[1].startswith(thought)
    assert [name for name, _ in calls] == [name for name, _ in told[2][: len(calls)]]
    if cut == len(text):
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [(n, dict(a)) for n, a in told[2]]
        assert content == told[0]


def with_thought(reasoning: str | None, text: str) -> tuple[str, str]:
    return ("", text) if reasoning is None else (_THOUGHT, _THOUGHT + TAGGED[reasoning].ends[0] + text)


@pytest.mark.parametrize("reasoning", [None, "qwen3"])
@pytest.mark.parametrize(("style", "text", "content", "calls"), TRANSCRIPTS)
def test_a_transcript_that_is_cut_off_shows_no_piece_of_a_marker(
    style: str, text: str, content: str, calls: Calls, reasoning: str | None
) -> None:
    thought, text = with_thought(reasoning, text)
    for cut in range(len(text) + 1):
        check_cut(style, reasoning, text, cut, (content, thought, calls), TOOLS)


@pytest.mark.parametrize("style", WRITERS)
@settings(max_examples=8, deadline=None)
@given(calls=_CALLS, before=st.sampled_from(["", "Let me see.\n", "a < b [c] "]), data=st.data())
def test_a_generated_output_that_is_cut_off(style: str, calls: Calls, before: str, data: st.DataObject) -> None:
    reasoning = data.draw(st.sampled_from([None, *TAGGED]))
    before = "" if style == "llama3_json" else before
    thought, text = with_thought(reasoning, before + data.draw(st.sampled_from(WRITERS[style]))(calls))
    tools = _tools(calls)
    for cut in {len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=6))}:
        check_cut(style, reasoning, text, cut, (before, thought, calls), tools)


@pytest.mark.slow
@pytest.mark.parametrize("style", WRITERS)
@settings(max_examples=60, deadline=None)
@given(calls=_CALLS, data=st.data())
def test_a_generated_output_at_every_cut(style: str, calls: Calls, data: st.DataObject) -> None:
    reasoning = data.draw(st.sampled_from([None, *TAGGED]))
    thought, text = with_thought(reasoning, data.draw(st.sampled_from(WRITERS[style]))(calls))
    for cut in range(len(text) + 1):
        check_cut(style, reasoning, text, cut, ("", thought, calls), _tools(calls))


@pytest.mark.parametrize("style", [style for style in WRITERS if style != "openai"])
@settings(max_examples=8, deadline=None)
@given(calls=_CALLS, data=st.data())
def test_a_call_before_the_end_of_the_reasoning_is_one(style: str, calls: Calls, data: st.DataObject) -> None:
    """With and without an end tag after it; a call after the end tag has the next index."""
    reasoning = data.draw(st.sampled_from(sorted(TAGGED)))
    tag = TAGGED[reasoning].ends[0]
    write = data.draw(st.sampled_from(WRITERS[style]))
    thought = "" if style == "llama3_json" else _THOUGHT
    written, tools = write(calls), _tools(calls)
    if any(end in written for end in (*TAGGED[reasoning].ends, *TAGGED[reasoning].kept_ends)):
        return  # which ends the reasoning
    expected = [(name, dict(arguments)) for name, arguments in calls]
    for text, content, told in (
        (thought + written, "", expected),
        (f"{thought}{written}{tag}\nYes.", "\nYes.", expected),
        (f"{thought}{written}{tag}{written}", "", expected * 2),
    ):
        for pieces in ([text], list(text)):
            got, got_thought, got_calls = read(style, reasoning, pieces, "stop", tools)
            assert [(name, json.loads(arguments)) for name, arguments in got_calls] == told
            assert (got, got_thought) == (content, thought)


@pytest.mark.parametrize(
    ("style", "text", "content"),
    [
        ("hermes", 'So.<tool_call>{"name": "get_w', "So."),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}</to', ""),
        ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}},{"name": "say', ""),
        ("llama3_json", '{"name": "get_w', ""),
        ("llama3_json", '{"answer": "It is', '{"answer": "It is'),  # no member of a call
        ("glm45", "<tool_call>now", ""),
        ("pythonic", "[get_weather(ci", ""),
        ("openai", " to=functions.no", ""),
        ("openai", "<|channel|>final<|message|>Yes.<|re", "Yes."),
        ("qwen3_coder", "<function=now>\n<parameter=a>\n1\n</para", ""),
    ],
)
def test_what_was_reported(style: str, text: str, content: str) -> None:
    assert read(style, None, [text], "length")[0] == content
    calls = read(style, None, [text], "length")[2]
    assert all("</" not in arguments for _, arguments in calls)
    # An output that ends with EOS keeps its text.
    assert style == "openai" or calls or read(style, None, [text], "stop")[0] == text


def test_a_parameter_with_listed_values_has_their_type() -> None:
    listed = {"n": {"enum": [1, 2]}, "on": {"const": True}, "word": {"enum": ["1", "2"]}}
    tools = [{"type": "function", "function": {"name": "set", "parameters": {"type": "object", "properties": listed}}}]
    text = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in {"n": 2, "on": "true", "word": 1}.items()
    )
    (call,) = read(
        "qwen3_coder", None, [f"<tool_call>\n<function=set>\n{text}</function>\n</tool_call>"], "stop", tools
    )[2]
    assert json.loads(call[1]) == {"n": 2, "on": True, "word": "1"}
