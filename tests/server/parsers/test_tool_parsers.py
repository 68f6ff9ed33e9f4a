"""Parse streamed tool calls of two forms: text without a call, damaged calls, every cut, great lengths.

Generated calls of all forms: test_call_forms.py; any text however it is cut: tests/fuzz/test_properties.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from jaxllm_server.parsers.table import TOOL_PARSERS
from jaxllm_server.parsers.tool_parsers import ToolCallDelta
from tests.support.linear import pushes_in_linear_time
from tests.support.naive import parsed_calls


def _pieces(text: str, cuts: Sequence[int]) -> list[str]:
    return [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]


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
    assert pushes_in_linear_time(lambda: TOOL_PARSERS[style].parser(lambda name: "x", _TOOLS), start, repeated, piece)
