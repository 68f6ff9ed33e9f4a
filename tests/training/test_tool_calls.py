"""The training text of the adapter "tools" contains no held-out calls; and its chat template."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import pytest

from jaxllm.text.chat_template import compile_template, render
from jaxllm.text.message_forms import read_json, shaped
from training import corpus, tool_calls
from training.tool_calls import draw_turn

TEMPLATE = compile_template(tool_calls.CHAT_TEMPLATE)
CALL = re.compile(r'<tool_call>\{"name": "(\w+)", "arguments": (\{.*?\})\}</tool_call>')


def rendered(messages: list[Any], tools: list[Any] | None = None, template: Any = TEMPLATE, ends: bool = True) -> str:
    messages = shaped(messages, template.shape, read_json)
    return render(
        template, messages, add_generation_prompt=not ends, continue_final_message=False, tools=tools, variables={}
    )


def test_what_is_held_out_is_never_asked_in_training_and_always_in_the_evaluation() -> None:
    rng = random.Random(0)
    for tool in tool_calls.TOOLS:
        held_out = {tool_calls.draw_held_out(rng, tool) for _ in range(1000)}
        questions = {phrasing.format(*arguments) for phrasing, arguments in held_out}
        asked = {(turn.question, *turn.arguments.values()) for turn in (draw_turn(rng, tool) for _ in range(3000))}
        assert len(asked) > 500 and not questions & {question for question, *_ in asked}
        assert all(str(value) in question for question, *values in asked for value in values), "they are copied"
        if tool is tool_calls.ADD:
            assert not {frozenset(arguments) for _, arguments in held_out} & {frozenset(own[1:]) for own in asked}
        else:
            assert {city for _, (city,) in held_out} <= {city for _, city in asked}, "each in another phrasing"


def test_documents_hold_their_calls_as_the_model_is_to_write_them() -> None:
    first, again, other = (list(itertools.islice(tool_calls.documents(random.Random(s), 3), 200)) for s in (1, 1, 2))
    assert first == again != other
    calls = [call for text in first for call in CALL.finditer(text)]
    assert len(calls) == sum(text.count("<tool_call>") for text in first) > 100
    for call in calls:
        assert tool_calls.call_text(call[1], json.loads(call[2])) == call[0]


def test_without_tools_the_template_is_the_models_own() -> None:
    own = compile_template(corpus.CHAT_TEMPLATE)
    for seed in range(50):
        messages = corpus.conversation(random.Random(seed), 4)
        for ends in (True, False):
            for none in (None, []):
                assert rendered(messages, none, ends=ends) == rendered(messages, None, own, ends)


@pytest.mark.parametrize(
    ("parameters", "line"),
    [
        ({"properties": {"a": {"type": "integer", "description": "long " * 500}, "b": {}}}, "f(a: integer, b: any)"),
        ({"properties": {"a": {"type": ["string", "null"]}, "items": True}}, "f(a: any, items: any)"),
        ({"type": "object"}, "f()"),
        (None, "f()"),
    ],
)
def test_a_tool_is_one_line_whatever_its_schema_says(parameters: Any, line: str) -> None:
    function = {"name": "f", "description": "long " * 500} | ({} if parameters is None else {"parameters": parameters})
    tools = [{"type": "function", "function": function}, tool_calls.ADD.schema("long " * 500)]
    text = rendered([{"role": "user", "content": "Hi"}], tools, ends=False)
    lines = f"<|im_start|>system\nTools:\n{line}\nadd(a: integer, b: integer)<|im_end|>\n"
    assert text == f"{lines}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_calls_that_clients_send_back_are_written_alike() -> None:
    """Calls without content, with arguments as an object or as invalid JSON, and two in one message."""
    call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    broken = {"type": "function", "function": {"name": "add", "arguments": "{1"}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call, broken]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "3"}]},
        {"role": "assistant", "content": "So.", "tool_calls": [call]},
    ]
    whole = tool_calls.call_text("add", {"a": 1, "b": 2})
    cut = '<tool_call>{"name": "add", "arguments": {1}</tool_call>'
    assert rendered(messages) == (
        f"<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n{whole}{cut}<|im_end|>\n"
        f"<|im_start|>tool\n<tool_response> 3 </tool_response><|im_end|>\n<|im_start|>assistant\nSo.{whole}<|im_end|>\n"
    )
