"""Convert `jaxllm.v1` requests to `Call`s. Pure.

Every field is converted or refused by its path, such as `sampling.top_p`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import ListValue, Struct, Value
from google.protobuf.unknown_fields import UnknownFieldSet

from jaxllm.client.options import GENERATE_FIELDS, STREAM_FIELDS
from jaxllm.errors import UnsupportedError, UserError
from jaxllm.media.image_part import NamedPart
from jaxllm.sampling_params import SamplingParams
from jaxllm.v1 import inference_pb2, types_pb2
from jaxllm_server.generation.calls import Call, NamedTool, ToolChoice
from jaxllm_server.shared import strict_json

# Submessages per request; the four million of 8 MiB take seconds.
MAX_NESTED_MESSAGES = 16_384
_MAX_UNKNOWN_BYTES = 4096
_MAX_DURATION_SECONDS = 315_576_000_000  # google.protobuf.Duration's
_PART = 1 << 16  # values copied in a millisecond
_EXACT_INTEGERS = 2**53  # doubles are exact up to here


def _sampling_names() -> dict[str, dict[str, str]]:
    names: dict[str, dict[str, str]] = {}
    for name, path in {**GENERATE_FIELDS, **STREAM_FIELDS}.items():
        section, _, own = path.partition(".")
        if own and name in SamplingParams.__dataclass_fields__:
            names.setdefault(section, {})[own] = name
    return names


# Section of GenerateRequest -> field -> name in SamplingParams.
SAMPLING_NAMES: Mapping[str, Mapping[str, str]] = _sampling_names()
_TOOL_CHOICES: Mapping[int, ToolChoice] = {
    types_pb2.TOOL_CHOICE_UNSPECIFIED: None,
    types_pb2.TOOL_CHOICE_NONE: "none",
    types_pb2.TOOL_CHOICE_AUTO: "auto",
    types_pb2.TOOL_CHOICE_REQUIRED: "required",
}
_EARLY_STOPPING: Mapping[int, bool | str] = {
    types_pb2.EARLY_STOPPING_UNSPECIFIED: False,
    types_pb2.EARLY_STOPPING_ALWAYS: True,
    types_pb2.EARLY_STOPPING_NEVER: "never",
}
_CONSTRAINTS = {
    "json_schema": "json",
    "json_object": "json_object",
    "regex": "regex",
    "ebnf": "grammar",
    "choice": "choice",
    "structural_tag": "structural_tag",  # refused by StructuredOutputsParams
}


def call_of(request: inference_pb2.GenerateRequest, request_id: str, *, stream: bool, max_json_depth: int) -> Call:
    """Convert a request to a call; unset fields are absent from `Call.sampling`, so that defaults apply.

    `max_json_depth` is the limit of HTTP bodies. Raises UserError with the path of a field that is unknown, unsupported
    or contradicts another; values are checked later.
    """
    refuse_unknown_fields(request)
    _refuse_unbuilt(request, stream=stream)
    stop = request.stop
    return Call(
        model=request.model,
        **_prompt_of(request, "prompt", max_json_depth),
        sampling=_sampling_of(request),
        beams=_beams_of(request.sampling.beam_search) if request.sampling.HasField("beam_search") else None,
        stream=stream,
        request_id=request_id,
        priority=request.priority,
        cache_salt=request.cache_salt or None,
        adapter=request.adapter,
        time_limit=_seconds(stop.time_limit, "stop.time_limit") if stop.HasField("time_limit") else None,
        include_reasoning=request.output.reasoning if request.output.HasField("reasoning") else True,
    )


def tokenize_call_of(request: inference_pb2.TokenizeRequest, *, max_json_depth: int) -> Call:
    refuse_unknown_fields(request)
    return Call(model=request.model, **_prompt_of(request, "input", max_json_depth))


def detokenize_ids_of(request: inference_pb2.DetokenizeRequest) -> list[int]:
    refuse_unknown_fields(request)
    return _listed(request.token_ids)


def _sampling_of(request: inference_pb2.GenerateRequest) -> dict[str, Any]:
    sampling: dict[str, Any] = {}
    for section, names in SAMPLING_NAMES.items():
        if request.HasField(section):
            for descriptor, value in getattr(request, section).ListFields():
                if (name := names.get(descriptor.name)) is not None:
                    sampling[name] = value if isinstance(value, bool | int | float) else _plain(value)
    if request.HasField("structured_output"):
        sampling["structured_outputs"] = _structured_outputs_of(request.structured_output)
    return sampling


def _beams_of(message: types_pb2.BeamSearch) -> dict[str, Any]:
    if message.early_stopping not in _EARLY_STOPPING:
        raise UserError(f"early_stopping {message.early_stopping} is not known.", "sampling.beam_search.early_stopping")
    given: dict[str, Any] = {"early_stopping": _EARLY_STOPPING[message.early_stopping]}
    return given | ({"length_penalty": message.length_penalty} if message.HasField("length_penalty") else {})


def _structured_outputs_of(message: types_pb2.StructuredOutput) -> dict[str, Any]:
    kind = message.WhichOneof("constraint")
    if kind is None:
        raise UserError("structured_output names no constraint.", "structured_output")
    if kind == "json_object" and not message.json_object:
        raise UserError("structured_output.json_object must be true.", "structured_output.json_object")
    given = {
        _CONSTRAINTS[kind]: list(message.choice.values) if kind == "choice" else getattr(message, kind),
        "disable_any_whitespace": message.disable_any_whitespace,
        "disable_additional_properties": message.disable_additional_properties,
    }
    return given | (
        {"whitespace_pattern": message.whitespace_pattern} if message.HasField("whitespace_pattern") else {}
    )


def _plain(value: Any) -> Any:
    if isinstance(value, types_pb2.Numbers):
        return _listed(value.values)
    if isinstance(value, Message):
        return {own.name: getattr(value, own.name) for own in value.DESCRIPTOR.fields}
    if isinstance(value, Mapping):
        return {key: _plain(own) if isinstance(own, Message) else own for key, own in value.items()}
    return _listed(value)


def _listed(values: Sequence[Any]) -> list[Any]:
    """Copy in parts, between which other threads get the GIL."""
    return list(chain.from_iterable(values[at : at + _PART] for at in range(0, len(values), _PART)))


def _refuse_unbuilt(request: inference_pb2.GenerateRequest, *, stream: bool) -> None:
    if request.output.token_bytes:
        raise UnsupportedError("output.token_bytes is not supported by jaxllm yet.", "output.token_bytes")
    if request.HasField("stream"):
        if not stream:
            raise UserError("stream is of StreamGenerate only: leave it out or call StreamGenerate.", "stream")
        if request.stream.HasField("max_delay"):
            raise UnsupportedError("stream.max_delay is not supported by jaxllm yet.", "stream.max_delay")
    for key in request.extensions.fields:
        raise UserError(f"extensions: the key {key[:64]!r} is not known; this server knows none.", "extensions")


def _prompt_of(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, oneof: str, max_json_depth: int
) -> dict[str, Any]:
    kind = request.WhichOneof(oneof)  # pyright: ignore[reportArgumentType]
    if kind is None:
        names = [own.name for own in request.DESCRIPTOR.oneofs_by_name[oneof].fields]
        raise UserError(f"there is no prompt: set one of {', '.join(names)}.", oneof)
    if kind == "text":
        add = request.add_special_tokens if request.HasField("add_special_tokens") else None
        return {"prompt": request.text, "add_special_tokens": add}
    if request.HasField("add_special_tokens"):
        raise UserError("add_special_tokens is of a text prompt only.", "add_special_tokens")
    if kind == "token_ids":
        assert isinstance(request, inference_pb2.GenerateRequest)
        return {"prompt": _listed(request.token_ids.ids)}
    return _chat_of(request.chat, max_json_depth)


def _chat_of(chat: types_pb2.ChatPrompt, max_json_depth: int) -> dict[str, Any]:
    continues = chat.continue_final_message
    adds = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not continues
    if continues and adds:
        message = "continue_final_message and add_generation_prompt = true exclude each other."
        raise UserError(message, "chat.continue_final_message")
    if chat.tool_choice not in _TOOL_CHOICES:
        raise UserError(f"tool_choice {chat.tool_choice} is not known.", "chat.tool_choice")
    choice: ToolChoice = _TOOL_CHOICES[chat.tool_choice]
    if chat.required_tool:
        if choice != "required":
            raise UserError("required_tool needs tool_choice = TOOL_CHOICE_REQUIRED.", "chat.required_tool")
        choice = NamedTool(chat.required_tool)
    return {
        "messages": [_message_of(message, f"chat.messages[{i}]") for i, message in enumerate(chat.messages)],
        "tools": _tools_of(chat.tools_json, max_json_depth) if chat.tools_json else None,
        "tool_choice": choice,
        "template_kwargs": _from_struct(chat.template_kwargs, "chat.template_kwargs"),
        "mm_processor_kwargs": _from_struct(chat.mm_processor_kwargs, "chat.mm_processor_kwargs"),
        "add_generation_prompt": adds,
        "continue_final_message": continues,
    }


def _message_of(message: types_pb2.ChatMessage, path: str) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role}
    if message.parts:
        if message.HasField("content"):
            raise UserError(f"{path} has content and parts: give one of them.", f"{path}.parts")
        plain["content"] = [_part_of(part, f"{path}.parts[{i}]") for i, part in enumerate(message.parts)]
    elif message.HasField("content"):
        plain["content"] = message.content
    else:
        plain["content"] = None
    if message.name:
        plain["name"] = message.name
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    if message.reasoning_text:
        plain["reasoning_content"] = message.reasoning_text
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
            for call in message.tool_calls
        ]
    return plain


def _part_of(part: types_pb2.ContentPart, path: str) -> dict[str, Any]:
    kind = part.WhichOneof("part")
    if kind == "text":
        return {"type": "text", "text": part.text}
    media = None if kind is None else getattr(part, kind)
    source = None if media is None else media.WhichOneof("source")
    if kind is None or media is None or source is None:
        raise UserError(f"{path} is empty.", path)
    name = f"{kind}_url" if source == "url" else kind
    return NamedPart(path, type=name, **{name: getattr(media, source)})


def _tools_of(text: str, max_json_depth: int) -> list[dict[str, Any]]:
    path = "chat.tools_json"
    try:
        # One level deeper in an HTTP body.
        tools = strict_json.read_value(text.encode(), max_json_depth - 1, "tools_json")
    except UserError as error:
        raise UserError(str(error), path) from error
    if not isinstance(tools, list) or any(not isinstance(tool, dict) for tool in tools):
        raise UserError("tools_json must be a JSON array of objects.", path)
    return tools


def _from_struct(struct: Struct, path: str) -> dict[str, Any]:
    return {key: _from_value(value, path) for key, value in struct.fields.items()}


def _from_value(value: Value, path: str) -> Any:
    """Convert a JSON value to Python; Struct stores doubles, so integral numbers become int."""
    kind = value.WhichOneof("kind")
    if kind is None or kind == "null_value":
        return None
    if kind == "struct_value":
        return _from_struct(value.struct_value, path)
    if kind == "list_value":
        items: ListValue = value.list_value
        return [_from_value(item, path) for item in items.values]
    if kind == "number_value":
        number = value.number_value
        if not math.isfinite(number):
            raise UserError(f"{path} holds a number that is not finite.", path)
        return int(number) if number.is_integer() and abs(number) <= _EXACT_INTEGERS else number
    return value.string_value if kind == "string_value" else value.bool_value


def _seconds(duration: Duration, path: str) -> float:
    seconds, nanos = duration.seconds, duration.nanos
    if not (0 <= seconds <= _MAX_DURATION_SECONDS and 0 <= nanos < 10**9 and seconds + nanos > 0):
        raise UserError(f"{path} must be a duration above zero.", path)
    return seconds + nanos / 1e9


def refuse_unknown_fields(request: Message) -> None:
    """Raise an error for unknown fields, which protobuf keeps silently, or too many submessages.

    Over 4 KiB of unknown fields are not named: protobuf creates an object for each, 2 s for 8 MiB.
    """
    found = list(islice(_messages_in(request), MAX_NESTED_MESSAGES + 1))
    if len(found) > MAX_NESTED_MESSAGES:
        raise _too_many(found[-1][1])
    known = type(request)()
    known.CopyFrom(request)
    known.DiscardUnknownFields()
    num_unknown = request.ByteSize() - known.ByteSize()
    if num_unknown > _MAX_UNKNOWN_BYTES:
        raise UnsupportedError(f"the request has {num_unknown} bytes of fields that this server does not know.")
    for message, path in found if num_unknown else ():
        unknown = UnknownFieldSet(message)
        if len(unknown):
            at = path or "the request"
            number = unknown[0].field_number
            raise UnsupportedError(f"{at} has a field number {number} that this server does not know.", path or None)


def _too_many(path: str) -> UserError:
    return UserError(f"the request holds more than {MAX_NESTED_MESSAGES} messages.", path or None)


def _messages_in(message: Message, path: str = "") -> Iterator[tuple[Message, str]]:
    """Yield a message and its submessages with paths; a Struct is one."""
    yield message, path
    for descriptor, value in message.ListFields():
        kind = descriptor.message_type
        if kind is None:
            continue
        below = f"{path}.{descriptor.name}" if path else descriptor.name
        entries = value.fields if kind is Struct.DESCRIPTOR else value if kind.GetOptions().map_entry else None
        if entries is not None:
            if len(entries) > MAX_NESTED_MESSAGES:  # 10 µs per copy
                raise _too_many(below)
            continue
        if isinstance(value, Message):
            yield from _messages_in(value, below)
        else:
            for i, item in enumerate(value):
                yield from _messages_in(item, f"{below}[{i}]")
