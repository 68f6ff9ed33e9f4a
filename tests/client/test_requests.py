"""Prompts, conversations and options become messages, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm import errors
from jaxllm.client.options import ClassifyOptions, EmbedOptions, GenerateOptions, ScoreOptions, keyword_of
from jaxllm.client.requests import (
    EmbedRequests,
    chat_request,
    classify_request,
    embed_request,
    generate_request,
    score_request,
)
from jaxllm.sampling_fields import GRPC, names_in
from jaxllm.sampling_params import RepetitionDetectionParams, SamplingParams
from jaxllm.structured_outputs_params import StructuredOutputsParams
from jaxllm.v1 import inference_pb2, types_pb2
from tests.client.fake_server import FakeServer, deltas_of_whole, plain

# Each option with a value and the resulting request.
OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{
        name: (value, {section: {leaf: value}})
        for path, name in names_in(SamplingParams, GRPC).items()
        for section, _, leaf in (path.partition("."),)
        for kind, value in (("float", 0.25), ("int", 3), ("bool", True))
        if section != "stream" and str(SamplingParams.__dataclass_fields__[name].type).removesuffix(" | None") == kind
    },
    "temperature": (0, {"sampling": {"temperature": 0.0}}),
    "top_k": (-1, {"sampling": {"top_k": -1}}),
    "seed": (-(2**63), {"sampling": {"seed": str(-(2**63))}}),
    "logit_bias": ({5: -100}, {"sampling": {"logit_bias": {"5": -100.0}}}),
    "allowed_token_ids": ([1], {"sampling": {"allowed_token_ids": [1]}}),
    "bad_words": (["x"], {"sampling": {"bad_words": ["x"]}}),
    "extra_args": (
        {"a": 1, "b": (2.5, 3)},
        {"sampling": {"extra_args": {"a": {"values": [1.0]}, "b": {"values": [2.5, 3.0]}}}},
    ),
    "skip_reading_prefix_cache": (False, {"sampling": {"skip_reading_prefix_cache": False}}),
    "repetition_detection": (
        RepetitionDetectionParams(max_pattern_size=4, min_count=3),
        {"stop": {"repetition_detection": {"max_pattern_size": 4, "min_count": 3}}},
    ),
    "min_tokens": (0, {"stop": {"min_tokens": 0}}),
    "stop": ("\n\n", {"stop": {"stop_strings": ["\n\n"]}}),
    "stop_token_ids": ((2, 3), {"stop": {"stop_token_ids": [2, 3]}}),
    "ignore_eos": (False, {"stop": {"ignore_eos": False}}),
    "time_limit": (1.5, {"stop": {"time_limit": "1.500s"}}),
    "truncate_prompt_tokens": (-1, {"stop": {"truncate_prompt_tokens": -1}}),
    "detokenize": (False, {"output": {"text": False}}),
    "return_token_ids": (False, {"output": {"token_ids": False}}),
    "return_prompt_token_ids": (True, {"output": {"prompt_token_ids": True}}),
    "logprobs": (0, {"output": {"logprobs": 0, "logprob_texts": True}}),
    "logprob_texts": (False, {"output": {"logprob_texts": False}}),
    "prompt_logprobs": (2, {"output": {"prompt_logprobs": 2, "logprob_texts": True}}),
    "logprob_token_ids": ([4], {"output": {"logprob_token_ids": [4], "logprob_texts": True}}),
    "skip_special_tokens": (False, {"output": {"skip_special_tokens": False}}),
    "include_reasoning": (False, {"output": {"reasoning": False}}),
    "structured_outputs": ({"choice": ["a", "b"]}, {"structured_output": {"choice": {"values": ["a", "b"]}}}),
    "beam_search": (
        {"length_penalty": 0.5, "early_stopping": "never"},
        {"sampling": {"beam_search": {"length_penalty": 0.5, "early_stopping": "EARLY_STOPPING_NEVER"}}},
    ),
    "model": ("tiny", {"model": "tiny"}),
    "adapter": ("poet", {"adapter": "poet"}),
    "request_id": ("r-1", {"request_id": "r-1"}),
    "priority": (-5, {"priority": -5}),
    "cache_salt": ("s", {"cache_salt": "s"}),
    "add_special_tokens": (False, {"add_special_tokens": False}),
}


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_an_option_fills_its_field_and_no_other(name: str) -> None:
    value, filled = OPTIONS[name]
    assert plain(generate_request("Hi", {name: value})) == {"text": "Hi", **filled}
    assert plain(generate_request("Hi", {name: None})) == {"text": "Hi"}


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (lambda options: embed_request("Hi", options), EmbedOptions, inference_pb2.EmbedRequest),
        (lambda options: classify_request("Hi", options), ClassifyOptions, inference_pb2.ClassifyRequest),
        (lambda options: score_request("Hi", ["Ho"], options), ScoreOptions, inference_pb2.ScoreRequest),
        (lambda options: next(EmbedRequests(["Hi"], options)), EmbedOptions, inference_pb2.EmbedRequest),
    ],
)
def test_an_option_of_what_pools_fills_its_field(build: Any, options: Any, message: Any) -> None:
    fields = set(message.DESCRIPTOR.fields_by_name) - {"text", "token_ids", "text_1", "text_2"}
    assert fields == set(options.__annotations__)
    for name in fields:
        value = 7 if name in ("dimensions", "priority", "truncate_prompt_tokens") else "x"
        value = False if name in ("normalize", "use_activation", "add_special_tokens") else value
        try:
            assert plain(build({name: value})) == plain(build({})) | {name: value}
        except errors.UserError as error:
            assert (build.__code__.co_names[0], name) == ("next", "request_id") and error.parameter == name
    with pytest.raises(errors.UserError, match="'normalise' is not an option of this call"):
        build({"normalise": True})


def test_pairs_and_token_ids_are_sent() -> None:
    assert plain(score_request("a", "b", {})) == {"text_1": ["a"], "text_2": ["b"]}
    assert plain(score_request(["a", "c"], ("b", "d"), {})) == {"text_1": ["a", "c"], "text_2": ["b", "d"]}
    assert plain(embed_request([1, 2], {})) == {"token_ids": {"ids": [1, 2]}}
    for text in (5, [1], None):
        with pytest.raises(errors.UserError, match=r"^text_2 must be a list of valid texts") as caught:
            score_request("a", text, {})  # pyright: ignore[reportArgumentType]
        assert caught.value.parameter == "text_2"
    with pytest.raises(errors.UserError, match=r"stream_embed\(\) takes many"):
        embed_request(["a", "b"], {})  # pyright: ignore[reportArgumentType]
    with pytest.raises(errors.UserError, match=r"^prompts must be texts or lists of token ids, got 'abc'"):
        EmbedRequests("abc", {})


def test_every_option_is_tested() -> None:
    assert set(GenerateOptions.__annotations__) == set(OPTIONS)


class Person:
    """Like a pydantic class."""

    @staticmethod
    def model_json_schema() -> dict[str, Any]:
        return {"type": "object"}


@pytest.mark.parametrize(
    ("value", "filled"),
    [
        (StructuredOutputsParams(json={"type": "object"}), {"json_schema": '{"type": "object"}'}),
        (Person, {"json_schema": '{"type": "object"}'}),
        ({"json": Person, "disable_any_whitespace": True}, {"disable_any_whitespace": True}),
        ({"json": "{}", "whitespace_pattern": " ?"}, {"json_schema": "{}", "whitespace_pattern": " ?"}),
        ({"json_object": True, "disable_additional_properties": True}, {"disable_additional_properties": True}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"grammar": 'start: "a"'}, {"ebnf": 'start: "a"'}),
    ],
)
def test_a_form_of_the_output_is_sent(value: Any, filled: dict[str, Any]) -> None:
    sent = plain(generate_request("Hi", {"structured_outputs": value}))["structured_output"]
    assert filled.items() <= sent.items()


def test_a_call_of_a_tool_can_be_required() -> None:
    named = {"type": "function", "function": {"name": "add"}}
    sent = [plain(chat_request([], {"tool_choice": choice}))["chat"] for choice in ("required", named)]
    required = {"tool_choice": "TOOL_CHOICE_REQUIRED"}
    assert sent == [required, required | {"required_tool": "add"}]


def test_doubles_are_not_rounded() -> None:
    assert generate_request("", {"top_p": 0.1}).sampling.top_p == 0.1


@pytest.mark.parametrize(
    ("prompt", "filled"),
    [
        ("", {"text": ""}),
        ("é\n", {"text": "é\n"}),
        ([1, 2], {"token_ids": {"ids": [1, 2]}}),
        (range(2), {"token_ids": {"ids": [0, 1]}}),
        ([], {"token_ids": {}}),
    ],
)
def test_a_prompt_is_text_or_token_ids(prompt: Any, filled: dict[str, Any]) -> None:
    request = generate_request(prompt, {})
    assert plain(request) == filled
    assert request.WhichOneof("prompt") == next(iter(filled))


def test_a_conversation_is_sent_whole() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    request = chat_request(
        [
            {"role": "system", "content": ""},
            {
                "role": "user",
                "name": "Ann",
                "content": [
                    {"type": "text", "text": "1 + 1?"},
                    {"type": "image_url", "image_url": {"url": "file:///a.png"}},
                    {"type": "image_url", "image_url": "data:"},
                    {"type": "image", "image": b"\0\1"},
                    {"type": "audio_url", "audio_url": {"url": "data:"}},
                    {"type": "audio", "audio": b"\0\2"},
                    {"type": "video_url", "video_url": {"url": "data:"}},
                    {"type": "video", "video": b"\0\3"},
                ],
            },
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "add",
                "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": {"a": 1}}}],
            },
        ],
        {
            "tools": tools,
            "tool_choice": "none",
            "chat_template_kwargs": {"enable_thinking": False},
            "mm_processor_kwargs": {"fps": 1},
            "add_generation_prompt": False,
            "continue_final_message": True,
            "temperature": 0,
        },
    )
    assert plain(request) == {
        "sampling": {"temperature": 0.0},
        "chat": {
            "messages": [
                {"role": "system", "content": ""},
                {
                    "role": "user",
                    "name": "Ann",
                    "parts": [
                        {"text": "1 + 1?"},
                        {"image": {"url": "file:///a.png"}},
                        {"image": {"url": "data:"}},
                        {"image": {"data": "AAE="}},
                        {"audio": {"url": "data:"}},
                        {"audio": {"data": "AAI="}},
                        {"video": {"url": "data:"}},
                        {"video": {"data": "AAM="}},
                    ],
                },
                {
                    "role": "assistant",
                    "reasoning_text": "add",
                    "tool_calls": [{"id": "c", "name": "add", "arguments_json": '{"a": 1}'}],
                },
            ],
            "tools_json": '[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]',
            "tool_choice": "TOOL_CHOICE_NONE",
            "template_kwargs": {"enable_thinking": False},
            "mm_processor_kwargs": {"fps": 1.0},
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    }


def test_only_streams_take_a_streams_options(client: Any, server: FakeServer) -> None:
    server.answers["stream"] = lambda _: iter(deltas_of_whole())
    client.stream("Hi", stream_interval=4, usage_every_message=True).result()
    assert server.request.stream == types_pb2.StreamOptions(interval_tokens=4, usage_every_message=True)
    with pytest.raises(errors.UserError, match=r"^'stream_interval' is not an option of this call\.$"):
        client.generate("Hi", stream_interval=4)


@pytest.mark.parametrize(
    ("options", "message", "parameter"),
    [
        ({"temprature": 1}, "'temprature' is not an option of this call. Did you mean 'temperature'?", "temprature"),
        ({"max_token": 1}, "'max_token' is not an option of this call. Did you mean 'max_tokens'?", "max_token"),
        ({"timeouts": 1}, "'timeouts' is not an option of this call. Did you mean 'timeout'?", "timeouts"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'.", "temperature"),
        ({"temperature": True}, "temperature must be a number, got True.", "temperature"),
        ({"temperature": 10**400}, None, "temperature"),
        ({"seed": 10**5000}, "an integer from -9223372036854775808 to 9223372036854775807", "seed"),
        ({"n": -1}, "n must be an integer from 0 to 4294967295, got -1.", "n"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer from 0 to 4294967295, got 1.5.", "max_tokens"),
        ({"max_tokens": True}, "max_tokens must be an integer", "max_tokens"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1.", "ignore_eos"),
        ({"stop": [b"x"]}, "stop must be a list of valid texts, got [b'x'].", "stop"),
        ({"stop": 5}, "stop must be a list of valid texts, got 5.", "stop"),
        ({"stop_token_ids": [-1]}, "must be a list of integers from 0 to 4294967295, got [-1].", "stop_token_ids"),
        ({"stop_token_ids": "ab"}, "stop_token_ids must be a list of integers", "stop_token_ids"),
        ({"logit_bias": [1]}, "logit_bias must be a mapping of token ids to numbers, got [1].", "logit_bias"),
        ({"logit_bias": {"5": 1}}, "logit_bias must be a mapping of token ids to numbers", "logit_bias"),
        ({"time_limit": "1s"}, "time_limit must be a number of seconds, got '1s'.", "time_limit"),
        ({"time_limit": float("nan")}, "time_limit must be a number of seconds, got nan.", "time_limit"),
        ({"time_limit": True}, "time_limit must be a number of seconds, got True.", "time_limit"),
        ({"model": "\ud800"}, "model must be a valid text", "model"),
        ({"structured_outputs": {"json_schema": {}}}, "has no 'json_schema'; it has json, regex", "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "multiple are specified", "structured_outputs"),
        (
            {"structured_outputs": {"regex": "a", "begin_after": "b"}},
            "begin_after can only be set by the server",
            "structured_outputs",
        ),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structural_tag is not supported", "structured_outputs"),
        ({"structured_outputs": int}, "must be a StructuredOutputsParams", "structured_outputs"),
    ],
)
def test_a_bad_option_is_named_before_anything_is_sent(options: dict[str, Any], message: str, parameter: str) -> None:
    with pytest.raises(errors.UserError) as caught:
        generate_request("Hi", options)
    assert (message or "") in str(caught.value)
    assert caught.value.parameter == parameter
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("prompt", [None, 5, b"text", {"a": 1}, ["one", "two"], [[1], [2]], [1.5], [-1], "\ud800"])
def test_a_bad_prompt_is_named(prompt: Any) -> None:
    with pytest.raises(errors.UserError, match=r"^prompt must be") as caught:
        generate_request(prompt, {})
    assert caught.value.parameter == "prompt"


@pytest.mark.parametrize(
    ("messages", "options", "parameter"),
    [
        ("Hi", {}, "messages"),
        (["Hi"], {}, "messages[0]"),
        ([{"content": "Hi"}], {}, "messages[0].role"),
        ([{"role": "user", "contents": "Hi"}], {}, "messages[0].contents"),
        ([{"role": "user", "content": 5}], {}, "messages[0].content"),
        ([{"role": 5, "content": "Hi"}], {}, "messages[0].role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], {}, "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image", "image": "a"}]}], {}, "messages[0].content[0].image"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            {},
            "messages[0].content[0].image_url",
        ),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], {}, "messages[0].tool_calls[0]"),
        ([], {"tools": [object()]}, "tools"),
        ([], {"tool_choice": "always"}, "tool_choice"),
        ([], {"tool_choice": {"type": "function"}}, "tool_choice"),
        ([], {"tool_choice": {"type": "function", "function": {"name": 5}}}, "tool_choice"),
        ([], {"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ([], {"chat_template_kwargs": {"a": object()}}, "chat_template_kwargs"),
        ([], {"mm_processor_kwargs": 4}, "mm_processor_kwargs"),
    ],
)
def test_a_bad_conversation_is_named(messages: Any, options: dict[str, Any], parameter: str) -> None:
    with pytest.raises(errors.UserError) as caught:
        chat_request(messages, options)
    assert caught.value.parameter == parameter
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("stop.include_stop", "include_stop_str_in_output"),
        ("structured_output.regex", "structured_outputs"),
        ("chat.messages[0].role", "messages[0].role"),
        ("chat.tools_json", "tools"),
        ("chat.required_tool", "tool_choice"),
        ("token_ids.ids", "prompt"),
        ("prompt", "prompt"),
        ("extensions", "extensions"),
    ],
)
def test_a_field_at_fault_is_named_as_the_caller_knows_it(field: str, name: str) -> None:
    assert keyword_of(field) == name
