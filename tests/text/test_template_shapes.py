"""Messages are converted to a chat template's shape; the text equals transformers' byte for byte."""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest

from jaxllm.errors import UserError
from jaxllm.text.chat_template import ChatTemplate, compile_template, render
from jaxllm.text.message_forms import read_json, shaped
from tests.text.conversations import TOOLS, Form, Message, as_transformers, conversation, fitting_form, in_form
from tests.text.template_families import FAMILIES, Family

_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
_PUBLISHED = "CHAT_TEMPLATES"  # environment: a folder of published templates
_TEMPLATES: dict[str, ChatTemplate] = {}


def rendered(source: str, messages: list[Any], tools: list[Message] | None = None) -> str:
    template = _TEMPLATES.get(source) or _TEMPLATES.setdefault(source, compile_template(source, _TOKENS))
    return render(
        template,
        shaped(messages, template.shape, read_json),
        add_generation_prompt=True,
        continue_final_message=False,
        tools=tools,
        variables=_TOKENS,
    )


def form_of(family: Family) -> Form:
    fields = {"listed": False, "arguments": "object", "blank": "missing", "short_ids": False}
    return Form(joined=frozenset(family.joined.split()), thought=family.thought, **(fields | family.more))


def check(source: str, form: Form, seed: int, with_tools: bool) -> bool:
    """Compare one generated conversation, and return whether the template takes it."""
    messages, _ = conversation(Random(seed), with_tools, thoughts=seed % 2 == 0)
    before = json.dumps(messages)
    tools = TOOLS if with_tools else None
    expected = as_transformers(source, in_form(messages, form), tools)
    try:
        assert rendered(source, messages, tools) == expected
    except UserError as error:
        assert expected is None, error
    assert json.dumps(messages) == before
    return expected is not None


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_gets_the_shape_that_it_takes(name: str, seeds: range = range(8)) -> None:
    family = FAMILIES[name]
    taken = sum(check(family.source, form_of(family), seed, family.with_tools) for seed in seeds)
    assert taken >= len(seeds) // 4


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_over_200_conversations(name: str) -> None:
    test_a_family_gets_the_shape_that_it_takes(name, range(200))


@pytest.mark.slow
@pytest.mark.skipif(_PUBLISHED not in os.environ, reason=f"{_PUBLISHED} names no folder of published templates")
def test_published_templates_over_200_conversations() -> None:
    """Each in the form that renders most of some other conversations."""
    differing: dict[str, int] = {}
    for path in sorted(Path(os.environ[_PUBLISHED]).glob("*.jinja")):
        source = path.read_text()
        form = fitting_form(source, range(1000, 1012), with_tools=True)
        for seed in range(200):
            try:
                check(source, form, seed, with_tools=True)
            except AssertionError:
                differing[path.name] = differing.get(path.name, 0) + 1
    assert not differing


def _call(arguments: Any, **more: Any) -> list[Any]:
    function = {"name": "look", "arguments": arguments}
    called = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    return [{"role": "user", "content": "Hi."}, called | more]


@pytest.mark.parametrize(
    ("name", "messages", "expected"),
    [
        ("deepseek_v3", _call('{"a": 1}'), '<call>look\n{"a": 1}'),  # once, the call disappeared
        ("deepseek_v3", _call('{"a": 1}', content=""), '<call>look\n{"a": 1}'),
        ("deepseek_v3.1", _call('{"a":1}'), '<call>look\n{"a":1}<end>'),  # as the client wrote it
        ("deepseek_v3.1", _call({"a": "é"}), '<call>look\n{"a": "é"}<end>'),
        ("seed_oss", _call(""), "<call>look<assistant>"),
        *(("gpt-oss", _call("{}", **{thought: "Hm."}), "<analysis>Hm.") for thought in ("reasoning", "thinking")),
        ("gemma4", _call("{}", reasoning_content="Hm."), "<think>Hm."),
        ("ministral_reasoning", _call("{}", reasoning="Hm."), "[THINK]Hm.[/THINK]"),
        ("step3.5", [{"role": "user", "content": [{"type": "text", "text": word} for word in "ab"]}], "<user>ab<"),
        ("mistral", _call("{}"), '"id": "6b86b273f"'),
        ("qwen3", _call('{"a": "cut o'), 'look{"a": "cut o'),  # accepts texts too
    ],
)
def test_what_was_reported(name: str, messages: list[Any], expected: str) -> None:
    assert expected in rendered(FAMILIES[name].source, messages)


@pytest.mark.parametrize("arguments", ['{"a": "cut o', "[1]", "no JSON", "7"])
def test_arguments_that_a_template_cannot_take_are_named(arguments: str) -> None:
    for name in ("seed_oss", "glm4.5", "minimax_m2"):
        with pytest.raises(UserError) as caught:
            rendered(FAMILIES[name].source, _call(arguments))
        assert str(caught.value).startswith("messages[1].tool_calls[0].function.arguments must be a JSON object")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "messages", "expected"),
    [
        (FAMILIES["phi3"].source, [{"role": "user", "content": "a"}, {"role": "user", "content": 3}],
         "a value in it is not of the kind that the template expects (messages[1]: content is a number)"),
        (FAMILIES["phi3"].source, [{"role": "user"}], "there is no 'content' (messages[0]: content is missing)"),
        (FAMILIES["mistral"].source, [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}],
         "Late. (messages[1])"),
        ("{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments.a + 1 }}{% endfor %}{% endfor %}",
         _call({"a": [1]})[1:],
         "expects (messages[0]: tool_calls[0].function.arguments.a is a list)"),
        ("{{ raise_exception('Never.') }}", [{"role": "user", "content": "a"}], "conversation: Never."),
    ],
)  # fmt: skip
def test_errors_name_the_message_and_the_value(source: str, messages: list[Any], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        rendered(source, messages)
    assert str(caught.value).endswith(expected)
