"""Each format of tool calls: a transcript from its specification, and generated calls in it, cut at every position.

The writers follow models' chat templates for earlier calls; arguments are compared as JSON.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm_server.parsers.table import TOOL_PARSERS
from tests.support.naive import distinct, parsed_calls

Arguments = Mapping[str, Any]
Calls = Sequence[tuple[str, Arguments]]


def _types(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _tools(calls: Calls) -> list[dict[str, Any]]:
    """Describe tools whose parameters have the types of the given arguments."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": _types(value)} for key, value in arguments.items()},
                },
            },
        }
        for name, arguments in calls
    ]


def _parse(style: str, pieces: Sequence[str], tools: Any = ()) -> tuple[str, list[tuple[str, Any]]]:
    content, calls = parsed_calls(style, pieces, tools)
    return content, [(name, json.loads(arguments)) for _, name, arguments in calls]


# Each case: the model's output, the content, and the calls.
PARIS = ("get_weather", {"city": "Paris", "days": 2})
NOW = ("now", {})
TOOLS = _tools([PARIS, NOW])
TRANSCRIPTS: list[tuple[str, str, str, Calls]] = [
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "Let me see.\n",
        [PARIS, NOW],
    ),
    (
        "llama3_json",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}; '
        '{"name": "now", "parameters": {}}',
        "",
        [PARIS, NOW],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "now", "arguments": {}}]',
        "",
        [PARIS, NOW],
    ),
    (
        "mistral",
        'Let me see.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{}',
        "Let me see.",
        [PARIS, NOW],
    ),
    ("mistral", '[TOOL_CALLS]get_weather{"city": "Paris", "days": 2}', "", [PARIS]),
    (
        "granite",
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, {"name": "now", '
        '"arguments": {}}]',
        "",
        [PARIS, NOW],
    ),
    ("granite", '<tool_call>[{"name": "now", "arguments": {}}]\n', "", [NOW]),
    (
        "deepseek_v3",
        "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n'
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Let me see.",
        [PARIS, NOW],
    ),
    (
        "deepseek_v31",
        "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris", "days": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        "Let me see.",
        [PARIS, NOW],
    ),
    (
        "kimi_k2",
        "Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris", "days": 2}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>'
        "{}<|tool_call_end|><|tool_calls_section_end|>",
        "Let me see.",
        [PARIS, NOW],
    ),
    ("llama4_pythonic", '[get_weather(city="Paris", days=2), now()]', "", [PARIS, NOW]),
    ("pythonic", "<|python_start|>[get_weather(city='Paris', days=2)]<|python_end|>", "", [PARIS]),
    (
        "qwen3_coder",
        "Let me see.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "Let me see.\n",
        [PARIS, NOW],
    ),
    (  # a value that contains tags itself
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\n<parameter=a>\n1\n</parameter>\n</b>\n</parameter>\n</function>",
        "",
        [("get_weather", {"city": "<parameter=a>\n1\n</parameter>\n</b>"})],
    ),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n<parameter=days>2</parameter>\n"
        "</function>\n</seed:tool_call>",
        "",
        [PARIS],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "",
        [PARIS, NOW],
    ),
    (
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
        "",
        [PARIS, NOW],
    ),
    (
        "openai",
        "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris", "days": 2}<|call|>',
        "Let me see.",
        [PARIS],
    ),
    ("openai", " to=functions.now<|channel|>commentary json<|message|>{}", "", [NOW]),
    ("openai", "<|channel|>final<|message|>It is warm.<|return|>", "It is warm.", []),
]


@pytest.mark.parametrize(("style", "text", "content", "calls"), TRANSCRIPTS)
def test_a_transcript_gives_its_calls_at_every_cut(style: str, text: str, content: str, calls: Calls) -> None:
    expected = content, [(name, dict(arguments)) for name, arguments in calls]
    assert _parse(style, list(text), TOOLS) == expected
    for cut in range(len(text)):
        assert _parse(style, [text[:cut], text[cut:]], TOOLS) == expected


