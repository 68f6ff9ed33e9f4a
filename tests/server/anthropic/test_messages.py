"""Anthropic's Messages: bodies become calls or errors that name a field; chunks become events or a message."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from jaxllm.errors import OverloadedError, RequestFailedError, UnsupportedError, UserError
from jaxllm_server.anthropic.errors import error_body_of
from jaxllm_server.anthropic.replies import MessagesReply, count_call_of
from jaxllm_server.generation.calls import NamedTool
from jaxllm_server.shared.options import ServerOptions
from jaxllm_server.shared.strict_json import object_of
from tests.support.written_answers import Written, written

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOLS = [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}]
USE = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
HEAD = {"id": "msg_1", "created": 1, "model": "fake"}


def reply(options: ServerOptions | None = None, **body: Any) -> MessagesReply:
    return MessagesReply({"max_tokens": 9, "messages": MESSAGES, **body}, options or ServerOptions(), "r")


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": each, "cache_control": {"type": "ephemeral"}} for each in texts]


def turn(role: str, *content: Any) -> dict[str, Any]:
    return {"role": role, "content": content[0] if len(content) == 1 and isinstance(content[0], str) else [*content]}


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": each} for each in texts]


CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
OF_TOOL = {"role": "tool", "tool_call_id": "1", "name": "add"}


@pytest.mark.parametrize(
    ("messages", "system", "expected"),
    [
        ([turn("user", "Hi")], None, [turn("user", "Hi")]),
        ([turn("user", *text("a", "", "b"))], "s", [turn("system", "s"), {"role": "user", "content": parts("a", "b")}]),
        (
            [turn("user", "a")],
            text("x-anthropic-billing-header: h=1", "s"),
            [turn("system", "s"), turn("user", "a")],
        ),
        ([turn("user", "a"), turn("user", "b")], None, [{"role": "user", "content": parts("a", "b")}]),
        (
            [turn("user", "a"), turn("system", *text("b", "c"))],
            None,
            [turn("user", *parts("a", *(f"<system-reminder>\n{each}\n</system-reminder>" for each in "bc")))],
        ),
        ([turn("system", "s"), turn("user", "")], None, [turn("system", "s"), turn("user", "")]),
        (
            [
                turn("user", "a"),
                turn("assistant", {"type": "thinking", "thinking": "hm", "signature": "x"}, *text("b")),
                turn("assistant", {"type": "redacted_thinking", "data": "x"}),
                turn("user", "c"),
            ],
            None,
            [turn("user", "a"), {**turn("assistant", "b"), "reasoning_content": "hm"}, turn("user", "c")],
        ),
        (
            [turn("assistant", USE), turn("user", {**RESULT, "content": "2"}, *text("and?"))],
            None,
            [CALLED, {**OF_TOOL, "content": "2"}, turn("user", "and?")],
        ),
        (
            [turn("assistant", USE), turn("user", *text("a"), {**RESULT, "content": text("b", "c"), "is_error": True})],
            None,
            [CALLED, turn("user", "a"), {**OF_TOOL, "content": parts("Error: b", "c")}],
        ),
        ([turn("assistant", USE), turn("user", RESULT)], None, [CALLED, {**OF_TOOL, "content": ""}]),
    ],
)
def test_a_conversation_becomes_what_templates_know(messages: Any, system: Any, expected: Any) -> None:
    body = {"messages": messages} if system is None else {"messages": messages, "system": system}
    for call in (reply(**body).calls[0], count_call_of(body)):
        assert call.messages == expected
        assert (call.add_generation_prompt, call.continue_final_message) == (True, False)


def test_a_last_message_of_the_assistant_is_continued() -> None:
    call = reply(messages=[*MESSAGES, turn("assistant", "Once")]).calls[0]
    assert (call.add_generation_prompt, call.continue_final_message) == (False, True)


def test_tools_and_how_they_are_chosen() -> None:
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    for choice, takes_one, expected in (
        ({"type": "auto"}, False, "auto"),
        ({"type": "any", "disable_parallel_tool_use": True}, True, "required"),
        ({"type": "tool", "name": "add"}, False, NamedTool("add")),
        ({"type": "none"}, False, "none"),
        (None, False, None),
    ):
        call = reply(tools=[{**TOOLS[0], "type": "custom", "strict": True}], tool_choice=choice).calls[0]
        assert call.tools == [{"type": "function", "function": function}]
        assert (call.tool_choice, call.takes_one_call) == (expected, takes_one)
    assert reply(tools=[], tool_choice={"type": "auto"}).calls[0].tools is None


def test_sampling_thinking_and_the_form_of_the_output() -> None:
    schema = {"type": "object"}
    call = reply(
        **{"temperature": "hot", "top_k": 3, "top_p": 0.5, "stop_sequences": ["x"], "priority": 2, "cache_salt": "s"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}, "task_budget": {}},
    ).calls[0]
    asked = {"temperature": "hot", "top_k": 3, "top_p": 0.5, "stop": ["x"], "max_tokens": 9}
    assert call.sampling == {**asked, "structured_outputs": {"json": schema}}
    assert (call.priority, call.cache_salt, call.may_fill_context) == (2, "s", True)
    assert call.template_kwargs == {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}
    disabled = reply(thinking={"type": "disabled"}, chat_template_kwargs={"thinking": 1}).calls[0]
    assert disabled.template_kwargs == {"enable_thinking": False, "thinking": 1}
    omitted = reply(thinking={"type": "adaptive", "display": "omitted"}).calls[0]
    assert (omitted.template_kwargs, omitted.include_reasoning) == ({}, False)
    forced = {"tools": TOOLS, "tool_choice": {"type": "any"}}
    assert reply(output_format={"type": "json_schema", "schema": schema}, **forced).calls[0].sampling == {
        "max_tokens": 9
    }


def test_what_agents_send_beside_is_accepted() -> None:
    call = reply(
        metadata={"user_id": "u"},
        service_tier="auto",
        context_management={"edits": [{"type": "clear_thinking_20251015"}]},
        cache_control={"type": "ephemeral"},
        mcp_servers=[],
        container=None,
        inference_geo="eu",
        speed="fast",
    ).calls[0]
    assert call.sampling == {"max_tokens": 9} and not call.template_kwargs


@pytest.mark.parametrize(
    ("body", "parameter", "words"),
    [
        ({"max_tokens": None}, "max_tokens", "max_tokens is missing"),
        ({"max_tokens": "1"}, "max_tokens", "integer"),
        ({"max_tokens": False}, "max_tokens", "integer"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [turn("user", "a")] * 16_385}, "messages", "at most 16384"),
        ({"messages": [turn("user")]}, "messages", "content"),
        ({"messages": [turn("tool", "a")]}, "messages", r"messages\[0\] must have the role"),
        ({"messages": [{"role": "user"}]}, "messages", r"messages\[0\]\.content must be"),
        ({"messages": [turn("user", "a", 5)]}, "messages", r"messages\[0\]\.content\[0\] must be an object"),
        ({"messages": [turn("user", {"type": "text"})]}, "messages", r"content\[0\]\.text must be a string"),
        ({"messages": [turn("user", {"type": "image"})]}, "messages", r"content\[0\]\.source must be an object"),
        ({"messages": [turn("assistant", {"type": "image"})]}, "messages", "block of type 'image'"),
        ({"messages": [turn("user", USE)]}, "messages", "'tool_use'.* text, image and tool_result"),
        ({"messages": [turn("assistant", RESULT)]}, "messages", "'tool_result'.* text, thinking and tool_use"),
        ({"messages": [turn("assistant", {**USE, "input": "x"})]}, "messages", "input must be an object"),
        ({"messages": [turn("assistant", {**USE, "id": 1})]}, "messages", r"\.id must be a string"),
        ({"messages": [turn("assistant", USE)]}, "messages", "end with a tool_use"),
        ({"messages": [turn("user", {**RESULT, "content": [{"type": "document"}]})]}, "messages", "'document'"),
        ({"system": [{"type": "image"}]}, "system", r"system\[0\] is a block of type 'image'"),
        ({"system": 5}, "system", "system must be a string or a list"),
        ({"tools": {}}, "tools", "must be a list"),
        ({"tools": [{"name": "a"}]}, "tools", r"tools\[0\]\.input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools", r"tools\[0\]\.name must be a string"),
        ({"tools": [{**TOOLS[0], "type": "web_search_20250305"}]}, "tools", "'web_search_20250305'"),
        ({"tool_choice": "auto"}, "tool_choice", "auto, any, tool or none"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice", "needs the name"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "tool_choice", "disable_parallel"),
        ({"stop_sequences": "x"}, "stop_sequences", "list of strings"),
        ({"thinking": {"budget_tokens": 5}}, "thinking", "thinking.type"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config", "json_schema"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "not supported"),
        ({"container": "c"}, "container", "not supported"),
        ({"stream": 1}, "stream", "true or false"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], parameter: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        reply(**body)
    assert caught.value.parameter == parameter and len(str(caught.value)) < 200
    if "is a block of" in words or "not supported" in words:
        assert isinstance(caught.value, UnsupportedError)


# Answers.


def stream_of(answer: Written, random: Random, **body: Any) -> list[dict[str, Any]]:
    own = reply(**body)
    own.begin(HEAD)
    return [event for chunk in answer.chunks(random) for event in own.events(0, chunk)] + own.last_events()


def whole_of(answer: Written, **body: Any) -> dict[str, Any]:
    own = reply(**body)
    own.begin(HEAD)
    return own.response(answer.chunks(None))


def read(events: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Check a stream's order; return its blocks, with arguments as text, and its last delta."""
    first, ping, *middle, last, stop = events
    assert (first["type"], ping, stop) == ("message_start", {"type": "ping"}, {"type": "message_stop"})
    assert first["message"]["content"] == [] and first["message"]["stop_reason"] is None
    assert last["type"] == "message_delta"
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in middle:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(blocks)
                blocks.append({**event["content_block"], "arguments": "", "is_signed": False})
                is_open = True
            case "content_block_delta":
                assert is_open and event["index"] == len(blocks) - 1 and not blocks[-1]["is_signed"]
                name, value = next((key, own) for key, own in event["delta"].items() if key != "type")
                assert value, "an empty delta says nothing"
                name = "arguments" if name == "partial_json" else name
                blocks[-1][name] += value
                blocks[-1]["is_signed"] = name == "signature"
            case "content_block_stop":
                assert is_open and event["index"] == len(blocks) - 1
                assert blocks[-1]["is_signed"] == (blocks[-1]["type"] == "thinking")
                is_open = False
            case other:
                raise AssertionError(other)
    assert not is_open
    return blocks, last


