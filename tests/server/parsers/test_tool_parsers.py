"""Tool calls in streamed text against calls that were written with `json.dumps`, at every cut and at great length."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm_server.parsers.table import TOOL_PARSERS
from jaxllm_server.parsers.tool_parsers import ToolCallDelta
from tests.support.linear import is_linear
from tests.support.naive import distinct, parsed_calls

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
# Of every form: its markers, what stands between them, and tags that are cut off.
_WORDS = [
    *sorted({marker for row in TOOL_PARSERS.values() for marker in row.parser(str).markers}),
    *("<function=", "<parameter=", "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>"),
    *("</arg_value>", '<invoke name="', '<parameter name="', "</invoke>", "f", "functions.f:0", "functions.f", "f(a="),
    *(
        '{"name": "f", ',
        '"name"',
        '"arguments": ',
        '"parameters": {',
        "analysis",
        "final",
        " to=f",
        "function",
        "```json",
    ),
    *"{}[]()\":,\\;<>1e-='` \n",
    *("null", "True", "\\u00e9", "\\ud800", "é", "text", '{"a": "b"}', "[f(", "<tool", "<|", "[TOOL"),
]
_SOUP = st.lists(st.sampled_from(_WORDS), max_size=16).map("".join)


def _pieces(text: str, cuts: Sequence[int]) -> list[str]:
    return [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]


def _hermes(name: str, arguments: Any, **how: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, **how)}\n</tool_call>"


@settings(max_examples=100, deadline=None)
@given(
    calls=st.lists(st.tuples(st.text(min_size=1, max_size=8), _JSON, st.booleans(), st.booleans()), max_size=3),
    around=st.lists(st.text("ab }{\"'é\n", max_size=6), min_size=4, max_size=4),
    cuts=st.lists(st.integers(0, 400), max_size=8),
)
def test_hermes_calls_are_those_written_whatever_stands_around_them(
    calls: list[tuple[str, Any, bool, bool]], around: list[str], cuts: list[int]
) -> None:
    text = content = around[0]
    for (name, arguments, is_name_first, ascii_only), after in zip(calls, around[1:], strict=False):
        members = [("name", name), ("id", [{"name": "x"}]), ("arguments", arguments)][:: 1 if is_name_first else -1]
        text += f"<tool_call>{json.dumps(dict(members), ensure_ascii=ascii_only)} </tool_call>{after}"
        content += after if after.strip() else ""
    got, parsed = parsed_calls("hermes", _pieces(text, sorted(min(cut, len(text)) for cut in cuts)))
    assert got == content
    assert [name for _, name, _ in parsed] == [name for name, *_ in calls]
    assert [json.loads(written) for *_, written in parsed] == [arguments for _, arguments, *_ in calls]
    assert [identity for identity, *_ in parsed] == [f"id-{index}" for index in range(len(calls))]


@settings(max_examples=100, deadline=None)
@given(
    calls=st.lists(st.tuples(st.text(min_size=1, max_size=8), _JSON), min_size=1, max_size=3),
    separator=st.sampled_from([";", "; ", "\n", " ;\n", ";<|python_tag|>"]),
    start=st.sampled_from(["", "<|python_tag|>", " \n", "<|python_tag|>\n"]),
    cuts=st.lists(st.integers(0, 400), max_size=8),
)
def test_llama_calls_are_those_written(calls: list[Any], separator: str, start: str, cuts: list[int]) -> None:
    text = start + separator.join(json.dumps({"name": name, "parameters": value}) for name, value in calls)
    content, parsed = parsed_calls("llama3_json", _pieces(text, sorted(min(cut, len(text)) for cut in cuts)))
    assert content == ""
    assert [(name, json.loads(arguments)) for _, name, arguments in parsed] == calls


@pytest.mark.parametrize("style", distinct(TOOL_PARSERS))
@settings(max_examples=100, deadline=None)
@given(text=_SOUP, start=st.sampled_from([*_WORDS, ""]), cuts=st.lists(st.integers(0, 200), max_size=8))
def test_any_text_gives_the_same_however_it_is_cut(style: str, text: str, start: str, cuts: list[int]) -> None:
    text = start + text
    whole = parsed_calls(style, [text])
    assert parsed_calls(style, list(text)) == whole
    assert parsed_calls(style, _pieces(text, sorted(min(cut, len(text)) for cut in cuts))) == whole
    if not whole[1] and style != "openai":  # whose content has markers around it
        assert whole[0] == text


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", "a <tool_call>" + '{"name": "f\\u00e9", "arguments": {"a": "}\\"</tool_call>"}}</tool_call> b'),
        ("hermes", '<tool_ca<tool_call> {"arguments": 1.5e3, "name": "f"}\n<tool_call>{"name": "g"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": [1, "é'),
        ("llama3_json", ' <|python_tag|>{"name": "f", "parameters": {}} ;{"name": "g", "arguments": "\\\\"};'),
        ("llama3_json", '{"name": "f", "parameters": [0]} and more'),
    ],
)
def test_every_pair_of_cuts_gives_the_same(style: str, text: str) -> None:
    whole = parsed_calls(style, [text])
    assert whole[1]
    for cuts in itertools.combinations(range(len(text) + 1), 2):
        assert parsed_calls(style, _pieces(text, cuts)) == whole


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "a < b <tool_cal> <tool_",
        "<tool_call>",
        "<tool_call>no object</tool_call>",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": 7, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',  # half of a pair: no protocol could carry it
        '<tool_call>{"name": "\\x", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name" "f", "arguments": {}}</tool_call>',
        "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
        '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>',
        '<tool_call>{"name": "f", ',  # cut off before it is sure to be a call
        '<tool_call>{"arguments": {"name": "f"}, "na',
    ],
)
@pytest.mark.parametrize("is_whole", [True, False])
def test_hermes_text_that_is_no_call_is_content(text: str, is_whole: bool) -> None:
    assert parsed_calls("hermes", [text] if is_whole else list(text)) == (text, [])


@pytest.mark.parametrize(
    "text",
    [
        'Sure: {"name": "f", "parameters": {}}',
        '{"name": "Ada", "age": 36}',
        '{"name": "f"}',
        "<|python_tag|>print(1)",
        "<|python_tag|><|python_tag|>",
        '; {"name": "f", "parameters": {}}',
        "[1]",
        "<",
        "  ",
        '{"function": {"name": "f", "parameters": {}}}',
        f'{{"name": "{"f" * 257}", "parameters": {{}}}}',
    ],
)
@pytest.mark.parametrize("is_whole", [True, False])
def test_llama_text_that_is_no_call_is_content(text: str, is_whole: bool) -> None:
    assert parsed_calls("llama3_json", [text] if is_whole else list(text)) == (text, [])


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": [1, "b', "", '{"a": [1, "b'),
        ('<tool_call>{"name": "f", "arguments": tru', "", "tru"),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> ', "", '{"a": 1}'),
        ('<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>x', "x", '{"a": 1'),
        ('<tool_call>{"name": "f", "arguments": {"a": 1, }}</tool_call>', "", '{"a": 1, }'),
        ('<tool_call>{"name": "f", "arguments": {}}}\n</tool_call>', "}\n</tool_call>", "{}"),
        ('<tool_call>{"name": "f", "arguments": {}, "arguments": [1]}</tool_call>', "", "{}"),
        ('<tool_call>{"name": "f"}</tool_call></tool_call>', "</tool_call>", "{}"),
        ('<tool_call>{"name": "f"}</tool_call>\n\n and </tool_', "\n\n and </tool_", "{}"),
    ],
)
def test_a_damaged_call_keeps_its_arguments_and_the_rest_is_content(text: str, content: str, arguments: str) -> None:
    assert parsed_calls("hermes", [text]) == (content, [("id-0", "f", arguments)])


def test_after_a_damaged_llama_call_all_is_content() -> None:
    text = '{"name": "f", "parameters": {"a": 1}; {"name": "g", "parameters": {}}'
    assert parsed_calls("llama3_json", [text]) == ('; {"name": "g", "parameters": {}}', [("id-0", "f", '{"a": 1}')])


def test_arguments_go_out_while_they_are_written_and_content_at_once() -> None:
    parser = TOOL_PARSERS["hermes"].parser(lambda name: "x")
    assert parser.push("I look < at it") == ("I look < at it", [])
    assert parser.push(" <tool") == (" ", [])
    assert parser.push('_call>{"name": "get_weather", "arg') == ("", [])
    assert parser.push('uments": {"ci') == ("", [ToolCallDelta(0, "x", "get_weather", '{"ci')])
    assert parser.push('ty": "Pa') == ("", [ToolCallDelta(0, None, None, 'ty": "Pa')])
    assert parser.push('ris"}}</tool_call>') == ("", [ToolCallDelta(0, None, None, 'ris"}')])
    assert parser.finish() == ("", [])


def test_arguments_before_the_name_wait_for_it() -> None:
    parser = TOOL_PARSERS["hermes"].parser(lambda name: "x")
    assert parser.push('<tool_call>{"arguments": {"a": 1}, "name": "f') == ("", [])
    assert parser.push('"') == ("", [ToolCallDelta(0, "x", "f", '{"a": 1}')])


_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": {"type": "array"}}}}}]
_CALL = '<tool_call>{"name": "f", "arguments": '


@pytest.mark.ci
@pytest.mark.parametrize(
    ("style", "start", "repeated"),
    [
        ("hermes", "", "<tool_call"),
        ("hermes", "", "<"),
        ("hermes", "", '<tool_call>{"'),
        ("hermes", "<tool_call>", " "),
        ("hermes", '<tool_call>{"name": "f"}', " \n"),
        ("hermes", '<tool_call>{"arguments": ', "[{"),
        ("hermes", _CALL, "["),
        ("hermes", _CALL + '"', "\\"),
        ("hermes", '<tool_call>{"name": "', '\\"'),
        ("llama3_json", "", " "),
        ("llama3_json", "{", '"a":"\\"",'),
        ("llama3_json", "", '{"name":"f","parameters":{}};'),
        ("mistral", "", "[TOOL_CALLS]"),
        ("mistral", "", "[TOOL_CALLS]f[ARGS]{}"),
        ("mistral", "[TOOL_CALLS]f", "[CALL_ID]"),
        ("granite", "", "<tool_call>["),
        ("granite", "<|tool_call|>[", '{"name":"f"},'),
        ("deepseek_v3", "", "<｜tool▁call▁begin｜>"),
        ("deepseek_v3", "", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f`"),
        ("deepseek_v31", "", "<｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜>"),
        ("kimi_k2", "<|tool_calls_section_begin|>", " <|tool_calls_section_end|>"),
        ("kimi_k2", "<|tool_call_begin|>", "f"),
        ("pythonic", "[", "f(a=1),"),
        ("pythonic", "[f(a=", "["),
        ("pythonic", "[f(a=", "{1:"),
        ("pythonic", "[f(a='", '\\x61"\n'),
        ("pythonic", "[f(a=", "1"),
        ("pythonic", '[f(a="""', '""a'),
        ("pythonic", "", "<|python_start|>["),
        ("qwen3_coder", "<function=f>", "<parameter=a></parameter>"),
        ("qwen3_coder", "<function=f><parameter=a>", "</parameter>\n"),
        ("qwen3_coder", "<function=f><parameter=n>", "["),  # a list that no bracket closes
        ("qwen3_coder", "", "<tool_call><function="),
        ("minimax_m2", "", '<invoke name="'),
        ("glm45", "", "<tool_call>f<arg_key>"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>", "\n"),
        ("openai", "", "<|channel|>"),
        ("openai", "", "<|channel|>commentary to=functions.f<|message|>"),
        ("openai", " ", " "),
    ],
)
@pytest.mark.parametrize("piece", [1, 2**20])
def test_a_megabyte_of_adversarial_text_takes_linear_time(style: str, start: str, repeated: str, piece: int) -> None:
    def prepare(size: int) -> Callable[[], object]:
        text = start + repeated * (size // len(repeated))
        pieces = [text[at : at + piece] for at in range(0, len(text), piece)]
        parser = TOOL_PARSERS[style].parser(lambda name: "x", _TOOLS)

        def work() -> None:
            for one in pieces:
                parser.push(one)
            parser.finish()

        return work

    assert is_linear(prepare, 2**17 if piece > 1 else 2**14)  # a call of `push` costs ten times as much as a character
