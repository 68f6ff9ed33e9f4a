"""The OpenAI API: bodies become calls or errors that name a field; chunks become OpenAI's."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import ContextLengthError, OverloadedError, RequestFailedError, UnsupportedError, UserError
from jaxllm.outputs import Logprob
from jaxllm.sampling_params import SamplingParams
from jaxllm.text.chat_template import compile_template
from jaxllm_server.generation.calls import Chunk, NamedTool, Part, PromptInfo, TokenUsage
from jaxllm_server.generation.chat_checks import (
    check_messages,
    check_template_kwargs,
    check_tools,
    texts_of,
    with_read_arguments,
)
from jaxllm_server.http.sse import EventWriter
from jaxllm_server.openai.chat import ChatReply
from jaxllm_server.openai.completions import CompletionReply
from jaxllm_server.openai.generate import GenerateReply
from jaxllm_server.openai.replies import error_body_of
from jaxllm_server.openai.tokens import detokenize_request_of, tokenize_call_of, tokens_response
from jaxllm_server.parsers.tool_parsers import ToolCallDelta
from jaxllm_server.shared import strict_json
from jaxllm_server.shared.options import ServerOptions
from tests.support.naive import Unread

OPTIONS = ServerOptions()
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def allowing(mode, *names):
    """Return a `tool_choice` of OpenAI's type `allowed_tools`."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


NAMED = {"type": "function", "function": {"name": "add"}}


def completion(**body):
    return CompletionReply({"prompt": "a", **body}, OPTIONS, "r1")


def chat(options=OPTIONS, **body):
    return ChatReply({"messages": MESSAGES, **body}, options, "r1")


def part(text="", index=0, **fields):
    names = ("reasoning", "tool_calls", "token_ids", "logprobs", "finish_reason", "stop_reason", "seed")
    empty = dict(zip(names, ("", [], [], None, None, None, None), strict=True))
    return Part(index=index, text=text, **{**empty, **fields})


def chunk(*parts, usage=(3, 2), prompt=None, is_last=False):
    return Chunk("r1", list(parts), prompt, TokenUsage(*usage), None, is_last)


def entry(value, text, rank=1):
    return Logprob(value, rank, text)


def deltas(reply, *chunks):
    return [tail["choices"][0]["delta"] for piece in chunks for tail in reply.events(0, piece) if tail["choices"]]


# Bodies of /v1/completions.


def test_four_forms_of_a_prompt():
    ids = [[1, 2], [3]]
    for prompt, calls in (("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), (ids, ids)):
        assert [call.prompt for call in completion(prompt=prompt).calls] == calls


@pytest.mark.parametrize("prompt", [None, [], 3, True, [1, "a"], [1, True], [[1], "a"], [["a"]], [1.5], {}, [None]])
def test_other_forms_are_refused(prompt):
    with pytest.raises(UserError) as caught:
        completion(prompt=prompt)
    assert caught.value.parameter == "prompt"


def test_fan_out_is_refused_before_a_call_is_made():
    with pytest.raises(UserError) as caught:
        completion(prompt=["a"] * 2049)
    assert caught.value.parameter == "prompt"
    completion(prompt=["a"] * 1024, n=2)
    with pytest.raises(UserError) as caught:
        completion(prompt=["a"] * 1025, n=2)
    assert caught.value.parameter == "n"


def test_ids_of_several_prompts_differ_and_one_prompt_keeps_its_own():
    assert [call.request_id for call in completion(request_id="mine").calls] == ["mine"]
    assert [call.request_id for call in completion(prompt=["a", "b"]).calls] == ["r1-0", "r1-1"]


def test_ids_of_several_prompts_are_as_valid_as_the_id_they_are_made_of():
    most = OPTIONS.max_request_id_chars
    made = [
        call.request_id or ""
        for own in ("a" * (most - 1) + "b", "a" * (most - 1) + "c")
        for call in completion(prompt=["x"] * 128, request_id=own).calls
    ]
    assert len(set(made)) == 256  # even if two ids differ only in the truncated part
    assert {len(request_id) <= most and request_id.startswith("aaa") for request_id in made} == {True}
    assert all(character.isalnum() or character in "._-" for character in "".join(made))
    too_long = completion(prompt=["x", "y"], request_id="a" * (most + 1)).calls
    assert all(len(call.request_id or "") > most for call in too_long)  # to be refused


def test_default_length_is_openais_where_the_client_gives_none():
    assert completion(max_tokens=None).calls[0].default_max_tokens == 16
    assert "max_tokens" not in completion(max_tokens=None).calls[0].sampling
    assert completion(max_tokens=7).calls[0].sampling["max_tokens"] == 7
    assert chat().calls[0].default_max_tokens is None


def test_sampling_passes_raw_and_null_is_unset():
    call = completion(temperature="hot", top_k=-7, stop=None, logit_bias={"1": 5}).calls[0]
    assert call.sampling == {"temperature": "hot", "top_k": -7, "logit_bias": {"1": 5}}


def test_a_beam_search_is_asked_for_and_its_fields_mean_nothing_without():
    assert completion(use_beam_search=False, length_penalty=1.0, early_stopping=False).calls[0].beams is None
    asked = {"length_penalty": 0.5, "early_stopping": "never"}
    assert completion(use_beam_search=True, **asked).calls[0].beams == asked
    assert chat(use_beam_search=True).calls[0].beams == {}
    for name, value in asked.items():
        with pytest.raises(UserError, match=f"{name} requires use_beam_search=true") as caught:
            completion(**{name: value})
        assert caught.value.parameter == name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("guided_decoding_backend", "x"), ("prompt_embeds", "x")),
        *(("structural_tag", "x"), ("response_format", {"type": "structural_tag", "format": {}})),
    ],
)
def test_what_is_not_built_is_refused_by_name(field, value):
    with pytest.raises(UnsupportedError) as caught:
        completion(**{field: value})
    assert caught.value.parameter == field


