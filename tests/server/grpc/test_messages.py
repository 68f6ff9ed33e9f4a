"""The mapping of `jaxllm.v1` messages: no request field is ignored, no delta lost, no other request's error sent."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm import errors
from jaxllm.outputs import Logprob
from jaxllm.sampling_fields import GRPC, names_in
from jaxllm.sampling_params import SamplingParams
from jaxllm.structured_outputs_params import StructuredOutputsParams
from jaxllm.v1 import inference_pb2 as pb
from jaxllm.v1 import types_pb2 as ty
from jaxllm_server.generation.calls import Chunk, NamedTool, Part, PromptInfo, Timing, TokenUsage
from jaxllm_server.grpc import error_details, reading, replies
from jaxllm_server.parsers.tool_parsers import ToolCallDelta
from jaxllm_server.shared.error_table import AdminRequiredError, AuthError

MOST_DEPTH = 64
SOURCES = Path(reading.__file__).parent


def call_of(request: pb.GenerateRequest, *, stream: bool = True) -> Any:
    return reading.call_of(request, "id", stream=stream, max_json_depth=MOST_DEPTH)


# Requests: every field has an effect.


def leaves(descriptor: Descriptor, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """List the paths of all fields of a request; Struct and Duration count as one field."""
    found = []
    for field in descriptor.fields:
        below = (*path, field.name)
        kind = field.message_type
        if kind is None or kind.GetOptions().map_entry or kind.full_name.startswith("google.protobuf."):
            found.append(below)
        else:
            found += leaves(kind, below)
    return found


def set_leaf(message: Message, path: tuple[str, ...]) -> None:
    """Set one field to a value that differs from its default and from its meaning when unset."""
    field = message.DESCRIPTOR.fields_by_name[path[0]]
    value = getattr(message, path[0])
    if len(path) > 1:
        set_leaf(value.add() if field.is_repeated else value, path[1:])
        return
    kind = field.message_type
    if kind is not None and kind.full_name == "google.protobuf.Struct":
        value["key"] = 1
    elif kind is not None and kind.full_name == "google.protobuf.Duration":
        value.seconds = 7
    elif path[0] == "extra_args":
        value["name"].values.append(0.5)
    elif kind is not None:
        value[3] = 0.5  # logit_bias
    elif path[0] == "tools_json":
        message.tools_json = '[{"type": "function"}]'  # pyright: ignore[reportAttributeAccessIssue]
    else:
        item: Any = {
            FieldDescriptor.CPPTYPE_STRING: "x",
            # Fields that are on by default are set to false.
            FieldDescriptor.CPPTYPE_BOOL: path[0] not in DEFAULT_ON,
            FieldDescriptor.CPPTYPE_ENUM: 1,
            FieldDescriptor.CPPTYPE_DOUBLE: 0.25,
        }.get(field.cpp_type, 5)
        item = item.encode() if field.type == FieldDescriptor.TYPE_BYTES else item
        if field.is_repeated:
            value.append(item)
        else:
            setattr(message, path[0], item)


DEFAULT_ON = ("text", "token_ids", "skip_special_tokens", "reasoning", "add_generation_prompt", "add_special_tokens")


def outcome(request: pb.GenerateRequest) -> Any:
    """Return the call and the reply for a request, or the path of the refused field."""
    try:
        call = call_of(request)
        return call, replies.reply_of(request, "m")
    except errors.UserError as error:
        return error_details.path_of(error.parameter or "", request)


# `call_of` gets the request id as a separate argument, because it may be in the metadata: test_grpc_server.py.
FIELDS = [path for path in leaves(pb.GenerateRequest.DESCRIPTOR) if path != ("request_id",)]


@pytest.mark.parametrize("path", FIELDS, ids=".".join)
def test_no_field_of_a_request_is_ignored(path: tuple[str, ...]) -> None:
    plain, changed = pb.GenerateRequest(), pb.GenerateRequest()
    if path[0] == "chat":
        for request in (plain, changed):  # a conversation without the field, and with it
            request.chat.messages.add(role="user")
            request.chat.tools_json = '[{"type": "tool"}]' if path[1] in ("tools_json", "tool_choice") else ""
    elif path[0] not in ("text", "token_ids"):
        plain.text = changed.text = "Once"
    if path[-1] == "tool_choice":
        plain.chat.tool_choice = ty.TOOL_CHOICE_AUTO
    set_leaf(changed, path)
    assert changed != plain
    told = outcome(changed)
    assert told != outcome(plain)
    if isinstance(told, str):
        dotted = ".".join(path)
        assert dotted.startswith(told.split("[")[0]) and told, f"{told!r} does not name {dotted}"


def test_unset_is_absent_and_zero_is_given() -> None:
    assert call_of(pb.GenerateRequest(text="a")).sampling == {}
    request = pb.GenerateRequest(
        text="a",
        sampling=ty.SamplingParams(temperature=0, top_p=0, top_k=0, seed=0, n=0),
        stop=ty.StopConditions(max_tokens=0, min_tokens=0, include_stop=False, ignore_eos=False),
        output=ty.OutputOptions(text=False, logprobs=0, skip_special_tokens=False),
    )
    given = call_of(request).sampling
    assert given == {
        **{"temperature": 0, "top_p": 0, "top_k": 0, "seed": 0, "n": 0, "max_tokens": 0, "min_tokens": 0},
        **{"include_stop_str_in_output": False, "ignore_eos": False},
        **{"detokenize": False, "logprobs": 0, "skip_special_tokens": False},
    }


def test_values_arrive_as_they_were_set() -> None:
    request = pb.GenerateRequest(
        token_ids=ty.TokenIds(ids=[1, 2**31]),
        sampling=ty.SamplingParams(temperature=0.7, seed=-(2**63), logit_bias={5: -100.0}),
        stop=ty.StopConditions(stop_strings=["a", "b"], stop_token_ids=[7], truncate_prompt_tokens=-1),
        priority=-3,
        cache_salt="salt",
        adapter="lora",
        model="m",
    )
    request.stop.time_limit.FromMilliseconds(1500)
    call = call_of(request)
    assert call.prompt == [1, 2**31] and call.messages is None
    assert call.sampling == {
        **{"temperature": 0.7, "seed": -(2**63), "logit_bias": {5: -100.0}},
        **{"stop": ["a", "b"], "stop_token_ids": [7], "truncate_prompt_tokens": -1},
    }
    assert SamplingParams(**call.sampling).seed == -(2**63)  # plain Python values, which the one validator takes
    assert (call.priority, call.cache_salt, call.adapter, call.model, call.time_limit) == (-3, "salt", "lora", "m", 1.5)
    assert call.stream and call.request_id == "id"


def test_a_conversation_is_in_openai_form() -> None:
    chat = ty.ChatPrompt(
        messages=[
            ty.ChatMessage(role="system", content=""),
            ty.ChatMessage(role="user", parts=[ty.ContentPart(text="a"), ty.ContentPart(text="")], name="Ann"),
            ty.ChatMessage(role="user", parts=[{"image": {"data": b"a"}}, {"image": {"url": "data:"}}]),
            ty.ChatMessage(role="user", parts=[{"audio": {"data": b"a"}}, {"audio": {"url": "data:"}}]),
            ty.ChatMessage(role="user", parts=[{"video": {"data": b"a"}}, {"video": {"url": "data:"}}]),
            ty.ChatMessage(
                role="assistant",
                reasoning_text="hm",
                tool_calls=[ty.ToolCall(id="1", name="f", arguments_json='{"x": 1}')],
            ),
            ty.ChatMessage(role="tool", content="3", tool_call_id="1"),
        ],
        tools_json='[{"type": "function", "function": {"name": "f"}}]',
        tool_choice=ty.TOOL_CHOICE_AUTO,
    )
    chat.template_kwargs.update({"enable_thinking": False, "depth": 3, "share": 0.5, "of": {"a": [None, "x"]}})
    chat.mm_processor_kwargs.update({"num_frames": 4.0, "fps": None})
    call = call_of(pb.GenerateRequest(chat=chat))
    function = {"name": "f", "arguments": '{"x": 1}'}
    assert call.messages == [
        {"role": "system", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}], "name": "Ann"},
        {"role": "user", "content": [{"type": "image", "image": b"a"}, {"type": "image_url", "image_url": "data:"}]},
        {"role": "user", "content": [{"type": "audio", "audio": b"a"}, {"type": "audio_url", "audio_url": "data:"}]},
        {"role": "user", "content": [{"type": "video", "video": b"a"}, {"type": "video_url", "video_url": "data:"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    assert call.prompt is None and call.tool_choice == "auto"
    assert call.tools == json.loads(chat.tools_json)
    assert call.template_kwargs == {"enable_thinking": False, "depth": 3, "share": 0.5, "of": {"a": [None, "x"]}}
    assert type(call.template_kwargs["depth"]) is int and type(call.mm_processor_kwargs["num_frames"]) is int
    assert call.mm_processor_kwargs == {"num_frames": 4, "fps": None}
    assert call.add_generation_prompt and not call.continue_final_message
    chat.continue_final_message = True
    assert not call_of(pb.GenerateRequest(chat=chat)).add_generation_prompt


@pytest.mark.parametrize(
    ("message", "constraint"),
    [
        (ty.StructuredOutput(json_schema='{"type": "object"}'), {"json": {"type": "object"}}),
        (ty.StructuredOutput(json_object=True, disable_any_whitespace=True), {"json_object": True}),
        (ty.StructuredOutput(regex="a+"), {"regex": "a+"}),
        (ty.StructuredOutput(ebnf='start: "a"'), {"grammar": 'start: "a"'}),
        (ty.StructuredOutput(choice=ty.Choice(values=["a", "b"])), {"choice": ["a", "b"]}),
        (ty.StructuredOutput(json_schema="{}", disable_additional_properties=True), {"json": {}}),
        (ty.StructuredOutput(json_schema="true", whitespace_pattern=" ?"), {"json": True}),
    ],
)
def test_a_form_of_the_output_is_a_sampling_parameter(message: ty.StructuredOutput, constraint: dict[str, Any]) -> None:
    sampling = call_of(pb.GenerateRequest(text="a", structured_output=message)).sampling
    names = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
    others = {name: getattr(message, name) for name in names if getattr(message, name)}
    assert SamplingParams(**sampling).structured_outputs == StructuredOutputsParams(**constraint, **others)


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (ty.StructuredOutput(json_schema="{"), "structured_output.json_schema"),
        (ty.StructuredOutput(regex=""), "structured_output.regex"),
        (ty.StructuredOutput(choice=ty.Choice()), "structured_output.choice"),
        (ty.StructuredOutput(structural_tag="{}"), "structured_output.structural_tag"),
    ],
)
def test_a_form_that_is_refused_is_named_by_its_path(message: ty.StructuredOutput, path: str) -> None:
    request = pb.GenerateRequest(text="a", structured_output=message)
    with pytest.raises(errors.UserError) as caught:
        SamplingParams(**call_of(request).sampling)
    assert error_details.path_of(caught.value.parameter or "", request) == path


def test_a_call_of_a_tool_can_be_required() -> None:
    chat = ty.ChatPrompt(messages=[{"role": "user"}], tool_choice=ty.TOOL_CHOICE_REQUIRED)
    assert call_of(pb.GenerateRequest(chat=chat)).tool_choice == "required"
    chat.required_tool = "f"
    assert call_of(pb.GenerateRequest(chat=chat)).tool_choice == NamedTool("f")


def bad(path: str, **fields: Any) -> Any:
    return pytest.param(path, pb.GenerateRequest(**({"text": "a"} | fields)), id=f"{path}-{sorted(fields)}")


def chat_of(**fields: Any) -> dict[str, Any]:
    return {"text": None, "chat": ty.ChatPrompt(**({"messages": [ty.ChatMessage(role="user", content="x")]} | fields))}


def tools_of_depth(levels: int) -> str:
    return '[{"a": ' + "[" * (levels - 2) + "]" * (levels - 2) + "}]"


@pytest.mark.parametrize(
    ("path", "request_"),
    [
        bad("prompt", text=None),
        bad("structured_output", structured_output=ty.StructuredOutput()),
        bad("structured_output", structured_output=ty.StructuredOutput(disable_any_whitespace=True)),
        bad("structured_output.json_object", structured_output=ty.StructuredOutput(json_object=False)),
        bad("output.token_bytes", output=ty.OutputOptions(token_bytes=True)),
        bad("stream.max_delay", stream=ty.StreamOptions(max_delay={"seconds": 1})),
        bad("extensions", extensions={"beam_width": 4}),
        bad("add_special_tokens", text=None, token_ids=ty.TokenIds(ids=[1]), add_special_tokens=True),
        bad("stop.time_limit", stop=ty.StopConditions(time_limit={"seconds": -1})),
        bad("stop.time_limit", stop=ty.StopConditions(time_limit={})),
        bad("stop.time_limit", stop=ty.StopConditions(time_limit={"nanos": 2 * 10**9})),
        bad("chat.tools_json", **chat_of(tools_json="[")),
        bad("chat.tools_json", **chat_of(tools_json="{}")),
        bad("chat.tools_json", **chat_of(tools_json="[1]")),
        bad("chat.tools_json", **chat_of(tools_json="[NaN]")),
        bad("chat.tools_json", **chat_of(tools_json=tools_of_depth(MOST_DEPTH))),
        bad("chat.tool_choice", **chat_of(tool_choice=99)),
        bad("chat.required_tool", **chat_of(required_tool="f")),
        bad("chat.required_tool", **chat_of(required_tool="f", tool_choice=ty.TOOL_CHOICE_AUTO)),
        bad("chat.continue_final_message", **chat_of(continue_final_message=True, add_generation_prompt=True)),
        bad("chat.template_kwargs", **chat_of(template_kwargs={"x": math.nan})),
        bad(
            "chat.messages[0].parts",
            **chat_of(messages=[ty.ChatMessage(content="a", parts=[ty.ContentPart(text="b")])]),
        ),
        bad("chat.messages[0].parts[1]", **chat_of(messages=[ty.ChatMessage(parts=[{"text": "a"}, {}])])),
        bad("chat.messages[0].parts[0]", **chat_of(messages=[ty.ChatMessage(parts=[{"image": {}}])])),
        bad("chat.messages[0].parts[0]", **chat_of(messages=[ty.ChatMessage(parts=[{"audio": {}}])])),
        bad("chat.messages[0].parts[0]", **chat_of(messages=[ty.ChatMessage(parts=[{"video": {}}])])),
        bad("chat.mm_processor_kwargs", **chat_of(mm_processor_kwargs={"fps": math.nan})),
    ],
)
def test_what_cannot_be_is_refused_by_its_path(path: str, request_: pb.GenerateRequest) -> None:
    with pytest.raises(errors.UserError) as caught:
        call_of(request_)
    violation = details_of(error_details.failure_of(caught.value, request_))["BadRequest"].field_violations[0]
    assert violation.field == path
    assert "\n" not in str(caught.value)


def test_stream_options_are_of_streams_only() -> None:
    request = pb.GenerateRequest(text="a", stream=ty.StreamOptions(usage_every_message=True, interval_tokens=4))
    assert call_of(request).sampling == {"stream_interval": 4}
    with pytest.raises(errors.UserError) as caught:
        call_of(request, stream=False)
    assert caught.value.parameter == "stream"


@pytest.mark.parametrize("place", ["", "sampling", "chat.messages[1]"])
def test_a_field_of_a_newer_client_is_refused(place: str) -> None:
    request = pb.GenerateRequest(sampling=ty.SamplingParams(), chat=ty.ChatPrompt(messages=[{}, {}]))
    target = {"": request, "sampling": request.sampling, "chat.messages[1]": request.chat.messages[1]}[place]
    target.MergeFromString(b"\xc8\x3e\x01")  # field 1001, a varint
    with pytest.raises(errors.UnsupportedError, match="1001") as caught:
        call_of(pb.GenerateRequest.FromString(request.SerializeToString()))
    assert caught.value.parameter == (place or None)


def test_a_request_of_countless_messages_is_refused_at_once() -> None:
    message = ty.ChatMessage(parts=[ty.ContentPart()] * 20_000)
    with pytest.raises(errors.UserError, match="more than"):
        call_of(pb.GenerateRequest(chat=ty.ChatPrompt(messages=[message])))


@pytest.mark.parametrize("path", ["sampling.logit_bias", "sampling.extra_args", "chat.template_kwargs"])
def test_a_map_of_countless_entries_is_refused_before_it_is_copied(path: str) -> None:
    def request_of(count: int) -> pb.GenerateRequest:
        request = pb.GenerateRequest(chat={"messages": [{"role": "user", "content": "a"}]})
        for number in range(count):
            if path == "sampling.logit_bias":
                request.sampling.logit_bias[number] = 1.0
            elif path == "sampling.extra_args":
                request.sampling.extra_args[f"{number}"].SetInParent()
            else:
                request.chat.template_kwargs.fields[f"{number}"].number_value = 1.0
        return request

    call_of(request_of(reading.MAX_NESTED_MESSAGES))
    with pytest.raises(errors.UserError, match="more than 16384 messages") as caught:
        call_of(request_of(reading.MAX_NESTED_MESSAGES + 1))
    assert caught.value.parameter == path


def test_the_mapping_is_pure() -> None:
    for name in ("reading.py", "replies.py", "pooling_messages.py", "error_details.py"):
        tree = ast.parse((SOURCES / name).read_text())
        imported = {
            (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        roots = {module.partition(".")[0] for module in imported}
        assert not roots & {"jax", "time", "random", "threading", "asyncio", "logging", "grpc", "os", "uuid"}


# Responses: the deltas are the answer, cut.

texts = st.text(st.characters(codec="utf-8"), max_size=4)
entries = st.builds(
    Logprob,
    logprob=st.floats(-50, 0, width=32),
    rank=st.integers(1, 9),
    decoded_token=st.sampled_from(["a", "é", "\ufffd"]),
)
NUM_LOGPROBS = 2


@st.composite
def answers(draw: st.DrawFn) -> tuple[replies.Reply, list[Chunk]]:
    """Draw a reply format and the chunks of a stream of n sequences, in the form that `Serving` makes."""
    n = draw(st.integers(1, 3))
    reply = replies.Reply(
        model="m",
        has_text=draw(st.booleans()),
        has_token_ids=draw(st.booleans()),
        has_prompt_token_ids=draw(st.booleans()),
        num_logprobs=draw(st.sampled_from([None, 0, NUM_LOGPROBS])),
        has_logprob_texts=draw(st.booleans()),
        has_usage_always=draw(st.booleans()),
    )
    schedule = draw(st.lists(st.sets(st.integers(0, n - 1), min_size=1), max_size=6))
    lasts = draw(st.permutations(range(n)))
    chunks, usage, calls = [], TokenUsage(prompt_tokens=4, cached_prompt_tokens=2), dict.fromkeys(range(n), 0)
    for indices, is_end in [(sorted(own), False) for own in schedule] + [([index], True) for index in lasts]:
        ended = set(lasts[: lasts.index(indices[0])]) if is_end else set()
        parts = []
        for index in indices:
            ids = draw(st.lists(st.integers(0, 9), max_size=3))
            count = reply.num_logprobs
            rows = None if count is None else [draw(rows_of(token, count)) for token in ids]
            deltas = []
            if draw(st.booleans()):
                is_new = calls[index] == 0 or draw(st.booleans())
                calls[index] += is_new
                name = "f" if is_new else None
                deltas.append(ToolCallDelta(calls[index] - 1, name and f"id{calls[index]}", name, draw(texts)))
            parts.append(
                Part(
                    index=index,
                    text=draw(texts),
                    reasoning=draw(texts),
                    tool_calls=deltas,
                    token_ids=ids,
                    logprobs=rows,
                    finish_reason=draw(st.sampled_from(["stop", "length", "context", "abort"])) if is_end else None,
                    stop_reason=draw(st.sampled_from([None, 0, 7, "END"])) if is_end else None,
                    seed=11 + index if is_end or draw(st.booleans()) else None,
                )
            )
            usage.completion_tokens += len(ids)
        is_last = is_end and len(ended) == n - 1
        chunks.append(
            Chunk(
                request_id="r",
                outputs=parts,
                prompt=None if chunks else PromptInfo([1, 2, 3, 4], 2),
                usage=dataclasses.replace(usage),
                timing=Timing(0.1, 0.2, 0.3, 0.4) if is_last else None,
                is_last=is_last,
            )
        )
    return reply, chunks


@st.composite
def rows_of(draw: st.DrawFn, token: int, count: int) -> dict[int, Logprob]:
    """Draw a row as the engine makes it: the sampled token, then the `count` likeliest without it."""
    row = {token: draw(entries)}
    others = [other for other in range(count + 1) if other != token][: count - draw(st.integers(0, 1)) if count else 0]
    best = sorted((draw(entries) for _ in others), key=lambda entry: -entry.logprob)
    return row | dict(zip(others, best, strict=True)) if len(others) in (count, count - 1) else row


def whole(chunks: list[Chunk]) -> Chunk:
    """Join the chunks of a stream into the one of a unary answer."""
    parts: dict[int, Part] = {}
    for chunk in chunks:
        for part in chunk.outputs:
            own = parts.setdefault(part.index, Part(part.index, "", "", [], [], None, None, None, None))
            own.text += part.text
            own.reasoning += part.reasoning
            own.tool_calls += part.tool_calls
            own.token_ids = [*own.token_ids, *part.token_ids]
            own.logprobs = (own.logprobs or []) + part.logprobs if part.logprobs is not None else own.logprobs
            own.finish_reason, own.stop_reason, own.seed = part.finish_reason, part.stop_reason, part.seed
    last = chunks[-1]
    return Chunk("r", [parts[index] for index in sorted(parts)], chunks[0].prompt, last.usage, last.timing, True)


def joined(messages: list[pb.StreamGenerateResponse]) -> pb.GenerateResponse:
    """Concatenate a stream's messages as the documentation describes."""
    first, last = messages[0], messages[-1]
    answer = pb.GenerateResponse(
        request_id=first.request_id, model=first.model, prompt=first.prompt, usage=last.usage, timing=last.timing
    )
    outputs: dict[int, ty.Output] = {}
    for message in messages:
        for delta in message.deltas:
            output = outputs.setdefault(delta.index, ty.Output(index=delta.index))
            assert output.finish_reason == 0, "nothing comes after a finish reason"
            output.text += delta.text
            output.reasoning_text += delta.reasoning_text
            if delta.HasField("logprobs"):
                own = output.logprobs
                if not own.logprobs:
                    own.first_position, own.top_k = delta.logprobs.first_position, delta.logprobs.top_k
                assert delta.logprobs.first_position == len(output.token_ids)
                assert len(delta.logprobs.logprobs) == len(delta.token_ids)
                for name in ("logprobs", "ranks", "top_token_ids", "top_logprobs", "texts", "top_texts"):
                    getattr(own, name).extend(getattr(delta.logprobs, name))
            output.token_ids.extend(delta.token_ids)
            for call in delta.tool_calls:
                if call.index == len(output.tool_calls):
                    output.tool_calls.add(id=call.id, name=call.name)
                output.tool_calls[call.index].arguments_json += call.arguments_json
            output.finish_reason = delta.finish_reason
            if delta.WhichOneof("matched"):
                kind = delta.WhichOneof("matched")
                setattr(output, str(kind), getattr(delta, str(kind)))
            if delta.HasField("seed"):
                assert not output.HasField("seed"), "told once"
                output.seed = delta.seed
    answer.outputs.extend(outputs[index] for index in sorted(outputs))
    return answer