def joined(blocks: list[dict[str, Any]], kind: str) -> str:
    return "".join(block[kind] for block in blocks if block["type"] == kind)


@pytest.mark.parametrize("seeds", [range(start, start + 50) for start in range(0, 200, 50)])
def test_deltas_are_the_whole_answer_wherever_it_is_cut(seeds: range) -> None:
    for seed in seeds:
        answer = written(seed)
        blocks, last = read(stream_of(answer, Random(seed)))
        message = whole_of(answer)
        json.dumps(message, allow_nan=False)
        assert joined(blocks, "text") == joined(message["content"], "text") == answer.text
        assert joined(blocks, "thinking") == joined(message["content"], "thinking") == answer.reasoning
        calls = [block for block in blocks if block["type"] == "tool_use"]
        uses = [block for block in message["content"] if block["type"] == "tool_use"]
        assert [(block["name"], block["arguments"]) for block in calls] == [call[1:] for call in answer.calls]
        assert [block["id"] for block in calls] == [block["id"] for block in uses]
        assert [block["id"] for block in uses] == [f"toolu_{number}" for number, _, _ in answer.calls]
        for block, use in zip(calls, uses, strict=True):
            told = object_of(block["arguments"], 64)
            assert use["input"] == ({"INVALID_JSON": block["arguments"]} if told is None else told)
        assert {name: message[name] for name in last["delta"]} == last["delta"]
        is_stop_string = isinstance(answer.stop, str) and answer.finish == "stop"
        assert last["delta"] == {
            "stop_reason": {
                "stop": "stop_sequence" if is_stop_string else "end_turn",
                "tool_calls": "tool_use",
                "context": "model_context_window_exceeded",
            }.get(answer.finish, "max_tokens"),
            "stop_sequence": answer.stop if is_stop_string else None,
        }
        assert last["usage"].keys() == {"input_tokens", "output_tokens"}


