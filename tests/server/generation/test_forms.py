"""A model's forms of calls and reasoning: selection, template arguments, and the ids of calls."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from jaxllm.errors import UserError
from jaxllm_server.generation.calls import Call, NamedTool
from jaxllm_server.parsers.table import TOOL_PARSERS
from tests.server.generation.test_forced_calls import MESSAGES, TOOLS, FakeEngine, answer, serving

EARLIER = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}],
}


def _engine(said: str, templates: dict[str, str] | None = None) -> FakeEngine:
    engine = FakeEngine()
    engine.said = said
    engine.model.tokenizer.chat_templates = templates or {}
    return engine


def _calls(part: Any) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in part.tool_calls]


def test_auto_goes_by_the_template_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    templates = {"default": "<|im_start|>", "tool_use": "<tool_call></think>"}  # for conversations with tools
    own = serving(
        _engine('<think>So.</think><tool_call>{"name": "now"}', templates),
        tool_call_parser="auto",
        reasoning_parser="auto",
    )
    with caplog.at_level(logging.INFO):
        own.forms.choose()
    assert [record.getMessage() for record in caplog.records] == [
        "tool_call_parser: hermes, by the chat template",
        "reasoning_parser: qwen3, by the chat template",
    ]
    part = answer(own, Call(messages=MESSAGES, tools=TOOLS))
    assert (part.reasoning, part.text, _calls(part), part.finish_reason) == ("So.", "", [("now", "{}")], "tool_calls")


@pytest.mark.parametrize("parameter", ["tool_call_parser", "reasoning_parser"])
def test_auto_without_a_form_for_the_template_is_an_error_that_names_it(parameter: str) -> None:
    for templates in ({}, {"default": "<|im_start|>"}):
        with pytest.raises(UserError, match=f"{parameter}=auto: ") as caught:
            serving(_engine("", templates), **{parameter: "auto"}).forms.choose()
        assert caught.value.parameter == parameter


def test_a_template_of_the_servers_own_goes_first(tmp_path: Any) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("[TOOL_CALLS]")
    own = serving(_engine("", {"default": "<tool_call>"}), tool_call_parser="auto", chat_template=str(template))
    assert own.forms.tool_form is TOOL_PARSERS["mistral"]


def test_a_parser_knows_the_types_of_the_offered_tools() -> None:
    said = "<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n1\n</parameter>\n</function>"
    part = answer(serving(_engine(said), tool_call_parser="qwen3_coder"), Call(messages=MESSAGES, tools=TOOLS))
    assert "".join(call.arguments for call in part.tool_calls) == '{"a": 1, "b": "1"}'


@pytest.mark.parametrize("style", ["hermes", "kimi_k2", "mistral", "openai"])
def test_forced_calls_have_a_form_of_their_own_and_the_ids_of_the_model(style: str) -> None:
    messages = [*MESSAGES, EARLIER]
    for said, choice in (
        ('{"a": 1}', NamedTool("add")),
        ('[{"name": "add", "parameters": {"a": 1}}]', "required"),
    ):
        own = serving(_engine(said), tool_call_parser=style)
        part = answer(own, Call(messages=messages, tools=TOOLS, tool_choice=choice))
        assert (part.text, _calls(part)) == ("", [("add", '{"a": 1}')])
        (call,) = part.tool_calls
        assert call.id is not None
        if style == "kimi_k2":
            assert call.id == "functions.add:1"  # the second of the conversation
        elif style == "mistral":
            assert len(call.id) == 9 and call.id.isalnum()
        else:
            assert call.id.startswith("chatcmpl-tool-")


def test_channels_are_split_into_all_three_and_forced_calls_follow_the_first_one() -> None:
    said = (
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
    )
    options = {"tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"}
    part = answer(serving(_engine(said), **options), Call(messages=MESSAGES, tools=TOOLS))
    assert (part.reasoning, part.text) == ("So.", "Wait.")
    assert "".join(call.arguments for call in part.tool_calls) == '{"a": 1}'
    engine = _engine('<|channel|>analysis<|message|>So.<|end|>{"a": 1}')
    part = answer(serving(engine, **options), Call(messages=MESSAGES, tools=TOOLS, tool_choice=NamedTool("add")))
    assert (part.reasoning, part.text, _calls(part)) == ("So.", "", [("add", '{"a": 1}')])
    (params,) = engine.asked
    assert params.structured_outputs is not None
    assert params.structured_outputs.begin_after == ("<|end|>",)