@settings(max_examples=150, deadline=None)
@given(answers())
def test_deltas_add_up_to_the_unary_answer(drawn: tuple[replies.Reply, list[Chunk]]) -> None:
    reply, chunks = drawn
    unary = dataclasses.replace(reply, _sent={}, _seeded=set()).response(whole(chunks))
    streaming = dataclasses.replace(reply, _sent={}, _seeded=set())
    messages = [message for chunk in chunks if (message := streaming.delta(chunk)) is not None]
    assert joined(messages) == unary
    for i, message in enumerate(messages):
        assert bool(message.request_id) == message.HasField("prompt") == (i == 0)
        assert message.HasField("usage") == (reply.has_usage_always or i == len(messages) - 1)
        assert message.HasField("timing") == (i == len(messages) - 1)
    assert all(output.finish_reason != 0 for output in unary.outputs)
    assert reply.has_text or not any(output.text for output in unary.outputs)


def test_logprobs_are_packed_row_major() -> None:
    rows = [
        {7: Logprob(-3.0, 9, "g"), 1: Logprob(-0.5, 1, "a"), 2: Logprob(-1.0, 2, "b")},  # sampled outside the likeliest
        {2: Logprob(-1.0, 2, "b"), 1: Logprob(-0.5, 1, "a")},  # sampled the second
    ]
    packed = replies.logprobs_of(rows, 2, 5, with_texts=True)
    assert (packed.first_position, packed.top_k) == (5, 2)
    assert list(packed.logprobs) == [-3.0, -1.0] and list(packed.ranks) == [9, 2]
    assert list(packed.top_token_ids) == [1, 2, 1, 2] and list(packed.top_logprobs) == [-0.5, -1.0, -0.5, -1.0]
    assert list(packed.texts) == ["g", "b"] and list(packed.top_texts) == ["a", "b", "a", "b"]
    alone = replies.logprobs_of([{7: Logprob(-3.0, 9, "g")}], 0, 0, with_texts=False)
    assert list(alone.logprobs) == [-3.0] and not alone.top_token_ids and not alone.texts