@pytest.mark.parametrize(
    "body",
    [
        {"suffix": ""},
        {"best_of": 1},
        {"best_of": 3, "n": 3},
        {"use_beam_search": False},
        {"length_penalty": 1},
        {"response_format": {"type": "text"}},
        {"bad_words": []},
        {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"},
        {"guided_json": None, "logprobs": None},
        {"kv_transfer_params": {}, "guided_decoding_backend": "auto"},
        {"stream": False, "stream_options": {"include_usage": False}},
        {"thinking_token_budget": -1, "truncation_side": "right"},
        {"best_of": 3, "temperature": 0, "stream": True},
    ],
)
def test_what_asks_for_nothing_is_accepted(body):
    sampling = completion(**body).calls[0].sampling
    assert sampling.keys() <= {"n", "bad_words", "temperature"}
    assert SamplingParams(**sampling) == SamplingParams(
        n=sampling.get("n", 1), temperature=sampling.get("temperature", 1.0)
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("stream", 1), ("stream", "true"), ("echo", 0), ("model", 3), ("priority", 1.0), ("priority", True)),
        *(("cache_salt", 1), ("request_id", 5), ("add_special_tokens", "no"), ("return_token_ids", 1)),
        *(("stream_options", []), ("response_format", "text"), ("response_format", {})),
        *(("best_of", 1.0), ("best_of", True), ("best_of", "1"), ("suffix", 1)),
        *(("truncation_side", "middle"), ("truncation_side", 1)),
    ],
)
def test_wrong_shapes_name_their_field(field, value):
    with pytest.raises(UserError) as caught:
        completion(**{field: value})
    assert caught.value.parameter == field


def test_stream_options_need_a_stream_and_known_names():
    with pytest.raises(UserError, match="stream=true"):
        completion(stream_options={"include_usage": True})
    with pytest.raises(UserError, match="stream_options"):
        completion(stream=True, stream_options={"include_usages": True})
    form = completion(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}).form
    assert form.include_usage and form.continuous_usage
    assert not completion(stream=True, stream_options={"continuous_usage_stats": True}).form.continuous_usage
    form = chat(ServerOptions(enable_force_include_usage=True), stream=True).form
    assert form.include_usage and form.continuous_usage, "as in vLLM, each event has it"


