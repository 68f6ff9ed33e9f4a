"""Builds the messages that the client sends from what its methods are called with.

Names of options are those of `SamplingParams` where the thing is the same. Knows the messages of the API and no
network; ranges are the server's to check, which has one validator for every way in.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

from jaxllm.errors import UserError
from jaxllm.v1 import control_pb2, inference_pb2, types_pb2


class GenerateOptions(TypedDict, total=False):
    """What a call may say beside its prompt; None, like absence, leaves it to the model's defaults."""

    temperature: float | None  # 0 is greedy
    top_p: float | None
    top_k: int | None  # 0 or -1: all tokens
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    seed: int | None
    n: int | None  # sequences; read them from `outputs`
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None  # the server refuses what it has not built yet, by name
    bad_words: Sequence[str] | None
    max_tokens: int | None  # None: until the model's context is full
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop_str_in_output: bool | None
    ignore_eos: bool | None
    time_limit: float | None  # seconds after which what there is is returned; `timeout` instead fails the call
    truncate_prompt_tokens: int | None  # keep this many, the last ones; -1: as many as the model holds
    detokenize: bool | None  # False: token ids only
    return_token_ids: bool | None  # False saves their bytes
    return_prompt_token_ids: bool | None
    logprobs: int | None  # likeliest tokens to report beside the sampled one
    logprob_texts: bool | None  # with the text of each; on unless False when `logprobs` is given
    prompt_logprobs: int | None
    logprob_token_ids: Sequence[int] | None
    skip_special_tokens: bool | None
    include_reasoning: bool | None
    structured_outputs: Mapping[str, Any] | None  # one of json_schema, json_object, regex, ebnf, choice, structural_tag
    model: str | None
    adapter: str | None
    request_id: str | None  # unique among the server's requests; what `abort` takes
    priority: int | None  # lower goes first
    cache_salt: str | None
    add_special_tokens: bool | None  # of a text prompt


class StreamOptions(GenerateOptions, total=False):
    """What only a stream may say."""

    stream_interval: int | None  # tokens that the server gathers for one delta
    usage_every_message: bool | None  # keep the stream's `usage` up to date on the way


class ChatOptions(TypedDict, total=False):
    """What only a conversation may say."""

    tools: Sequence[Mapping[str, Any]] | None  # in OpenAI's form
    tool_choice: Literal["none", "auto"] | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


class ChatGenerateOptions(GenerateOptions, ChatOptions, total=False):
    """The options of `chat`."""


class ChatStreamOptions(StreamOptions, ChatOptions, total=False):
    """The options of `stream_chat`."""


# Keyword to field of GenerateRequest.
_GENERATE_FIELDS = {
    **{
        name: f"sampling.{name}"
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
            *("seed", "n", "logit_bias", "allowed_token_ids", "bad_words"),
        )
    },
    **{
        name: f"stop.{name}"
        for name in (
            *("max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "time_limit", "truncate_prompt_tokens"),
        )
    },
    "stop": "stop.stop_strings",
    "include_stop_str_in_output": "stop.include_stop",
    **{
        name: f"output.{name}"
        for name in ("logprobs", "logprob_texts", "prompt_logprobs", "logprob_token_ids", "skip_special_tokens")
    },
    "detokenize": "output.text",
    "return_token_ids": "output.token_ids",
    "return_prompt_token_ids": "output.prompt_token_ids",
    "include_reasoning": "output.reasoning",
    "structured_outputs": "structured_output",
    **{name: name for name in ("model", "adapter", "request_id", "priority", "cache_salt", "add_special_tokens")},
}
_STREAM_FIELDS = {"stream_interval": "stream.interval_tokens", "usage_every_message": "stream.usage_every_message"}
_CHAT_FIELDS = {
    "tools": "chat.tools_json",
    "tool_choice": "chat.tool_choice",
    "chat_template_kwargs": "chat.template_kwargs",
    "add_generation_prompt": "chat.add_generation_prompt",
    "continue_final_message": "chat.continue_final_message",
}
_KEYWORDS = {field: name for name, field in {**_GENERATE_FIELDS, **_STREAM_FIELDS, **_CHAT_FIELDS}.items()}