def test_blocks_are_in_the_order_in_which_they_were_written() -> None:
    turns: list[Any] = ["a", (0, "add", '{"a": 1}'), "b", (1, "look", "{}"), "c"]
    for seed in range(50):
        random = None if seed == 0 else Random(seed)
        own = reply(stream=True)
        own.begin(HEAD)
        chunks = Written("r", turns, "tool_calls", None).chunks(random)
        blocks, _ = read([event for chunk in chunks for event in own.events(0, chunk)] + own.last_events())
        kinds = [block["type"] for block in blocks]
        assert kinds[0] == "thinking" and kinds.count("tool_use") == 2
        whole = [block["name"] for block in blocks if block["type"] == "tool_use"]
        assert whole == ["add", "look"]


def test_one_call_is_shown_where_no_two_are_taken() -> None:
    answer = Written("", [(0, "add", "{}"), (1, "look", "{}")], "tool_calls", None)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = whole_of(answer, tools=TOOLS, tool_choice=choice)
    assert [(block["name"], block["input"]) for block in message["content"]] == [("add", {})]
    assert message["stop_reason"] == "tool_use"


def test_usage_tells_what_the_server_is_allowed_to() -> None:
    answer = Written("", ["a"], "stop", None)
    options = ServerOptions(enable_prompt_tokens_details=True, reasoning_parser="qwen3")
    usage = whole_of(answer, options=options)["usage"]
    assert usage == {
        **{"input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 1},
        "output_tokens_details": {"thinking_tokens": 0},
    }


def test_no_tokens_at_all_fill_the_cache_and_show_nothing() -> None:
    call = reply(max_tokens=0).calls[0]
    assert call.scores_prompt and "max_tokens" not in call.sampling
    answer = Written("", ["a"], "length", None)
    blocks, last = read(stream_of(answer, Random(0), max_tokens=0))
    message = whole_of(answer, max_tokens=0)
    assert (blocks, message["content"], message["stop_reason"]) == ([], [], "max_tokens")
    assert last["usage"]["output_tokens"] == message["usage"]["output_tokens"] == 0


def test_errors_in_anthropics_form() -> None:
    error = error_body_of(UserError("must be at least 1.", "top_k"), "r")
    assert error["error"] == {"type": "invalid_request_error", "message": "top_k: must be at least 1."}
    threads = error_body_of(UnsupportedError("thread is not supported by jaxllm yet.", "thread"), "r")
    assert threads["error"]["details"]["error_code"] == "thread_unsupported_request"
    assert error_body_of(OverloadedError("full", 2.0), "r")["error"]["type"] == "rate_limit_error"
    assert error_body_of(RequestFailedError("NaN"), "r")["error"]["type"] == "api_error"
    (event,) = reply().failure(RuntimeError("/home/me"))
    assert (event["type"], event["request_id"]) == ("error", "r") and "/home" not in json.dumps(event)