def test_echo_with_what_is_not_built():
    with pytest.raises(UnsupportedError):
        completion(echo=True, truncate_prompt_tokens=3)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        *(
            ({"best_of": 1, "n": 2}, UserError),
            ({"best_of": 1, "n": 2, "temperature": 0}, UserError),
            ({"best_of": 0}, UserError),
            ({"best_of": 2, "stream": True}, UserError),
        ),
        ({"best_of": 2, "use_beam_search": True}, UserError),
        ({"best_of": OPTIONS.max_n + 1}, UserError),
        ({"best_of": OPTIONS.max_n, "prompt": ["a"] * (OPTIONS.most_sequences // OPTIONS.max_n + 1)}, UserError),
    ],
)
def test_candidates_that_are_refused(body, kind):
    with pytest.raises(kind) as caught:
        completion(**body)
    assert caught.value.parameter == "best_of"


def test_the_best_of_several_candidates_are_those_with_the_highest_logprob_per_token():
    reply = completion(prompt=["a", "b"], n=2, best_of=4, temperature=1)
    assert [call.sampling for call in reply.calls] == [{"n": 4, "temperature": 1, "logprobs": 0}] * 2
    assert reply.names["n"] == "best_of"
    # A long output has the smallest sum but not the smallest mean.
    scores = {"w": [-3.0], "x": [-1.0] * 9, "y": [-2.0, -2.5], "z": [-math.inf, 0.0]}
    parts = [
        part(name, at, logprobs=[{7: entry(one, "t")} for one in values], finish_reason="stop")
        for at, (name, values) in enumerate(scores.items())
    ]
    answer = reply.response([chunk(*parts, usage=(3, 14)), chunk(*reversed(parts), usage=(3, 14))])
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [*enumerate("xyxy")]
    assert {choice["logprobs"] for choice in answer["choices"]} == {None}, "nobody asked for them"
    assert answer["usage"]["completion_tokens"] == 28
    (choice,) = completion(best_of=4, logprobs=1, temperature=1).response([chunk(*parts)])["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-1.0] * 9


def test_a_suffix_goes_with_each_prompt_and_not_with_what_is_not_built():
    assert [call.suffix for call in completion(prompt=["a", "b"], suffix="c").calls] == ["c", "c"]
    assert completion(suffix="").calls[0].suffix is None
    for more in ({"echo": True}, {"use_beam_search": True}, {"truncate_prompt_tokens": 3}):
        with pytest.raises(UnsupportedError) as caught:
            completion(suffix="c", **more)
        assert caught.value.parameter == "suffix"


@pytest.mark.parametrize("count", [0, 2, -1])
def test_echo_with_logprobs_asks_for_those_of_the_prompt(count):
    reply = completion(echo=True, logprobs=count, prompt_logprobs=None)
    assert reply.calls[0].sampling == {"logprobs": count, "prompt_logprobs": count}
    reply.prompt_texts = ["ab"]
    prompt = PromptInfo([7, 8], 0, [None, {8: entry(-1.0, "b")}], "a")
    (choice,) = reply.response(
        [chunk(part("c", token_ids=[9], logprobs=[{9: entry(-2.0, "c")}], finish_reason="length"), prompt=prompt)]
    )["choices"]
    assert choice["text"] == "abc"
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [None, -1.0, -2.0],
        "tokens": ["a", "b", "c"],
        "top_logprobs": [None, {"b": -1.0}, {"c": -2.0}],
    }
    assert choice["prompt_logprobs"] is None, "they were not asked for by that name"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_output_is_echo_with_a_token_less_the_token(stream):
    told = []
    for most in (0, 1):
        reply = completion(prompt=["ab", "ab"], n=2, echo=True, logprobs=1, max_tokens=most, stream=stream)
        assert [call.scores_prompt for call in reply.calls] == [most == 0] * 2
        reply.prompt_texts = ["ab", "ab"]
        parts = [
            part("c", index, token_ids=[9], logprobs=[{9: entry(-2.0, "c")}], finish_reason="stop", stop_reason="c")
            for index in (0, 1)
        ]
        prompt = PromptInfo([7, 8], 0, [None, {8: entry(-1.0, "b")}], "a")
        chunks = [chunk(*parts, usage=(2, 2), prompt=prompt, is_last=True)] * 2
        tails = [tail for number in (0, 1) for tail in reply.events(number, chunks[number])] if stream else []
        answer = {} if stream else reply.response(chunks)
        told.append(([tail["choices"][0] for tail in tails] if stream else answer["choices"], answer.get("usage")))
    (scored, usage), (sampled, _) = told
    assert len(scored) == len(sampled) == 4
    assert usage == (None if stream else {"prompt_tokens": 4, "completion_tokens": 0, "total_tokens": 4})
    for zero, one in zip(scored, sampled, strict=True):
        assert (zero["text"], zero["finish_reason"], zero["stop_reason"]) == ("ab", "length", None)
        assert zero["logprobs"] == {name: values[:-1] for name, values in one["logprobs"].items()}


@pytest.mark.parametrize("body", [{"max_tokens": 0}, {"max_tokens": False, "echo": True}])
def test_no_output_is_for_echo_alone(body):
    call = completion(**body).calls[0]
    assert not call.scores_prompt and call.sampling["max_tokens"] == body["max_tokens"]  # to be refused


def test_a_choice_that_begins_late_has_all_of_its_prompt():
    """Only a call's first chunk has the prompt, and some of the n choices begin later."""
    reply = completion(
        prompt=[[7, 8], [9]], n=2, echo=True, logprobs=0, stream=True, return_token_ids=True, temperature=1
    )
    reply.prompt_texts = ["ab", "c"]
    prompts = [PromptInfo([7, 8], 0, [None, {8: entry(-1.0, "b")}], "a"), PromptInfo([9], 0, [None], "c")]
    told: dict[int, list] = {}
    for number, index, prompt in [(0, 0, 0), (1, 1, 1), (0, 1, None), (1, 0, None), (0, 0, None), (0, 1, None)]:
        piece = part("x", index, token_ids=[5], logprobs=[{5: entry(-2.0, "x")}])
        for tail in reply.events(number, chunk(piece, prompt=None if prompt is None else prompts[prompt])):
            (choice,) = tail["choices"]
            told.setdefault(choice["index"], []).append(choice)
    seen = {
        index: [(own["text"], own.get("prompt_token_ids"), own["logprobs"]["text_offset"]) for own in choices]
        for index, choices in told.items()
    }
    first, later = ("abx", [7, 8], [0, 1, 2]), ("x", None, [3])
    assert seen == {0: [first, later], 1: [first, later], 2: [("cx", [9], [0, 1])], 3: [("cx", [9], [0, 1])]}


@pytest.mark.parametrize("make", [completion, chat])
def test_prompt_logprobs_are_told_in_vllms_form(make):
    reply = make(prompt_logprobs=1)
    assert reply.calls[0].sampling["prompt_logprobs"] == 1
    prompt = PromptInfo([7, 8], 0, [None, {8: entry(-math.inf, "b", 3), 9: entry(-0.5, "c")}], "a")
    answer = reply.response([chunk(part("x", finish_reason="stop"), prompt=prompt)])
    place = answer if make is chat else answer["choices"][0]
    assert place["prompt_logprobs"] == [
        None,
        {
            "8": {"logprob": -9999.0, "rank": 3, "decoded_token": "b"},
            "9": {"logprob": -0.5, "rank": 1, "decoded_token": "c"},
        },
    ]
    with pytest.raises(UserError, match="not available when `stream=True`"):
        make(prompt_logprobs=1, stream=True)


def test_processors_are_called_what_vllm_calls_them():
    for make in (completion, chat):
        reply = make(vllm_xargs={"scale": 2})
        assert reply.calls[0].sampling["extra_args"] == {"scale": 2} and reply.names["extra_args"] == "vllm_xargs"


@pytest.mark.parametrize("asked", [[7], [5, 7]])
@pytest.mark.parametrize("likeliest", [None, 0, 1, 5])
def test_ids_that_were_asked_for_stand_in_place_of_the_likeliest(asked, likeliest):
    row = {5: entry(-3.0, "e", 9), 6: entry(-0.1, "f"), 7: entry(-7.0, "g", None)}
    chunks = [chunk(part("e", logprobs=[row], finish_reason="stop"))]
    told = completion(logprob_token_ids=asked, logprobs=likeliest).response(chunks)
    assert told["choices"][0]["logprobs"]["top_logprobs"] == [{"e": -3.0, "g": -7.0}]
    for reply in (
        chat(logprob_token_ids=asked, logprobs=True, top_logprobs=likeliest),
        chat(logprob_token_ids=asked),
    ):
        (content,) = reply.response(chunks)["choices"][0]["logprobs"]["content"]
        assert (content["token"], [top["token"] for top in content["top_logprobs"]]) == ("e", ["e", "g"])
    assert chat(logprob_token_ids=asked).calls[0].sampling == {"logprob_token_ids": asked}


# Answers of /v1/completions.


def test_choices_are_numbered_prompt_by_prompt_and_usage_is_the_sum():
    reply = completion(prompt=["a", "b"], n=2)
    parts = [part("x", 0, finish_reason="stop"), part("y", 1, finish_reason="context")]
    answer = reply.response([chunk(*parts, usage=(3, 2)), chunk(*parts, usage=(5, 7))])
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [
        *((0, "x", "stop"), (1, "y", "length"), (2, "x", "stop"), (3, "y", "length"))
    ]
    assert answer["usage"] == {"prompt_tokens": 8, "completion_tokens": 9, "total_tokens": 17}


def test_echo_puts_the_prompt_in_front_once_per_choice():
    reply = completion(prompt=["ab", "c"], echo=True, stream=True, n=1)
    reply.prompt_texts = ["ab", "c"]
    texts: dict[int, str] = {}
    for number, piece in ((0, part("x")), (1, part("y")), (0, part("z", finish_reason="length")), (1, part("!"))):
        for tail in reply.events(number, chunk(piece)):
            choice = tail["choices"][0]
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {0: "abxz", 1: "cy!"}


def test_logprobs_have_offsets_that_go_on_through_a_stream():
    reply = completion(logprobs=1, stream=True)
    first = part("He", logprobs=[{5: entry(-0.5, "H"), 9: entry(-math.inf, "J", 2)}, {6: entry(-1.0, "e")}])
    second = part("y", logprobs=[{7: entry(math.nan, "y")}], finish_reason="stop")
    told = [reply.events(0, chunk(piece))[0]["choices"][0]["logprobs"] for piece in (first, second)]
    assert told[0] == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -1.0],
        "tokens": ["H", "e"],
        "top_logprobs": [{"H": -0.5, "J": -9999.0}, {"e": -1.0}],
    }
    assert told[1]["text_offset"] == [2] and told[1]["token_logprobs"] == [-9999.0]


