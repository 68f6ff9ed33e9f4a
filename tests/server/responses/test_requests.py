"""Bodies of `/v1/responses` become calls, or errors that name a field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import FeatureDisabledError, UnsupportedError, UserError
from jaxllm_server.generation.calls import Call, Chunk, NamedTool, Part, TokenUsage
from jaxllm_server.responses.items import (
    MOST_PARTS,
    has_media,
    items_of,
    messages_of,
    num_characters,
    references_of,
    response_id_of,
)
from jaxllm_server.responses.reply import FIELDS as KNOWN
from jaxllm_server.responses.reply import REPEATED_NUMBERS, ResponseReply
from jaxllm_server.shared.options import ServerOptions

NUMBERS = dict.fromkeys(REPEATED_NUMBERS, 1.0)
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
OTHER = {"type": "function", "name": "sub", "description": "takes away"}
CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
VIDEO = {"type": "input_video", "video_url": "data:video/mp4;base64,AAAA"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
PERSON = {"type": "json_schema", "name": "person", "schema": {"type": "object"}, "strict": True}


def reply(asked: Any = "Hi", options: ServerOptions | None = None, **body: Any) -> ResponseReply:
    return ResponseReply({"input": asked, **body}, options or ServerOptions(), "r1")


def call(asked: Any = "Hi", **body: Any) -> Call:
    return reply(asked, **body).calls[0]


def messages(*items: Any) -> list[dict[str, Any]]:
    return messages_of(items_of(list(items), "r1"))


def test_items_become_a_chat() -> None:
    chat = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert messages(
        {"role": "developer", "content": "Be short."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So:"}], "status": None},
        CALL,
        {**CALL, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "sum"}], "encrypted_content": "x"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "assistant", "content": ""},
        CALL,
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    ) == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "1?"},
        {
            "role": "assistant",
            "content": "So:",
            "reasoning_content": "hm",
            "tool_calls": [chat, {**chat, "id": "c2"}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "assistant", "content": "No.", "reasoning_content": "sum"},
        {"role": "assistant", "content": "", "tool_calls": [chat]},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]


@pytest.mark.parametrize(
    ("given", "stored"), [({**IMAGE, "detail": None}, {**IMAGE, "detail": "auto", "file_id": None}), (VIDEO, VIDEO)]
)
def test_an_image_or_video_becomes_a_part_that_is_named_after_its_item(given: Any, stored: dict[str, Any]) -> None:
    items = items_of(
        [
            {"role": "user", "content": [given, {"type": "input_text", "text": "a"}]},
            CALL,
            {"type": "function_call_output", "call_id": "c1", "output": [given]},
        ],
        "r1",
    )
    assert items[0]["content"][0] == stored
    name = f"{stored['type'].removeprefix('input_')}_url"
    part = {"type": name, name: given[name]}
    for num_before, paths in (
        (0, ["input[0].content[0]", "input[2].output[0]"]),
        (1, ["the stored item msg_r1_in0.content[0]", "input[1].output[0]"]),
    ):
        user, _, tool = messages_of(items, num_before)
        assert user["content"] == [part, {"type": "text", "text": "a"}] and tool["content"] == [part]
        assert [each.path for each in (user["content"][0], tool["content"][0])] == paths
    assert num_characters(items) == 2 * len(given[name]) + 1 + len(CALL["arguments"])
    assert has_media(items) and not has_media(items_of("Hi", "r1"))


def test_an_item_is_found_by_its_id_and_a_reference_is_replaced() -> None:
    kept = items_of("Hi", "a_b")[0]
    assert response_id_of(kept["id"]) == "resp_a_b"
    for reference in ({"type": "item_reference", "id": kept["id"]}, {"id": kept["id"]}):
        assert references_of([reference, {"role": "user", "content": "a"}]) == {kept["id"]}
        assert items_of([reference], "r2", {kept["id"]: kept}) == [kept]
        with pytest.raises(UserError, match="referenced twice"):  # few bytes must not copy an item repeatedly
            items_of([reference] * 2, "r2", {kept["id"]: kept})
    for id_without_parts in ("", "msg", "msg_", "_"):
        assert response_id_of(id_without_parts) == "resp_"


def test_an_answer_that_was_cut_off_goes_on() -> None:
    cut = {"type": "message", "role": "assistant", "content": "Once", "status": "incomplete"}
    own = call([{"role": "user", "content": "Hi"}, cut])
    assert (own.add_generation_prompt, own.continue_final_message) == (False, True)
    own = call([cut, {"role": "user", "content": "Go on."}])
    assert (own.add_generation_prompt, own.continue_final_message) == (True, False)


def test_fields_become_a_call() -> None:
    own = call(
        instructions="Be short.",
        max_output_tokens=7,
        temperature=0.5,
        top_k=3,
        stop=["x"],
        reasoning={"effort": "low", "summary": "auto"},
        text={"format": PERSON, "verbosity": "low"},
        include=["reasoning.encrypted_content"],
        truncation="auto",
        stream=True,
        tools=[TOOL, OTHER],
        tool_choice={"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "sub"}]},
        parallel_tool_calls=False,
        previous_response_id=None,
    )
    assert own.messages == [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    assert own.sampling == {
        **{"temperature": 0.5, "top_k": 3, "stop": ["x"], "max_tokens": 7, "truncate_prompt_tokens": -1}
    }, "the calls' form goes before the text's"
    assert own.tools == [{"type": "function", "function": {"name": "sub", "description": "takes away"}}]
    assert (own.tool_choice, own.takes_one_call, own.stream) == ("required", True, True)
    assert own.template_kwargs == {"reasoning_effort": "low", "enable_thinking": True}
    assert call(text={"format": PERSON}).sampling == {"structured_outputs": {"json": {"type": "object"}}}
    assert call(text={"format": {"type": "json_object"}}).sampling == {"structured_outputs": {"json_object": True}}
    assert call(text={"format": {"type": "text"}}, tools=[], tool_choice="auto").sampling == {}
    assert call(tools=[TOOL], tool_choice={"type": "function", "name": "add"}).tool_choice == NamedTool("add")
    assert call(top_logprobs=2).sampling == {"logprobs": 2}
    assert call(include=["message.output_text.logprobs"]).sampling == {"logprobs": 0}
    assert call(background=True).stream and not call(background=True, stream=False).tools


INPUTS: list[tuple[Any, str]] = [
    (3, "input must be a text or a list"),
    ([], "at least one item"),
    (["Hi"], "input[0] must be an object"),
    ([{"role": "tool", "content": ""}], "input[0].role"),
    ([{"role": "user"}], "input[0].content must be a text or a list of parts"),
    ([{"role": "user", "content": [{"text": 3}]}], "input[0].content[0] must be a part"),
    ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].image_url must be a text"),
    ([{"role": "user", "content": [{**IMAGE, "detail": 7}]}], "input[0].content[0].detail must be one of"),
    ([{"role": "user", "content": [{**IMAGE, "file_id": "a"}]}], "input[0].content[0].file_id: files are not stored"),
    ([{"role": "user", "content": [{"type": "input_file"}]}], "input[0].content[0]: input_file is not supported"),
    ([{"role": "user", "content": [{"type": "input_video"}]}], "input[0].content[0].video_url must be a text"),
    ([{"role": "user", "content": [{**VIDEO, "file_id": "a"}]}], "file_id: files are not stored here; give video_url"),
    ([{"role": "user", "content": [{"type": "video_url"}]}], "input[0].content[0]: video_url is a part of chat"),
    ([{"role": "user", "content": [{"type": ["input_video"]}]}], "input[0].content[0] must be a part"),
    ([{"role": "assistant", "content": [VIDEO]}], "input[0].content[0]: a video is accepted in messages and outputs"),
    ([{"role": "assistant", "content": [IMAGE]}], "input[0].content[0]: an image is accepted in messages and outputs"),
    ([{"type": "reasoning", "summary": [IMAGE]}], "input[0].summary[0]: an image is accepted"),
    ([{"role": "user", "content": "", "status": "done"}], "input[0].status"),
    ([{"role": "user", "content": "", "id": 3}], "input[0].id"),
    ([{"type": "web_search_call", "id": "a"}], "input[0] is of type 'web_search_call'"),
    ([{"type": ["message"]}], "input[0] is of type"),
    ([{**CALL, "arguments": {}}], "input[0].arguments must be a string"),
    ([{"type": "function_call_output", "call_id": "c", "output": None}], "input[0].output"),
    ([{"type": "reasoning", "summary": [], "encrypted_content": "x"}], "input[0].encrypted_content"),
    ([{"type": "function_call_output", "call_id": "c", "output": ""}], "No tool call found"),
    ([{"type": "function_call_output", "call_id": "c1", "output": ""}, CALL], "No tool call found"),
    ([{"role": "assistant", "content": "", "phase": "thought"}], "input[0].phase"),
    ([{"type": "item_reference", "id": "msg_other_0"}], "'msg_other_0' is not stored"),
    ([{"role": "user", "content": ""}] * (MOST_PARTS + 1), f"at most {MOST_PARTS} items"),
    ([{"role": "user", "content": [{"type": "input_text", "text": ""}] * MOST_PARTS}], f"at most {MOST_PARTS} items"),
]


@pytest.mark.parametrize(("asked", "message"), INPUTS, ids=lambda value: str(value)[:40])
def test_inputs_are_refused_by_what_is_wrong(asked: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        reply(asked)
    assert caught.value.parameter == "input" and message in str(caught.value)


FIELDS: list[tuple[str, Any, str]] = [
    ("max_tokens", 3, "it is max_output_tokens"),
    ("response_format", {}, "it is text.format"),
    ("n", 2, "not a field"),
    ("prompt", {"id": "p"}, "not supported"),
    ("conversation", "c", "not supported"),
    ("previous_response_id", 3, "must be a string"),
    ("tools", [{"type": "web_search"}], "'web_search' are not supported"),
    ("tools", [{"type": "function", "function": {"name": "add"}}], "has no name"),
    ("tools", [{**TOOL, "parameters": []}], "tools[0].parameters"),
    ("tools", [3], "tools[0] must be an object"),
    ("tools", {}, "must be a list"),
    ("tools", [TOOL] * 129, "at most 128 tools, got 129"),
    ("tool_choice", "required", "needs tools"),
    ("tool_choice", "any", "must be none, auto"),
    ("tool_choice", {"type": "web_search"}, "must name a function"),
    ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": []}, "allowed_tools"),
    ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": [TOOL]}, "'add', which is not in tools"),
    ("text", {"form": {}}, "text has no 'form'"),
    ("text", {"verbosity": "most"}, "text.verbosity"),
    ("text", {"format": {"type": "json_schema", "json_schema": PERSON}}, "needs a name and a schema"),
    ("text", {"format": {**PERSON, "extra": 1}}, "no 'extra'"),
    ("text", {"format": {"type": "grammar"}}, "must be an object of type"),
    ("reasoning", {"effort": "most"}, "reasoning.effort"),
    ("reasoning", {"budget": 3}, "reasoning has no 'budget'"),
    ("include", ["everything"], "include must be"),
    ("top_logprobs", True, "must be an integer"),
    ("truncation", "last", "truncation must be"),
    ("metadata", {"a": 3}, "metadata may have"),
    ("stream_options", {"include_obfuscation": True}, "needs stream"),
    ("store", "yes", "must be true or false"),
    ("max_tool_calls", 1.5, "must be an integer"),
    ("request_id", "x" * 129, "at most 128 characters"),  # it is part of every item's id
    ("user", "x" * 513, "at most 512 characters"),  # repeated by each response, not part of the prompt
    ("prompt_cache_key", "x" * 513, "at most 512 characters"),
]


@pytest.mark.parametrize(("name", "value", "message"), FIELDS, ids=str)
def test_fields_are_refused_by_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        reply(**{name: value})
    assert caught.value.parameter == name and message in str(caught.value)


def test_fields_of_other_servers_are_ignored_and_those_of_templates_reach_it() -> None:
    own = reply(typical_p=0.5, enable_thinking=False, messages=None)
    assert own.ignored == ["typical_p"] and own.calls[0].template_kwargs["enable_thinking"] is False
    assert own.calls[0].may_fill_context
    with pytest.raises(UserError):
        reply(typical_p=0.5, options=ServerOptions(unknown_fields="refuse"))


def test_a_choice_of_tools_is_repeated_as_it_was_read() -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}
    for choice in ("auto", {"type": "function", "name": "add"}, allowed):
        given = choice if isinstance(choice, str) else {**choice, "more": "x" * 1000}
        own = reply(tools=[TOOL], tool_choice=given)
        own.begin({"id": "resp_r", "created": 1, "model": "m", **NUMBERS, "clock": lambda: 7.5})
        assert own.snapshot()["tool_choice"] == choice


# The fields that Open Responses' schema requires of a response; null is allowed.
REQUIRED = (
    "id object created_at completed_at status incomplete_details model previous_response_id instructions output error "
    "tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty top_logprobs "
    "temperature reasoning usage max_output_tokens max_tool_calls store background service_tier metadata "
    "safety_identifier prompt_cache_key"
).split()


@pytest.mark.parametrize(("finish", "completed_at"), [("stop", 7), ("length", None), (None, None)])
def test_a_response_has_every_field(finish: str | None, completed_at: int | None) -> None:
    own = reply()
    own.begin({"id": "resp_r", "created": 1, "model": "m", **NUMBERS, "clock": lambda: 7.5})
    part = Part(0, "A", "", [], [1], None, finish, None, None, 0)
    own.events(0, Chunk("r1", [part], None, TokenUsage(), None, finish is not None))
    found = own.snapshot()
    assert set(REQUIRED) <= found.keys()
    assert found["completed_at"] == completed_at
    assert all(found[name] == 1.0 for name in REPEATED_NUMBERS)


def test_what_cannot_go_together() -> None:
    for error, name, options, body in (
        (UserError, "background", {}, {"background": True, "store": False}),
        (UnsupportedError, "background", {}, {"background": True, "stream": True}),
        (FeatureDisabledError, "background", {"max_stored_response_bytes": 0}, {"background": True}),
        (UserError, "structured_outputs", {}, {"text": {"format": PERSON}, "structured_outputs": {"regex": "a"}}),
        (UserError, "input", {}, {"input": None}),
    ):
        with pytest.raises(error) as caught:
            ResponseReply({"input": "Hi", **body}, ServerOptions(**options), "r1")
        assert caught.value.parameter == name


def test_errors_name_the_fields_of_this_api() -> None:
    assert reply(text={"format": PERSON}).names["structured_outputs"] == "text"
    assert reply(structured_outputs={"regex": "a"}).names.get("structured_outputs") is None
    assert reply(truncation="auto").names["truncate_prompt_tokens"] == "truncation"
    assert reply().names["max_tokens"] == "max_output_tokens"


WORDS = st.sampled_from(
    [
        *("message", "function_call", "function_call_output", "reasoning", "item_reference", "input_text", "refusal"),
        *("compaction", "jaxllm-1.YQ==", "commentary"),
        *("user", "assistant", "completed", "incomplete", "function", "allowed_tools", "auto", "required", "none"),
        *("add", "text", "json_schema", "json_object", "low", "r", "message.output_text.logprobs"),
    ]
)
NAMES = st.sampled_from(
    [
        *("type", "role", "content", "text", "refusal", "summary", "id", "call_id", "name", "arguments", "output"),
        *("status", "encrypted_content", "parameters", "mode", "tools", "format", "schema", "effort", "verbosity"),
        "phase",
    ]
)
LEAVES = st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats(allow_nan=False) | WORDS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=6), max_leaves=12
)
BODIES = st.dictionaries(st.sampled_from(sorted(KNOWN)), VALUES, max_size=4)
ITEMS = st.lists(st.dictionaries(NAMES, VALUES, max_size=6), max_size=4)


@settings(max_examples=100, deadline=None)
@given(BODIES, ITEMS | VALUES)
def test_whatever_comes_is_a_call_or_a_users_error(body: dict[str, Any], asked: Any) -> None:
    try:
        own = ResponseReply({"input": asked, **body}, ServerOptions(), "r1")
    except UserError as error:
        assert error.parameter in {*body, "input"} and len(str(error)) < 500
        return
    own.begin({"id": "resp_r1", "created": 1, "model": "m", **NUMBERS, "clock": lambda: 7.5})
    json.dumps([own.snapshot(), own.items, own.calls[0].messages])