_NEVER_EMPTY = ("allowed_token_ids", "logprob_token_ids", "request_id", "cache_salt")  # on the wire, empty is not given
_TOOL_CHOICES = {"none": types_pb2.TOOL_CHOICE_NONE, "auto": types_pb2.TOOL_CHOICE_AUTO}
_PAUSE_MODES = {
    "abort": control_pb2.PAUSE_MODE_ABORT,
    "wait": control_pb2.PAUSE_MODE_WAIT,
    "keep": control_pb2.PAUSE_MODE_KEEP,
}
_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")


def generate_request(
    prompt: str | Sequence[int], options: Mapping[str, Any], *, is_stream: bool = False
) -> inference_pb2.GenerateRequest:
    """Build the request of a text or token-id prompt.

    Raises:
        UserError: naming the option that is unknown or of a wrong type.
    """
    request = inference_pb2.GenerateRequest()
    _set_prompt(request, prompt)
    _set_options(request, options, {**_GENERATE_FIELDS, **(_STREAM_FIELDS if is_stream else {})})
    return request


def chat_request(
    messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], *, is_stream: bool = False
) -> inference_pb2.GenerateRequest:
    """Build the request of a conversation: `messages` in OpenAI's form.

    Raises:
        UserError: naming the option, or the message and its key, that is unknown or of a wrong type.
    """
    request = inference_pb2.GenerateRequest()
    request.chat.messages.extend(_chat_messages(messages))
    fields = {**_GENERATE_FIELDS, **_CHAT_FIELDS, **(_STREAM_FIELDS if is_stream else {})}
    _set_options(request, options, fields)
    return request


def tokenize_request(
    prompt: str | Sequence[Mapping[str, Any]], model: str, add_special_tokens: bool | None, options: Mapping[str, Any]
) -> inference_pb2.TokenizeRequest:
    """Build the request that tokenizes a text or a conversation; `options` are a conversation's."""
    request = inference_pb2.TokenizeRequest()
    _set(request, "model", "model", model)
    if isinstance(prompt, str):
        _set(request, "text", "prompt", prompt)
        fields = {}
    else:
        request.chat.messages.extend(_chat_messages(prompt))
        fields = _CHAT_FIELDS
    if add_special_tokens is not None:
        _set(request, "add_special_tokens", "add_special_tokens", add_special_tokens)
    _set_options(request, options, fields)
    return request


def detokenize_request(token_ids: Sequence[int], model: str) -> inference_pb2.DetokenizeRequest:
    """Build the request that turns token ids into text."""
    request = inference_pb2.DetokenizeRequest()
    _set(request, "token_ids", "token_ids", token_ids)
    _set(request, "model", "model", model)
    return request


def abort_request(request_ids: str | Sequence[str]) -> control_pb2.AbortRequest:
    """Build the request that ends others."""
    request = control_pb2.AbortRequest()
    ids = [request_ids] if isinstance(request_ids, str) else request_ids
    _set(request, "request_ids", "request_ids", ids)
    return request


def pause_request(mode: str, clear_cache: bool | None) -> control_pb2.PauseGenerationRequest:
    """Build the request that stops generating."""
    request = control_pb2.PauseGenerationRequest(mode=_choice("mode", mode, _PAUSE_MODES))
    if clear_cache is not None:
        _set(request, "clear_cache", "clear_cache", clear_cache)
    return request


def keyword_of(field: str) -> str:
    """Name the option that fills `field` of a request, as in `stop.stop_strings`; other fields by themselves."""
    section, _, rest = field.partition(".")
    if section in ("sampling", "stop", "output", "stream", "chat") and rest:
        return _KEYWORDS.get(field, rest)
    return _KEYWORDS.get(section, {"text": "prompt", "token_ids": "prompt", "chat": "messages"}.get(section, field))


def _set_prompt(request: inference_pb2.GenerateRequest, prompt: Any) -> None:
    if isinstance(prompt, str):
        _set(request, "text", "prompt", prompt)
        return
    if isinstance(prompt, Mapping | bytes) or not hasattr(prompt, "__iter__"):
        raise UserError(f"prompt must be a text or a list of token ids, got {_shown(prompt)}.", "prompt", prompt)
    ids = list(prompt)
    if any(isinstance(item, str | list | tuple | Mapping) for item in ids[:1]):
        raise UserError(
            "prompt must be one text or one list of token ids: make a call for each prompt, and chat() for messages.",
            "prompt",
            prompt,
        )
    request.token_ids.SetInParent()
    _set(request, "token_ids.ids", "prompt", ids)