def test_tokens_by_their_ids():
    reply = completion(logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True)
    piece = part("é", token_ids=[5], logprobs=[{5: entry(-1.0, "é"), 6: entry(-2.0, "é", 2)}], finish_reason="stop")
    (choice,) = reply.response([chunk(piece, prompt=PromptInfo([1, 2], 0))])["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"token_id:5": -1.0, "token_id:6": -2.0}]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([5], [1, 2])


def test_events_without_content_are_left_out_but_their_usage_counts():
    reply = completion(stream=True, stream_options={"include_usage": True})
    assert reply.events(0, chunk(part(""), usage=(3, 1))) == []
    (tail,) = reply.events(0, chunk(part("x", finish_reason="length"), usage=(3, 2)))
    assert tail["usage"] is None
    assert reply.last_event() == {
        "choices": [],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }
    assert completion(stream=True).last_event() is None


def test_usage_of_an_event_counts_what_was_sent_up_to_it():
    options = ServerOptions(reasoning_parser="qwen3")
    own = {"stream": True, "n": 2, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    pieces = [
        chunk(part("a", 0, token_ids=[1]), part("b", 1, token_ids=[1, 2], num_reasoning=1), usage=(3, 3, 0, 1)),
        chunk(part("c", 1, token_ids=[3], finish_reason="stop"), usage=(3, 4, 0, 1)),
    ]
    seen = {}
    for name, reply in (
        ("chat", chat(options, **own)),
        ("plain", CompletionReply({"prompt": "a", **own}, options, "r")),
    ):
        usages = [tail["usage"] for piece in pieces for tail in reply.events(0, piece)]
        assert {usage["prompt_tokens"] for usage in usages} == {3}
        seen[name] = [
            (usage["completion_tokens"], usage["completion_tokens_details"]["reasoning_tokens"]) for usage in usages
        ]
    assert seen == {"chat": [(0, 0), (1, 0), (1, 0), (3, 1), (4, 1)], "plain": [(1, 0), (3, 1), (4, 1)]}


def test_keys_of_what_nobody_asked_for_are_absent_in_streams_and_null_in_whole_answers():
    """Fields that were not requested are absent in streams; whole answers have those of OpenAI's API as null."""
    always = {"index", "logprobs", "finish_reason"}
    for own, more, first in (({}, set(), set()), ({"return_token_ids": True}, {"token_ids"}, {"prompt_token_ids"})):
        reply = completion(stream=True, **own)
        begun, ended = (
            reply.events(0, piece)[0]["choices"][0].keys()
            for piece in (chunk(part("a"), prompt=PromptInfo([1], 0)), chunk(part("b", finish_reason="stop")))
        )
        assert (begun, ended) == (always | {"text"} | more | first, always | {"text", "stop_reason"} | more)
    (choice,) = completion().response([chunk(part("a", finish_reason="stop"))])["choices"]
    unasked = ("prompt_token_ids", "prompt_logprobs")
    assert choice.keys() == always | {"text", "stop_reason", "token_ids", *unasked}
    assert [choice[name] for name in (*unasked, "token_ids")] == [None] * 3
    answer = chat().response([chunk(part("a", finish_reason="stop"))])
    assert answer.keys() == {"choices", "usage", *unasked} and [answer[name] for name in unasked] == [None] * 2
    assert answer["choices"][0].keys() == always | {"message", "stop_reason", "token_ids"}
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "a", "refusal": None}
    (role, said) = chat(stream=True).events(0, chunk(part("a", token_ids=[1]), prompt=PromptInfo([1], 0)))
    assert role.keys() == said.keys() == {"choices"}
    assert [tail["choices"][0].keys() for tail in (role, said)] == [always | {"delta"}] * 2
    assert tokens_response([1], 8, None)["token_strs"] is None


def test_details_of_usage_follow_the_options():
    options = ServerOptions(enable_prompt_tokens_details=True, reasoning_parser="qwen3")
    usage = chat(options).response([chunk(part("x", finish_reason="stop"), usage=(9, 4, 8, 2))])["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 8}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2}


# Bodies of /v1/chat/completions.


def test_conversations_pass_on():
    content = [{"type": "text", "text": "Hi"}]
    call = chat(messages=[{"role": "user", "content": content}], tools=TOOLS, tool_choice="auto").calls[0]
    assert (
        call.messages == [{"role": "user", "content": content}] and call.tools == TOOLS and call.tool_choice == "auto"
    )
    assert (call.add_generation_prompt, call.continue_final_message, call.include_reasoning) == (True, False, True)


@pytest.mark.parametrize("messages", [None, [], {}, ["Hi"], [{}], [{"role": 3}]])
def test_messages_of_other_forms_are_refused(messages):
    with pytest.raises(UserError) as caught:
        chat(messages=messages)
    assert caught.value.parameter == "messages"


def test_reasoning_of_earlier_messages_goes_by_either_name():
    for name in ("reasoning", "reasoning_content"):
        messages = chat(messages=[{"role": "assistant", "content": "4", name: "2+2"}]).calls[0].messages
        assert messages == [{"role": "assistant", "content": "4", "reasoning_content": "2+2"}]
    with pytest.raises(UserError):
        chat(messages=[{"role": "assistant", "reasoning": "a", "reasoning_content": "b"}])


@pytest.mark.parametrize(
    ("body", "parameter", "kind"),
    [
        ({"tools": {}}, "tools", UserError),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", UserError),
        ({"tool_choice": "required"}, "tool_choice", UserError),
        ({"tool_choice": NAMED}, "tool_choice", UserError),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", UserError),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": ""}}}, "tool_choice", UserError),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "function": {"name": "add"}}}, "tool_choice", UserError),
        ({"tools": TOOLS, "tool_choice": 3}, "tool_choice", UserError),
        ({"tools": TOOLS, "tool_choice": allowing("auto")}, "tool_choice", UserError),
        ({"tools": TOOLS, "tool_choice": allowing("none", "add")}, "tool_choice", UserError),
        ({"tools": TOOLS, "tool_choice": allowing("auto", "add", "sub")}, "tool_choice", UserError),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", UserError),
        ({"tool_choice": allowing("required", "add")}, "tool_choice", UserError),
        ({"chat_template": "{{ x }}"}, "chat_template", UserError),
        ({"chat_template": ""}, "chat_template", UserError),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs", UserError),
        ({"reasoning_effort": "huge"}, "reasoning_effort", UserError),
        ({"top_logprobs": 2}, "top_logprobs", UserError),
        ({"logprobs": 2}, "logprobs", UserError),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs", UserError),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", UserError),
        ({"max_tokens": 3.0, "max_completion_tokens": 3}, "max_tokens", UserError),
        ({"max_tokens": True, "max_completion_tokens": 1}, "max_tokens", UserError),
        ({"functions": TOOLS}, "functions", UnsupportedError),
        ({"function_call": {"name": "add"}}, "function_call", UnsupportedError),
        ({"enable_thinking": "yes"}, "enable_thinking", UserError),
        ({"think": "hard"}, "think", UserError),
        ({"think": 1}, "think", UserError),
        ({"thinking": {"type": "on"}}, "thinking", UserError),
        ({"thinking": True}, "thinking", UserError),
        ({"enable_thinking": True, "think": False}, "enable_thinking", UserError),
        ({"prompt_token_ids": []}, "prompt_token_ids", UserError),
        ({"prompt_token_ids": [1, True]}, "prompt_token_ids", UserError),
        ({"prompt_token_ids": "1"}, "prompt_token_ids", UserError),
        ({"prompt_token_ids": [1], "messages": {}}, "messages", UserError),
        ({"prompt_token_ids": [1], "add_generation_prompt": True}, "add_generation_prompt", UserError),
        ({"prompt_token_ids": [1], "continue_final_message": False}, "continue_final_message", UserError),
        ({"echo": 1}, "echo", UserError),
        ({"documents": [{}]}, "documents", UnsupportedError),
        ({"modalities": ["text", "audio"]}, "modalities", UnsupportedError),
        ({"prompt": "a"}, "prompt", UserError),
    ],
)
def test_chat_refuses(body, parameter, kind):
    with pytest.raises(kind) as caught:
        chat(**body)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_model_is_shown_the_tools_that_are_allowed(mode):
    tools = [{"type": "function", "function": {"name": name}} for name in ("add", "sub", "mul")]
    call = chat(tools=tools, tool_choice=allowing(mode, "mul", "add")).calls[0]
    assert (call.tools, call.tool_choice) == ([tools[0], tools[2]], mode)