def test_every_form_has_a_transcript() -> None:
    assert {style for style, *_ in TRANSCRIPTS} == set(WRITERS) == set(distinct(TOOL_PARSERS))


@pytest.mark.parametrize(
    ("style", "pieces", "arguments"),
    [
        ("mistral", ["[TOOL_CALLS]get_weather[ARGS]", '{"ci', 'ty": "P', 'aris"}'], ["", '{"ci', 'ty": "P', 'aris"}']),
        ("openai", ["<|channel|>x to=f<|message|>", '{"ci', 'ty"'], ["", '{"ci', 'ty"']),
        (
            "pythonic",
            ["[get_weather(ci", "ty='P", "ar\\", "'is', days=1", "2)]"],
            ["", '{"city": "P', "ar", "'is\"", ', "days": 12}'],
        ),
        (
            "qwen3_coder",
            [
                "<function=get_weather>\n<parameter=city>\nP",
                "aris\n",
                "</parameter>\n<par",
                "ameter=days>\n1",
                "2\n</parameter>\n</function>",
            ],
            ['{"city": "P', "aris", "", '"', ', "days": 12}'],
        ),
    ],
)
def test_arguments_go_out_while_they_are_written(style: str, pieces: list[str], arguments: list[str]) -> None:
    parser = TOOL_PARSERS[style].parser(lambda name: "x", TOOLS)
    assert ["".join(call.arguments for call in parser.push(piece)[1]) for piece in pieces] == arguments


def test_ids_are_those_that_the_model_gives() -> None:
    texts = {style: text for style, text, *_ in TRANSCRIPTS if "CALL_ID" in text or style == "kimi_k2"}
    assert [call[0] for call in parsed_calls("mistral", [texts["mistral"]])[1]] == ["id-0", "a1B2c3D4e"]
    assert [call[0] for call in parsed_calls("kimi_k2", [texts["kimi_k2"]])[1]] == [
        "functions.get_weather:0",
        "functions.now:1",
    ]


# Writers.