def _set_options(request: Message, options: Mapping[str, Any], fields: Mapping[str, str]) -> None:
    for name, value in options.items():
        if name not in fields:
            near = difflib.get_close_matches(name, [*fields, "timeout"], n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UserError(f"{name!r} is not an option of this call.{hint}", name, value)
        if value is None:
            continue
        if name == "stop" and isinstance(value, str):
            value = [value]
        elif name == "tools":
            value = _json(name, list(value) if isinstance(value, Sequence) else value)
        elif name == "tool_choice":
            value = _choice(name, value, _TOOL_CHOICES)
        elif name == "logprobs" and value is True:
            value = 1  # as SamplingParams reads it
        elif name in _NEVER_EMPTY and isinstance(value, Sequence) and not value:
            raise UserError(f"{name} must not be empty.", name, value)
        if name == "structured_outputs":
            _set_structure(request, value)
        else:
            _set(request, fields[name], name, value)
    if options.get("logprobs") is not None and options.get("logprob_texts") is None:
        _set(request, "output.logprob_texts", "logprob_texts", True)


def _set_structure(request: Message, value: object) -> None:
    """Fill the one constraint that `value`, a mapping, holds."""
    names = [field.name for field in types_pb2.StructuredOutput.DESCRIPTOR.fields]
    if not isinstance(value, Mapping) or len(value) != 1 or next(iter(value)) not in names:
        expected = ", ".join(names)
        message = f"structured_outputs must be a mapping with one of {expected}, got {_shown(value)}."
        raise UserError(message, "structured_outputs", value)
    (name, constraint), *_ = value.items()
    if name == "choice":
        _set(request, "structured_output.choice.values", "structured_outputs", constraint)
        return
    if name in ("json_schema", "structural_tag") and not isinstance(constraint, str):
        constraint = _json("structured_outputs", constraint)
    _set(request, f"structured_output.{name}", "structured_outputs", constraint)


def _chat_messages(messages: object) -> Iterator[types_pb2.ChatMessage]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise UserError(
            f"messages must be a list of {{'role': ..., 'content': ...}}, got {_shown(messages)}.", "messages", messages
        )
    for number, message in enumerate(messages):
        yield _chat_message(f"messages[{number}]", message)


def _chat_message(where: str, given: object) -> types_pb2.ChatMessage:
    if not isinstance(given, Mapping):
        raise UserError(f"{where} must be a mapping with a role and a content, got {_shown(given)}.", where, given)
    message = types_pb2.ChatMessage()
    if not given.get("role"):
        raise UserError(f"{where} needs a role.", f"{where}.role")
    for key, value in given.items():
        name = f"{where}.{key}"
        if key not in _MESSAGE_KEYS:
            near = difflib.get_close_matches(str(key), _MESSAGE_KEYS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UserError(f"{name} is not a part of a message.{hint}", name, value)
        if value is None:
            continue
        if key == "content" and not isinstance(value, str):
            message.parts.extend(_parts(name, value))
        elif key == "tool_calls":
            message.tool_calls.extend(_tool_calls(name, value))
        else:
            _set(message, "reasoning_text" if key.startswith("reasoning") else key, name, value)
    return message


def _parts(where: str, parts: object) -> Iterator[types_pb2.ContentPart]:
    if isinstance(parts, Mapping) or not isinstance(parts, Sequence):
        raise UserError(f"{where} must be a text or a list of parts, got {_shown(parts)}.", where, parts)
    for number, given in enumerate(parts):
        if not isinstance(given, Mapping) or given.get("type", "text") != "text" or "text" not in given:
            kind = given.get("type") if isinstance(given, Mapping) else None
            shown = _shown(kind or given)
            message = f"{where}[{number}] must be {{'type': 'text', 'text': ...}}: only text can be sent, got {shown}."
            raise UserError(message, f"{where}[{number}]", given)
        part = types_pb2.ContentPart()
        _set(part, "text", f"{where}[{number}].text", given["text"])
        yield part


def _tool_calls(where: str, calls: object) -> Iterator[types_pb2.ToolCall]:
    if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
        raise UserError(f"{where} must be a list of tool calls, got {_shown(calls)}.", where, calls)
    for number, given in enumerate(calls):
        name = f"{where}[{number}]"
        function = given.get("function") if isinstance(given, Mapping) else None
        if not isinstance(function, Mapping) or not function.get("name"):
            expected = "{'id': ..., 'function': {'name': ..., 'arguments': ...}}"
            message = f"{name} must be {expected}, got {_shown(given)}."
            raise UserError(message, name, given)
        arguments = function.get("arguments") or "{}"
        call = types_pb2.ToolCall()
        _set(call, "id", f"{name}.id", given.get("id") or "")
        _set(call, "name", f"{name}.function.name", function["name"])
        if not isinstance(arguments, str):
            arguments = _json(f"{name}.function.arguments", arguments)
        _set(call, "arguments_json", f"{name}.function.arguments", arguments)
        yield call


def _set(message: Message, field: str, name: str, value: Any) -> None:
    """Set `field` (a path, as in `sampling.top_p`) to `value`, or tell what `name` must be instead."""
    *path, leaf = field.split(".")
    for step in path:
        message = getattr(message, step)
    descriptor = message.DESCRIPTOR.fields_by_name[leaf]
    try:
        if not _fits(descriptor, value):
            raise TypeError(name)
        if descriptor.message_type is None and not descriptor.is_repeated:
            setattr(message, leaf, value)
        elif descriptor.message_type is Duration.DESCRIPTOR:
            getattr(message, leaf).FromNanoseconds(round(value * 1e9))
        elif descriptor.is_repeated and descriptor.message_type is None:
            getattr(message, leaf).extend(value)
        else:  # a map or a Struct
            getattr(message, leaf).update(value)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise UserError(f"{name} must be {_expected(descriptor)}, got {_shown(value)}.", name, value) from error


def _fits(field: Any, value: Any) -> bool:
    """Whether `value` is of the kind that `field` is; protobuf itself takes True as 1 and bytes as text."""
    if field.message_type is not None:
        is_mapping = field.is_repeated or field.message_type is Struct.DESCRIPTOR
        if not is_mapping:
            return not isinstance(value, bool)
        if not isinstance(value, Mapping) or field.message_type is Struct.DESCRIPTOR:
            return isinstance(value, Mapping)
        parts = [field.message_type.fields_by_name[part] for part in ("key", "value")]
        return all(_is_scalar(part, own) for item in value.items() for part, own in zip(parts, item, strict=True))
    if field.is_repeated:
        return not isinstance(value, str | bytes | Mapping) and all(_is_scalar(field, item) for item in value)
    return _is_scalar(field, value)


def _is_scalar(field: Any, value: object) -> bool:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return isinstance(value, str)
    return isinstance(value, bool) == (field.cpp_type == FieldDescriptor.CPPTYPE_BOOL)


def _expected(field: Any) -> str:
    """Say what a field takes, for an error message."""
    if field.message_type is Duration.DESCRIPTOR:
        return "a number of seconds"
    if field.message_type is Struct.DESCRIPTOR:
        return "a mapping of names to JSON values"
    if field.message_type is not None:
        return "a mapping of token ids to numbers"
    one, many = {
        FieldDescriptor.CPPTYPE_BOOL: ("True or False", "flags"),
        FieldDescriptor.CPPTYPE_DOUBLE: ("a number", "numbers"),
        FieldDescriptor.CPPTYPE_STRING: ("a valid text", "valid texts"),
        FieldDescriptor.CPPTYPE_UINT32: (f"an integer from 0 to {2**32 - 1}", f"integers from 0 to {2**32 - 1}"),
        FieldDescriptor.CPPTYPE_INT32: (f"an integer from {-(2**31)} to {2**31 - 1}", "integers"),
        FieldDescriptor.CPPTYPE_INT64: (f"an integer from {-(2**63)} to {2**63 - 1}", "integers"),
    }[field.cpp_type]
    return f"a list of {many}" if field.is_repeated else one


def _choice(name: str, value: object, choices: Mapping[str, int]) -> Any:
    """Return the enum number that `value` names."""
    if not isinstance(value, str) or value not in choices:
        expected = " or ".join(repr(choice) for choice in choices)
        raise UserError(f"{name} must be {expected}, got {_shown(value)}.", name, value)
    return choices[value]


def _json(name: str, value: object) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"{name} cannot be written as JSON: {error}", name, value) from error


def _shown(value: object) -> str:
    """Write `value` as `repr` does, on one line of at most 100 characters."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an integer of more digits than CPython prints
        return f"{type(value).__name__} too long to print"
    return text if len(text) <= 100 else f"{text[:97]}..."