@pytest.mark.parametrize(
    "body",
    [
        *({"tools": []}, {"tools": [], "tool_choice": "auto"}, {"tool_choice": "auto"}, {"tool_choice": "none"}),
        *({"functions": [], "function_call": "none"}, {"parallel_tool_calls": False}, {"echo": False}),
        *({"top_logprobs": 0}, {"modalities": ["text"]}, {"verbosity": "low"}, {"prediction": {"type": "content"}}),
    ],
)
def test_what_asks_for_nothing_of_a_chat_is_accepted(body):
    call = chat(**body).calls[0]
    assert (call.sampling, call.tools) == ({}, None) and call.tool_choice in (None, "none")


@pytest.mark.parametrize(
    ("body", "kwargs"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
        ({"think": True, "thinking": {"type": "enabled"}}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"think": "high"}, {"reasoning_effort": "high"}),
        ({"think": "high", "reasoning_effort": "low"}, {"reasoning_effort": "low", "enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "low", "enable_thinking": False},
        ),
        ({"think": True, "chat_template_kwargs": {"thinking": 0}}, {"enable_thinking": True, "thinking": 0}),
    ],
)
def test_whether_to_think_is_said_in_other_servers_words_too(body, kwargs):
    assert chat(**body).calls[0].template_kwargs == kwargs
    call, _ = tokenize_call_of({"messages": MESSAGES, **body})
    assert call.template_kwargs == kwargs


def test_a_conversation_that_its_client_has_written():
    for more in ({}, {"messages": []}, {"messages": MESSAGES}):
        reply = ChatReply({"prompt_token_ids": [1, 2], "tools": TOOLS, **more}, OPTIONS, "r1")
        (call,) = reply.calls
        assert (call.written_ids, call.prompt, call.tools) == ([1, 2], None, TOOLS)
        assert call.messages == more.get("messages", []) and reply.names["prompt"] == "prompt_token_ids"
        transferred = {"kv_transfer_params": {"prompt_token_ids": [1, 2]}, "tools": TOOLS, **more}
        assert ChatReply(transferred, OPTIONS, "r1").calls == [call]
    assert chat().calls[0].written_ids is None
    given = chat(kv_transfer_params={"prompt_token_ids": [1, 2], "remote_host": "a"})
    assert given.calls[0].kv_transfer_params == {"remote_host": "a"}
    with pytest.raises(UserError, match="differ"):
        chat(kv_transfer_params={"prompt_token_ids": [1, 2]}, prompt_token_ids=[1])


@pytest.mark.parametrize("make", [chat, completion])
def test_the_place_of_kv_blocks_is_passed_on_and_shown(make):
    asked, told = {"do_remote_decode": True, "remote_host": None}, {"do_remote_prefill": True, "remote_port": 7}
    ended = replace(chunk(part("a", finish_reason="length"), is_last=True), kv_transfer_params=told)
    for stream in (False, True):
        reply = make(kv_transfer_params=asked, stream=stream)
        assert reply.calls[0].kv_transfer_params == asked
        shown = reply.events(0, ended)[-1] if stream else reply.response([ended])
        assert shown["kv_transfer_params"] == told
        plain = make(stream=stream)
        assert plain.calls[0].kv_transfer_params is None
        shown = plain.events(0, chunk(part("a")))[-1] if stream else plain.response([chunk(part("a"))])
        assert "kv_transfer_params" not in shown
    with pytest.raises(UserError, match="single prompt"):
        completion(prompt=["a", "b"], kv_transfer_params=asked)


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_have_the_place_of_kv_blocks_too(stream):
    asked, told = {"do_remote_decode": True}, {"do_remote_prefill": True, "remote_port": 7}
    reply = GenerateReply({"token_ids": [1], "kv_transfer_params": asked, "stream": stream}, OPTIONS, "r1")
    assert reply.calls[0].kv_transfer_params == asked
    ended = replace(chunk(part("a", finish_reason="length"), is_last=True), kv_transfer_params=told)
    shown = reply.events(0, ended)[-1] if stream else reply.response([ended])
    assert shown["kv_transfer_params"] == told