def _object(name: str, arguments: Arguments) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _qwen(calls: Calls, section: str = "tool_call") -> str:
    def of(name: str, arguments: Arguments) -> str:
        values = "".join(f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"<{section}>\n<function={name}>\n{values}</function>\n</{section}>"

    return "\n".join(itertools.starmap(of, calls))


def _minimax(calls: Calls) -> str:
    def of(name: str, arguments: Arguments) -> str:
        values = "".join(
            f'<parameter name="{key}">\n{_text(value)}\n</parameter>\n' for key, value in arguments.items()
        )
        return f'<invoke name="{name}">\n{values}</invoke>\n'

    return f"<minimax:tool_call>\n{''.join(itertools.starmap(of, calls))}</minimax:tool_call>"


def _glm(calls: Calls) -> str:
    def of(name: str, arguments: Arguments) -> str:
        pairs = (
            f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n" for key, value in arguments.items()
        )
        return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"

    return "\n".join(itertools.starmap(of, calls))


def _backwards(name: str, arguments: Arguments) -> str:
    """Write a call with its name last, after a member that calls do not have."""
    return json.dumps({"arguments": arguments, "id": [{"name": "x"}], "name": name}, ensure_ascii=False)


def _python(calls: Calls) -> str:
    def of(name: str, arguments: Arguments) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    return f"[{', '.join(itertools.starmap(of, calls))}]"


def _marked(section: str, call: str, separator: str, call_end: str, section_end: str) -> Callable[[Calls], str]:
    def write(calls: Calls) -> str:
        written = (f"{call}{name}{separator}{json.dumps(value)}{call_end}" for name, value in calls)
        return section + "".join(written) + section_end

    return write


WRITERS: dict[str, list[Callable[[Calls], str]]] = {
    "hermes": [
        lambda calls: "\n".join(f"<tool_call>\n{_object(*call)}\n</tool_call>" for call in calls),
        lambda calls: "".join(f"<tool_call>{_backwards(*call)} </tool_call>\n" for call in calls),
    ],
    "llama3_json": [
        lambda calls: "<|python_tag|>" + ";".join(_object(*call) for call in calls),
        lambda calls: " \n" + " ;\n".join(_object(*call) for call in calls),
    ],
    "mistral": [
        lambda calls: f"[TOOL_CALLS] [{', '.join(_object(*call) for call in calls)}]",
        lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(value)}" for name, value in calls),
    ],
    "granite": [lambda calls: f"<|tool_call|>[{', '.join(_object(*call) for call in calls)}]"],
    "deepseek_v3": [
        _marked(
            *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n"),
            *("\n```<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        )
    ],
    "deepseek_v31": [
        _marked(
            *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
            *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        )
    ],
    "kimi_k2": [
        _marked(
            *("<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>"),
            *("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        )
    ],
    "llama4_pythonic": [lambda calls: f"<|python_start|>{_python(calls)}<|python_end|>"],
    "pythonic": [lambda calls: f"<|python_start|>{_python(calls)}"],
    "qwen3_coder": [_qwen],
    "seed_oss": [lambda calls: _qwen(calls, "seed:tool_call")],
    "minimax_m2": [_minimax],
    "glm45": [_glm],
    "openai": [_marked("", "<|channel|>commentary to=functions.", "<|constrain|>json<|message|>", "<|call|>", "")],
}
HAS_OBJECTS = {"hermes", "llama3_json", "mistral", "granite"}  # unknown members of a call are dropped
_WORD = st.text("abcdef_", min_size=1, max_size=6)
_TEXT = st.text("ab<>[](){}\"'\\/\né🎉:,=|`", max_size=10)
_VALUE = st.recursive(
    _TEXT
    | st.booleans()
    | st.none()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=5,
)
_CALLS = st.lists(
    st.tuples(_WORD, st.dictionaries(_WORD, _VALUE, max_size=3)), min_size=1, max_size=3, unique_by=lambda call: call[0]
)


def _pieces(text: str, cuts: Sequence[int]) -> list[str]:
    ends = sorted(min(cut, len(text)) for cut in cuts)
    return [text[start:end] for start, end in itertools.pairwise([0, *ends, len(text)])]


@pytest.mark.parametrize("style", WRITERS)
@settings(max_examples=30, deadline=None)
@given(calls=_CALLS, before=st.sampled_from(["", "Let me see.\n", "a < b [c] "]), data=st.data())
def test_calls_are_those_written(style: str, calls: Calls, before: str, data: st.DataObject) -> None:
    write = data.draw(st.sampled_from(WRITERS[style]))
    before = "" if style == "llama3_json" else before
    text = before + write(calls)
    expected = before, [(name, arguments) for name, arguments in calls]
    tools = _tools(calls)
    assert _parse(style, [text], tools) == expected
    assert _parse(style, list(text), tools) == expected
    assert _parse(style, _pieces(text, data.draw(st.lists(st.integers(0, 400), max_size=4))), tools) == expected


@pytest.mark.parametrize("style", WRITERS)
@settings(max_examples=30, deadline=None)
@given(calls=_CALLS, data=st.data())
def test_damaged_calls_lose_nothing(style: str, calls: Calls, data: st.DataObject) -> None:
    """A damaged text loses no mark: each inserted mark is in the content, or in a call.

    The exception is a text that ends in a call: an incomplete next part of it is dropped.
    """
    text = "a " + data.draw(st.sampled_from(WRITERS[style]))(calls) + " b"
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=2, max_size=5)))
    text = text[: places[0]] + "Z".join(_pieces(text[places[1] :], [place - places[1] for place in places[2:]]))
    tools = _tools(calls)
    whole = parsed_calls(style, [text], tools)
    assert parsed_calls(style, list(text), tools) == whole
    assert parsed_calls(style, _pieces(text, data.draw(st.lists(st.integers(0, 400), max_size=4))), tools) == whole
    whole = parsed_calls(style, [text + "\n!"], tools)
    if style not in HAS_OBJECTS | {"openai"}:  # a header's text is not content either
        kept = whole[0] + "".join(name + arguments for _, name, arguments in whole[1])
        assert kept.count("Z") + sum(identity.count("Z") for identity, *_ in whole[1]) >= text.count("Z")
