"""Constraints of forced calls, and the start of constraints after reasoning."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from jaxllm.config import EngineConfig
from jaxllm.errors import FeatureDisabledError, UnsupportedError, UserError
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.chat_template import compile_template
from jaxllm_server.generation.calls import Call, NamedTool, Part
from jaxllm_server.generation.forced_calls import blaming_tools, list_of_calls, parameters_of, with_forced_calls
from jaxllm_server.parsers.table import REASONING_PARSERS
from jaxllm_server.serving import Serving
from jaxllm_server.shared.options import ServerOptions
from tests.support.naive import Unread

EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

MESSAGES = [{"role": "user", "content": "a"}]


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


TOOLS = [tool("add", parameters=NUMBER), tool("now")]


class FakeEngine:
    """Renders every conversation as `text`, records requests, and answers with `said`."""

    def __init__(self, text: str = "") -> None:
        self.config = EngineConfig(model="m")
        self.asked: list[SamplingParams] = []
        self.text, self.said = text, '{"a": 1}'
        tokenizer = SimpleNamespace(
            confined=None,
            has_chat_template=True,
            check_length=lambda *_: None,
            encode_chat=lambda *_, **__: (self.text, [1]),
            template_shape=lambda *_: compile_template("").shape,
            encode=lambda *_: [1],
            is_special=lambda text: False,
            token_id=lambda text: None,
        )
        self.model = SimpleNamespace(
            pooler=None,
            processor=None,
            sources=None,
            tokenizer=tokenizer,
            vocab_size=9,
            max_model_len=64,
            generation_config={},
            default_params=SamplingParams(temperature=0.5),
        )

    async def check_health(self) -> None:
        pass

    def preparing(self, count: int) -> Any:
        return nullcontext()

    async def off_loop(self, function: Any, *arguments: Any, client: str, language: bytes | None) -> Any:
        return function(*arguments)

    async def generate(self, prompt: Any, params: SamplingParams, *_: Any, **__: Any) -> Any:
        self.asked.append(params)
        output = CompletionOutput(index=0, text=self.said, token_ids=[5], finish_reason="stop")
        yield RequestOutput("r", None, [1], [output], finished=True)


def serving(engine: FakeEngine | None = None, **options: Any) -> Serving:
    fake: Any = engine or FakeEngine()
    return Serving(fake, ServerOptions(**options))


def answer(own: Serving, call: Call) -> Part:
    async def ask() -> Part:
        (chunk,) = [chunk async for chunk in own.generate(call)]
        return chunk.outputs[0]

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("parameters", "schema"),
    [
        (None, EMPTY),
        ({}, EMPTY),
        (NUMBER, NUMBER),
        ({"properties": {}}, {"type": "object", "properties": {}}),
        ({"$ref": "#/$defs/A", "$defs": {"A": NUMBER}}, {"$ref": "#/$defs/A", "$defs": {"A": NUMBER}}),
        ({"anyOf": [NUMBER]}, {"anyOf": [NUMBER]}),
    ],
)
def test_arguments_are_an_object_and_those_of_nothing_are_empty(parameters: Any, schema: Any) -> None:
    assert parameters_of(parameters) == schema


def test_a_list_names_each_tool_with_its_own_parameters() -> None:
    schema = list_of_calls([("add", NUMBER), ("now", None)], is_single=False)
    assert (schema["type"], schema["minItems"], "maxItems" in schema) == ("array", 1, False)
    names = [kind["properties"]["name"]["const"] for kind in schema["items"]["anyOf"]]
    own = [schema["$defs"][kind["properties"]["parameters"]["$ref"][8:]] for kind in schema["items"]["anyOf"]]
    assert list(zip(names, own, strict=True)) == [("add", NUMBER), ("now", EMPTY)]
    assert all(
        kind["required"] == list(kind["properties"]) == ["name", "parameters"] for kind in schema["items"]["anyOf"]
    )
    assert list_of_calls([("add", NUMBER)], is_single=True)["maxItems"] == 1


def test_references_hold_and_two_tools_may_use_one_name() -> None:
    first = {
        "type": "object",
        "properties": {"$ref": {"type": "string"}, "a": {"$ref": "#/$defs/X"}, "b": {"items": [{"$ref": "#"}]}},
        "enum": [{"$ref": "#/$defs/X"}],
        "$defs": {"X": {"anyOf": [{"$ref": "#/$defs/X"}, {"$ref": "http://x/y"}]}},
    }
    second = {"type": "object", "properties": {"a": {"$ref": "#/definitions/X"}}, "definitions": {"X": {}}}
    one, two = list_of_calls([("f", first), ("g", second)], is_single=False)["$defs"].values()
    assert one == {
        "type": "object",
        "properties": {
            "$ref": {"type": "string"},
            "a": {"$ref": "#/$defs/0/$defs/X"},
            "b": {"items": [{"$ref": "#/$defs/0"}]},
        },
        "enum": [{"$ref": "#/$defs/X"}],
        "$defs": {"X": {"anyOf": [{"$ref": "#/$defs/0/$defs/X"}, {"$ref": "http://x/y"}]}},
    }
    assert two["properties"] == {"a": {"$ref": "#/$defs/1/definitions/X"}}


def test_a_call_gets_the_constraint_of_its_choice() -> None:
    own = serving()
    named = own.params_of(Call(tools=TOOLS, tool_choice=NamedTool("add"))).structured_outputs
    required = own.params_of(Call(tools=TOOLS, tool_choice="required", takes_one_call=True)).structured_outputs
    assert named == SamplingParams(structured_outputs={"json": NUMBER}).structured_outputs
    listed = list_of_calls([("add", NUMBER), ("now", None)], is_single=True)
    assert required == SamplingParams(structured_outputs={"json": listed}).structured_outputs
    for choice in (None, "auto", "none"):
        assert own.params_of(Call(tools=TOOLS, tool_choice=choice)).structured_outputs is None


@pytest.mark.parametrize(
    ("call", "parameter"),
    [
        (Call(tool_choice="required"), "tool_choice"),
        (Call(tools=TOOLS, tool_choice=NamedTool("sub")), "tool_choice"),
        (Call(tools=TOOLS, tool_choice="required", sampling={"structured_outputs": {"regex": "a"}}), "tool_choice"),
        (Call(tools=[tool("add", parameters=[])], tool_choice="required"), "tools"),
        (Call(tools=[{}], tool_choice="required"), "tools"),
        (Call(tools=[tool("a")] * 129, tool_choice="required"), "tools"),
        (Call(tools=[tool("add", parameters={"a": "x" * 2**18})], tool_choice=NamedTool("add")), "tools"),
        (Call(tools=[tool("add", parameters={"a": Unread([0] * 2**19)})], tool_choice="required"), "tools"),
    ],
)
def test_what_cannot_be_forced_is_refused_by_name(call: Call, parameter: str) -> None:
    with pytest.raises(UserError) as caught:
        serving().params_of(call)
    assert caught.value.parameter == parameter


def test_an_error_of_the_calls_form_names_the_tools() -> None:
    for choice, parameter in (("required", "tools"), (NamedTool("add"), "tools"), ("auto", "structured_outputs")):
        for kind in (UserError, UnsupportedError):
            with pytest.raises(kind, match="not") as caught, blaming_tools(Call(tools=TOOLS, tool_choice=choice)):
                raise kind("patternProperties is not supported.", "structured_outputs")
            assert caught.value.parameter == parameter
    with pytest.raises(UserError) as caught, blaming_tools(Call(tools=TOOLS, tool_choice="required")):
        raise UserError("no", "n")
    assert caught.value.parameter == "n"


def test_forced_calls_need_no_parser_and_their_text() -> None:
    for choice, calls in ((NamedTool("add"), [("add", '{"a": 1}')]), ("required", [])):
        call = Call(messages=MESSAGES, tools=TOOLS, tool_choice=choice)
        part = answer(serving(), call)
        assert [(each.name, each.arguments) for each in part.tool_calls] == calls
        with pytest.raises(UserError) as caught:
            answer(serving(), replace(call, sampling={"detokenize": False}))
        assert caught.value.parameter == "detokenize"
    with pytest.raises(FeatureDisabledError):
        answer(serving(), Call(messages=MESSAGES, tools=TOOLS, tool_choice="auto"))


def test_constraints_are_merged_with_what_else_was_given() -> None:
    given = {"temperature": 0.0, "n": 1}
    merged = with_forced_calls(Call(tools=TOOLS, tool_choice="required"), given)
    assert merged.keys() == {"temperature", "n", "structured_outputs"} and given == {"temperature": 0.0, "n": 1}


@pytest.mark.parametrize(
    ("style", "prompt", "is_switched_off", "may_reason"),
    [
        ("qwen3", "<|im_start|>assistant\n", False, True),  # the model opens the reasoning
        ("qwen3", "<|im_start|>assistant\n", True, False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", False, True),
        ("qwen3", "<|im_start|>assistant\n<think>\n", True, True),  # the template overrides the request
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False, False),
        ("deepseek_r1", "<｜Assistant｜>", False, True),
        ("deepseek_r1", "<｜Assistant｜>", True, True),  # everything before the tag is reasoning, even if switched off
        ("deepseek_r1", "<｜Assistant｜><think>\n", False, True),
        ("deepseek_r1", "<｜Assistant｜></think>", False, False),
        ("deepseek_v3", "<｜Assistant｜><think>", False, True),
        ("deepseek_v3", "<｜Assistant｜>", False, False),
        ("mistral", "Think in [THINK] and [/THINK].[INST]a[/INST]", False, True),
        ("mistral", "[INST]a[/INST]", False, False),
        ("openai_gptoss", "<|start|>assistant", True, True),  # answers without reasoning have a header too
        ("granite", "Begin with 'Here is my thought process:'", False, True),
    ],
)
def test_where_the_form_of_an_answer_begins_is_where_its_content_does(
    style: str, prompt: str, is_switched_off: bool, may_reason: bool
) -> None:
    assert REASONING_PARSERS[style].form.may_reason(prompt, is_switched_off) is may_reason
    engine = FakeEngine(prompt)
    own = serving(engine, reasoning_parser=style)
    call = Call(
        messages=MESSAGES,
        template_kwargs={"enable_thinking": not is_switched_off},
        sampling={"structured_outputs": {"json": NUMBER}},
    )
    part = answer(own, call)
    answer(own, Call(prompt="a", sampling=call.sampling))
    assert [params.structured_outputs.begin_after for params in engine.asked if params.structured_outputs] == [
        REASONING_PARSERS[style].form.begin_after(is_forced=False) if may_reason else None,
        None,  # plain texts have no reasoning
    ]
    if not may_reason:  # everything is content
        assert (part.text, part.reasoning) == (engine.said, "")


def test_a_prompt_that_closes_the_reasoning_leaves_none_to_deepseek() -> None:
    form = REASONING_PARSERS["deepseek_r1"].form
    assert form.parser("</think>").push("a") == ("", "a")
    assert form.parser("").push("a") == ("a", "")