@pytest.mark.parametrize("parser", [None, "qwen3"])
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_reasoning_that_is_left_out_are_hidden(parser, stream):
    body = {"include_reasoning": False, "return_token_ids": True, "logprobs": True, "stream": stream}
    reply = chat(ServerOptions(reasoning_parser=parser), **body)
    row = {5: entry(-3.0, "hm")}
    chunks = [chunk(part("", token_ids=[5], logprobs=[row])), chunk(part("a", token_ids=[6], logprobs=[row]))]
    tails = [tail for piece in chunks for tail in reply.events(0, piece)] if stream else [reply.response(chunks[:1])]
    choices = [tail["choices"][0] for tail in tails]
    assert any(choice.get("token_ids") for choice in choices) == any(choice["logprobs"] for choice in choices)
    assert any(choice.get("token_ids") for choice in choices) == (parser is None)
    assert len(choices) == ((2 if parser else 3) if stream else 1), "a hidden token makes no event"


def test_a_prompt_of_nothing():
    for body in ({"prompt": None, "prompt_embeds": []}, {"prompt_embeds": []}):
        with pytest.raises(UserError, match="Either prompt or prompt_embeds must be provided and non-empty") as caught:
            CompletionReply(body, OPTIONS, "r1")
        assert caught.value.parameter == "prompt"
    with pytest.raises(UnsupportedError, match="prompt_embeds"):
        CompletionReply({"prompt_embeds": ["AAAA"]}, OPTIONS, "r1")


@pytest.mark.parametrize(
    ("messages", "more", "echo"),
    [
        ([*MESSAGES, {"role": "assistant", "content": "Once"}], {}, "Once"),
        ([*MESSAGES, {"role": "assistant", "content": "Once"}], {"continue_final_message": True}, "Once"),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"text": "b"}, {"url": "c"}]}], {}, "a\nb"),
        (MESSAGES, {"add_generation_prompt": False}, "Hi"),
        (MESSAGES, {}, ""),
        ([{"role": "assistant", "content": None}], {}, ""),
    ],
)
def test_an_echo_is_the_last_message_if_the_answer_goes_on_with_it(messages, more, echo):
    whole = chat(messages=messages, echo=True, n=2, **more).response([chunk(part("!", 0), part("?", 1))])
    assert [choice["message"]["content"] for choice in whole["choices"]] == [f"{echo}!", f"{echo}?"]
    pieces = chunk(part("!", 0)), chunk(part("?", 1)), chunk(part("!", 0))
    told = deltas(chat(messages=messages, echo=True, n=2, stream=True, **more), *pieces)
    assert [delta["content"] for delta in told if delta.get("content")] == [
        *((echo, "!", echo, "?", "!") if echo else ("!", "?", "!"))
    ]
    assert [delta.get("role") for delta in told].count("assistant") == 2


@pytest.mark.parametrize(
    "tools",
    [
        *(TOOLS * 4, [3], [{}], [{"type": "function"}], [{"type": "web", "function": {"name": "a"}}]),
        *([{"type": "function", "function": own}] for own in ({}, "add", {"name": ""}, {"name": 3})),
    ],
)
def test_tools_that_no_request_may_bring(tools):
    with pytest.raises(UserError) as caught:
        check_tools(tools, 3)
    assert caught.value.parameter == "tools"


@pytest.mark.parametrize(
    "kwargs",
    [
        *({"tokenize": True}, {"messages": "x"}, {"a": [1]}, {"a": {}}, {"a": "x" * 1025}, {"__class__": 1}),
        *({"a b": 1}, {"": 1}, {"a" * 65: 1}, {f"a{i}": 1 for i in range(33)}),
    ],
)
def test_template_variables_that_no_request_may_bring(kwargs):
    with pytest.raises(UserError) as caught:
        check_template_kwargs(kwargs)
    assert caught.value.parameter == "chat_template_kwargs" and len(str(caught.value)) < 200


def test_a_conversation_of_too_many_values_is_not_gone_through():
    for value in (Unread([[]] * 131_072), [Unread([[]] * 131_071)], [[0] * 70_000, {"a": [0] * 70_000}]):
        with pytest.raises(UserError, match="at most 131072 values") as caught:
            texts_of([value])
        assert caught.value.parameter == "messages"
    with pytest.raises(UserError, match="at most 131072 values"):
        texts_of([dict.fromkeys(map(str, range(65_536)))])
    assert texts_of([[[]] * 131_071]) == []
    assert sorted(texts_of([{"a": ["b", {"c": "d"}, 1, None]}, None, "e"])) == ["a", "b", "c", "d", "e"]


def test_messages_are_counted_before_anything_else():
    check_messages([{}] * 16_384, 16_384, 16_384)
    for count, longest, kind in ((101, 9, ContextLengthError), (16_385, 2**20, UserError)):
        with pytest.raises(UserError) as caught:
            check_messages(Unread([{}] * count), longest, 100 if longest == 9 else 2**22)
        assert type(caught.value) is kind


def test_what_a_conversation_may_bring_along():
    check_tools(None, 3)
    check_tools([], 3)
    check_tools(TOOLS * 3, 3)
    check_template_kwargs({})
    check_template_kwargs({"a": 1, "b": 0.5, "enable_thinking": False, "c": None, "d": "x" * 1024})
    check_template_kwargs({f"a{i}": 1 for i in range(32)})


def test_chat_lengths_and_logprobs():
    assert chat(max_tokens=5).calls[0].sampling == {"max_tokens": 5}
    assert chat(max_completion_tokens=5, max_tokens=5).calls[0].sampling == {"max_tokens": 5}
    assert chat(max_completion_tokens=5).names["max_tokens"] == "max_completion_tokens"
    assert chat(logprobs=True).calls[0].sampling == {"logprobs": 0}
    assert chat(logprobs=True, top_logprobs=3).calls[0].sampling == {"logprobs": 3}
    assert chat(logprobs=False, top_logprobs=0).calls[0].sampling == {}
    assert chat(chat_template_kwargs={"a": 1}, reasoning_effort="low").calls[0].template_kwargs == {
        **{"a": 1, "reasoning_effort": "low", "enable_thinking": True}
    }


# Answers of /v1/chat/completions.


def test_a_stream_begins_with_the_role_and_adds_up():
    reply = chat(stream=True)
    told = deltas(reply, chunk(part("He")), chunk(part("")), chunk(part("y")), chunk(part("", finish_reason="stop")))
    assert told == [{"role": "assistant", "content": ""}, {"content": "He"}, {"content": "y"}, {}]
    assert reply.events(0, chunk(part("", finish_reason="stop")))[0]["choices"][0]["finish_reason"] == "stop"