def test_a_chunk_without_news_is_not_a_message() -> None:
    reply = replies.Reply(model="m", has_token_ids=False)
    part = Part(0, "", "", [], [5], None, None, None, None)
    first = Chunk("r", [part], PromptInfo([1], 0), TokenUsage(), None, False)
    assert reply.delta(first) is not None
    assert reply.delta(dataclasses.replace(first, prompt=None)) is None
    last = reply.delta(Chunk("r", [dataclasses.replace(part, finish_reason="stop")], None, TokenUsage(), None, True))
    assert last is not None and last.deltas[0].finish_reason == ty.FINISH_REASON_STOP


def test_defaults_are_all_told() -> None:
    told = replies.default_sampling_of(SamplingParams(temperature=0.6, top_k=20))
    without = {"seed", "logit_bias", "allowed_token_ids", "bad_words", "extra_args", "skip_reading_prefix_cache"}
    without.add("beam_search")
    assert {field.name for field, _ in told.ListFields()} == set(ty.SamplingParams.DESCRIPTOR.fields_by_name) - without
    assert told.temperature == 0.6 and told.top_k == 20
    stop = replies.default_stop_of(SamplingParams(), None)
    assert not stop.HasField("max_tokens") and stop.HasField("ignore_eos")


# Errors: each row of the map.


def details_of(failure: error_details.Failure) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for packed in failure.status.details:
        name = packed.TypeName().rpartition(".")[2]
        detail = getattr(error_details_pb2, name)()
        assert packed.Unpack(detail)
        found[name] = detail
    return found


SAID = "It has failed."
ERRORS = [
    (errors.UserError(SAID, "top_p"), "INVALID_ARGUMENT", "INVALID_PARAMETER", {"BadRequest"}),
    (errors.UnsupportedError(SAID, "bad_words"), "INVALID_ARGUMENT", "UNSUPPORTED_PARAMETER", {"BadRequest"}),
    (errors.ContextLengthError(SAID, 9, 8), "INVALID_ARGUMENT", "CONTEXT_LENGTH_EXCEEDED", {"BadRequest"}),
    (errors.NotFoundError(SAID, "model"), "NOT_FOUND", "MODEL_NOT_FOUND", set()),
    (errors.FeatureDisabledError(SAID, "adapter"), "FAILED_PRECONDITION", "FEATURE_DISABLED", set()),
    (errors.RequestIdInUseError(SAID, "request_id"), "ALREADY_EXISTS", "REQUEST_ID_IN_USE", set()),
    (errors.OverloadedError(SAID, 1.5), "RESOURCE_EXHAUSTED", "QUEUE_FULL", {"RetryInfo"}),
    (errors.SlowConsumerError(SAID), "RESOURCE_EXHAUSTED", "SLOW_CONSUMER", set()),
    (errors.UnavailableError(SAID), "UNAVAILABLE", "NOT_READY", set()),
    (errors.DrainingError(SAID), "UNAVAILABLE", "DRAINING", set()),
    (errors.EngineDeadError(SAID), "UNAVAILABLE", "ENGINE_DEAD", set()),
    (errors.RequestFailedError(SAID), "INTERNAL", "ENGINE_ERROR", set()),
    (errors.DeadlineError(SAID), "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", set()),
    (AuthError(SAID, True), "UNAUTHENTICATED", "AUTH_MISSING", set()),
    (AuthError(SAID, False), "UNAUTHENTICATED", "AUTH_INVALID", set()),
    (AdminRequiredError(SAID), "PERMISSION_DENIED", "ADMIN_REQUIRED", set()),
]