def test_reasoning_comes_beside_the_content():
    told = deltas(chat(stream=True), chunk(part("", reasoning="hm")), chunk(part("4", reasoning="!")))
    both = [dict.fromkeys(("reasoning", "reasoning_content"), text) for text in ("hm", "!")]
    assert told[1:] == [both[0], {**both[1], "content": "4"}]
    (choice,) = chat().response([chunk(part("", reasoning="hm", finish_reason="length"))])["choices"]
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None, **both[0]}


CALLS = [
    ToolCallDelta(0, "id0", "add", ""),
    ToolCallDelta(0, None, None, '{"a":'),
    ToolCallDelta(0, None, None, "1}"),
    ToolCallDelta(1, "id1", "sub", "{}"),
]


def test_tool_calls_whole_and_in_pieces():
    reply = chat(tools=TOOLS)
    (choice,) = reply.response([chunk(part("", tool_calls=CALLS, finish_reason="tool_calls"))])["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert choice["message"]["tool_calls"] == [
        {"id": "id0", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
        {"id": "id1", "type": "function", "function": {"name": "sub", "arguments": "{}"}},
    ]
    told = deltas(chat(tools=TOOLS, stream=True), chunk(part("", tool_calls=CALLS[:2])))
    assert told[1]["tool_calls"] == [
        {"index": 0, "id": "id0", "type": "function", "function": {"name": "add", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"a":'}},
    ]


def test_a_call_that_is_forced_and_how_it_ends():
    """The finish_reason is "tool_calls" for required calls, "stop" for a named one, also in streams; or "length"."""
    for choice, kept, told in (("required", "required", "tool_calls"), (NAMED, NamedTool("add"), "stop")):
        for stream in (False, True):
            reply = chat(tools=TOOLS, tool_choice=choice, stream=stream, parallel_tool_calls=False)
            assert (reply.calls[0].tool_choice, reply.calls[0].takes_one_call) == (kept, True)
            for reason, ends in (("tool_calls", told), ("length", "length")):
                piece = chunk(part("", tool_calls=CALLS[:1], finish_reason=reason))
                answers = reply.events(0, piece)[-1:] if stream else [reply.response([piece])]
                assert [answer["choices"][0]["finish_reason"] for answer in answers] == [ends]
    assert not chat(tools=TOOLS, tool_choice="required").calls[0].takes_one_call


def test_a_forced_call_leaves_no_content_that_response_format_could_be_of():
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    for choice in ("required", NAMED):
        sampling = chat(tools=TOOLS, tool_choice=choice, response_format=form).calls[0].sampling
        assert "structured_outputs" not in sampling
        own = chat(tools=TOOLS, tool_choice=choice, structured_outputs={"regex": "a"}).calls[0].sampling
        assert own == {"structured_outputs": {"regex": "a"}}  # the calls' constraint is refused later
    assert chat(tools=TOOLS, tool_choice="auto", response_format=form).calls[0].sampling["structured_outputs"]
    with pytest.raises(UserError):
        chat(tools=TOOLS, tool_choice="required", response_format={"type": "jsn"})


def test_one_tool_call_where_the_client_takes_no_more():
    reply = chat(tools=TOOLS, parallel_tool_calls=False)
    (choice,) = reply.response([chunk(part("", tool_calls=CALLS, finish_reason="tool_calls"))])["choices"]
    assert [call["id"] for call in choice["message"]["tool_calls"]] == ["id0"]


def test_chat_logprobs_are_the_likeliest_whatever_was_sampled():
    candidates = {3: entry(-4.0, "é", 9), 5: entry(-0.1, "a", 1), 6: entry(-2.0, "b", 2)}
    reply = chat(logprobs=True, top_logprobs=2)
    (choice,) = reply.response([chunk(part("é", logprobs=[candidates], finish_reason="stop"))])["choices"]
    (content,) = choice["logprobs"]["content"]
    assert (content["token"], content["logprob"], content["bytes"]) == ("é", -4.0, [195, 169])
    assert [(other["token"], other["logprob"]) for other in content["top_logprobs"]] == [("a", -0.1), ("b", -2.0)]
    bare = chat(logprobs=True).response([chunk(part("é", logprobs=[candidates], finish_reason="stop"))])
    assert bare["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_token_ids_of_a_chat():
    reply = chat(stream=True, return_token_ids=True)
    tails = reply.events(0, chunk(part("", token_ids=[7]), prompt=PromptInfo([1, 2], 0)))
    assert tails[0]["prompt_token_ids"] == [1, 2]
    assert tails[1]["choices"][0]["token_ids"] == [7]


def test_several_outputs_each_have_their_role():
    told = chat(stream=True, n=2).events(0, chunk(part("x", 1), part("y", 0)))
    assert [(tail["choices"][0]["index"], tail["choices"][0]["delta"].get("role")) for tail in told] == [
        *((1, "assistant"), (1, None), (0, "assistant"), (0, None))
    ]


# The rest.


def test_tokenize_and_detokenize():
    call, wants_texts = tokenize_call_of({"prompt": "a", "return_token_strs": True})
    assert (call.prompt, call.add_special_tokens, wants_texts) == ("a", None, True)
    call, _ = tokenize_call_of({"messages": MESSAGES, "add_generation_prompt": False, "model": "m"})
    assert (call.messages, call.add_generation_prompt, call.model) == (MESSAGES, False, "m")
    assert detokenize_request_of({"tokens": [1, 2]}) == ("", [1, 2])
    assert detokenize_request_of({"tokens": []}) == ("", [])
    for body in ({}, {"prompt": 3}, {"prompt": "a", "temperature": 1}, {"messages": []}):
        with pytest.raises(UserError):
            tokenize_call_of(body)
    for tokens in (None, "a", [1, True], [1.0]):
        with pytest.raises(UserError):
            detokenize_request_of({"tokens": tokens})


def test_errors_in_openais_form():
    body = error_body_of(UserError("top_p must be in (0, 1], got 2.", "top_p", 2))["error"]
    assert body == {
        "message": "top_p must be in (0, 1], got 2.",
        "type": "invalid_request_error",
        "param": "top_p",
        "code": "invalid_parameter",
    }
    assert error_body_of(OverloadedError("full", 2.0))["error"]["type"] == "rate_limit_error"
    assert error_body_of(RequestFailedError("NaN"))["error"]["type"] == "server_error"
    assert "/home" not in json.dumps(error_body_of(RuntimeError("0x7f /home/me")))


def test_events_are_strict_json_on_one_ascii_line():
    line = EventWriter({"id": "x"}).event({"text": "a\u2028b\n\u0085é"})
    assert line.isascii() and line.startswith(b"data: {") and line.count(b"\n") == 2
    assert json.loads(line[6:]) == {"id": "x", "text": "a\u2028b\n\u0085é"}
    with pytest.raises(ValueError, match="JSON"):
        EventWriter({"id": "x"}).event({"value": math.nan})


@pytest.mark.parametrize(
    "raw",
    [
        *(b"", b"{", b"{} x", b"[]", b"3", b"null", b'{"a":1,"a":2}', b'{"a":{"b":1,"b":1}}', b'{"a":NaN}'),
        *(b'{"a":-Infinity}', b'{"a":1e400}', b'{"a":"\n"}', b'{"a":"\\ud800"}', b'{"\\udc00":1}', b"{'a':1}"),
        *(b'{"a":' + b"9" * 5000 + b"}", b'{"a":"\xed\xa0\x80"}', b"\xef\xbb\xbf{}", '{"a":1}'.encode("utf-16")),
        *(b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", b'{"a":' + b"[" * 100_000, b'{"a":' * 100_000),
        *(b'{"a":[' + b"[],{}," * 70_000 + b"1]}", b'{"a":[' + b'"",' * 600_000 + b"1]}"),
        b'{"a":[' + b'"\\\\",' * 600_000 + b"1]}",
    ],
)
@pytest.mark.parametrize("in_thread", [False, True])
def test_json_that_is_refused(raw, in_thread):
    with pytest.raises(UserError) as caught:
        strict_json.read(raw, 64, in_thread=in_thread)
    assert len(str(caught.value)) < 200


def test_a_byte_order_mark_is_named():
    with pytest.raises(UserError, match="The body begins with a byte order mark"):
        strict_json.read(b"\xef\xbb\xbf{}", 64)


@pytest.mark.ci
@pytest.mark.parametrize("in_thread", [False, True])
def test_json_that_is_read(in_thread):
    def read(raw):
        return strict_json.read(raw, 64, in_thread=in_thread)

    assert read(b' {"a": "\\ud83d\\ude00", "b": [1, -0.0, 1e-400]} ') == {"a": "😀", "b": [1, -0.0, 0.0]}
    read(b'{"a":' + b"[" * 63 + b"]" * 63 + b"}")
    read(b'{"a":"' + b"[" * 1000 + b'\\"{"}')  # brackets in a text do not count
    for large in ([7] * 2_000_000, 'a, [] {} \\ " 😀' * 200_000, [[]] * 120_000, ["a"] * 250_000):
        assert read(json.dumps({"a": large}).encode()) == {"a": large}


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    ),
    st.integers(1, 6),
)
def test_depth_is_that_of_a_plain_walk(value, most):
    def depth(item):
        inner = item.values() if isinstance(item, dict) else item if isinstance(item, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    document = {"a": value}
    raw = json.dumps(document).encode()
    for in_thread in (False, True):
        if depth(document) <= most:
            assert strict_json.read(raw, most, in_thread=in_thread) == document
        else:
            with pytest.raises(UserError, match="levels"):
                strict_json.read(raw, most, in_thread=in_thread)


def _with_arguments(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    return [{"role": "user"}, {"role": "assistant", "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"a": 1, "a": 2}', "names 'a' twice"),
        ('{"a": 1e400}', "too large"),
        ('{"a": "\\ud800"}', "surrogate"),
        ('{"a": ' + "[" * 64 + "]" * 64 + "}", "more than 64 levels"),
        ('{"a": ' + "[" * 5000 + "]" * 5000 + "}", "more than 64 levels"),
        ('{"a": [' + "[]," * 600_000 + "1]}", "brackets in arguments"),
    ],
    ids=lambda value: value[:20],
)
def test_arguments_of_earlier_calls_are_read_as_strictly_as_a_body(arguments, said):
    with pytest.raises(UserError, match=said) as caught:
        with_read_arguments(_with_arguments(arguments), _shape(objects=True), 64)
    assert caught.value.parameter == "messages"
    assert said.startswith("brackets") or str(caught.value).startswith("messages[1].tool_calls[0].function.arguments ")


@pytest.mark.parametrize(
    ("arguments", "read", "as_text"),
    [
        ('{"a": [1, {"b": "é"}]}', {"a": [1, {"b": "é"}]}, '{"a": [1, {"b": "é"}]}'),
        *((text, text, text) for text in ("", "{", '{"a": "cut o', "[1]", "7", "no JSON", '{"a": 1} x')),
        ('{"a": ' + "[" * 63 + "]" * 63 + "}", json.loads('{"a": ' + "[" * 63 + "]" * 63 + "}"), ...),
        ({"a": 1}, {"a": 1}, '{"a": 1}'),
    ],
    ids=lambda value: str(value)[:20],
)
def test_arguments_come_as_the_template_takes_them(arguments, read, as_text):
    def arguments_of(shape):
        message = with_read_arguments(_with_arguments(arguments), shape, 64)[1]
        assert set(message) == {"role", "tool_calls"}
        return message["tool_calls"][0]["function"]["arguments"]

    assert arguments_of(_shape(objects=True)) == read
    assert as_text is ... or arguments_of(_shape(objects=False)) == as_text
    if isinstance(read, str) and read:
        with pytest.raises(UserError, match=r"^messages\[1\].tool_calls\[0\].function.arguments must be a JSON object"):
            arguments_of(_shape(objects=True, texts=False))
    else:
        assert arguments_of(_shape(objects=True, texts=False)) == (read or {})


def _shape(*, objects, texts=True):
    walked = "{% for k, v in c.function.arguments | items %}{{ k }}{{ v }}{% endfor %}"
    written = {
        (True, True): "{{ c.function.arguments | tojson }}",
        (True, False): walked,
        (False, True): "{{ '' + c.function.arguments }}",
    }[objects, texts]
    loop = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.name }}" + written + "{% endfor %}{% endfor %}"
    )
    return compile_template(loop).shape