@pytest.mark.parametrize(
    ("error", "code", "reason", "others"),
    ERRORS,
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_the_error_map(error: Exception, code: str, reason: str, others: set[str]) -> None:
    failure = error_details.failure_of(error, pb.GenerateRequest(token_ids=ty.TokenIds()), "r1")
    details = details_of(failure)
    info = details["ErrorInfo"]
    assert (failure.code, info.reason, info.domain) == (code, reason, "jaxllm")
    assert set(details) == {"ErrorInfo"} | others
    assert failure.status.message == SAID and info.metadata["request_id"] == "r1"
    if isinstance(error, errors.OverloadedError):
        assert failure.pushback_ms == 1500 and details["RetryInfo"].retry_delay.ToMilliseconds() == 1500
    else:
        assert failure.pushback_ms is None
    if isinstance(error, errors.ContextLengthError):
        assert info.metadata["prompt_tokens"] == "9" and info.metadata["max_model_len"] == "8"
        assert details["BadRequest"].field_violations[0].field == "token_ids"
    if code != "INTERNAL":
        assert failure.code != "UNKNOWN"


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("stop", "stop.stop_strings"),
        ("max_tokens", "stop.max_tokens"),
        ("detokenize", "output.text"),
        ("include_stop_str_in_output", "stop.include_stop"),
        ("stream_interval", "stream.interval_tokens"),
        ("prompt_logprobs", "output.prompt_logprobs"),
        ("messages", "chat.messages"),
        ("prompt", "chat"),
        ("cache_salt", "cache_salt"),
        ("chat.messages[3].parts", "chat.messages[3].parts"),
    ],
)
def test_names_of_the_engine_become_paths(name: str, path: str) -> None:
    assert error_details.path_of(name, pb.GenerateRequest(chat=ty.ChatPrompt())) == path


def test_every_sampling_parameter_has_a_path_that_exists() -> None:
    names = {own.name for own in dataclasses.fields(SamplingParams)} - {"output_kind"}
    assert names == set(names_in(SamplingParams, GRPC).values())
    for name in names:
        descriptor = pb.GenerateRequest.DESCRIPTOR
        for step in error_details.path_of(name, None).split("."):
            assert descriptor is not None and step in descriptor.fields_by_name, name
            descriptor = descriptor.fields_by_name[step].message_type


def test_foreign_errors_tell_nothing() -> None:
    for error in (ValueError("secret /home/x 0x7f"), RuntimeError("secret"), errors.EngineError("secret")):
        told = error_details.failure_of(error)
        assert told.code == "INTERNAL" and b"secret" not in told.status.SerializeToString()


@pytest.mark.parametrize("character", ["a", "é", "漢", "\ud800"])
def test_an_error_stays_under_two_kib(character: str) -> None:
    error = errors.UserError(character * 10_000, "chat.messages" + "x" * 1000)
    failure = error_details.failure_of(error, None, "i" * 128)
    percent_encoded = sum(1 if 32 <= byte < 127 else 3 for byte in failure.status.message.encode())
    assert percent_encoded + failure.status.ByteSize() <= 2048
