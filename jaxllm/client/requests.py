"""Build protobuf requests; the server validates ranges."""

from __future__ import annotations

import difflib
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from google.protobuf.message import Message

from jaxllm.client.fields import as_json, number_of, set_field, shown
from jaxllm.client.options import (
    CHAT_FIELDS,
    GENERATE_FIELDS,
    STREAM_FIELDS,
    ClassifyOptions,
    EmbedOptions,
    ScoreOptions,
    StreamEmbedOptions,
)
from jaxllm.errors import UserError
from jaxllm.sampling_params import RepetitionDetectionParams
from jaxllm.structured_outputs_params import SERVERS, StructuredOutputsParams, read_structured_outputs
from jaxllm.v1 import control_pb2, inference_pb2, types_pb2

_NEVER_EMPTY = ("allowed_token_ids", "logprob_token_ids", "request_id", "cache_salt")  # empty means absent in protobuf
_TOOL_CHOICES = {
    "none": types_pb2.TOOL_CHOICE_NONE,
    "auto": types_pb2.TOOL_CHOICE_AUTO,
    "required": types_pb2.TOOL_CHOICE_REQUIRED,
}
_EARLY_STOPPING: dict[bool | str, int] = {
    False: types_pb2.EARLY_STOPPING_UNSPECIFIED,
    True: types_pb2.EARLY_STOPPING_ALWAYS,
    "never": types_pb2.EARLY_STOPPING_NEVER,
}
_CONSTRAINTS = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "grammar": "ebnf",
    "choice": "choice.values",
}
_PAUSE_MODES = {
    "abort": control_pb2.PAUSE_MODE_ABORT,
    "wait": control_pb2.PAUSE_MODE_WAIT,
    "keep": control_pb2.PAUSE_MODE_KEEP,
}
_MANY_TO_GENERATE = "make a call for each prompt, and chat() for messages."
_MANY_TO_POOL = "make a call for each prompt; stream_embed() takes many."
_MEDIA = ("image", "audio", "video")
_PART_FIELDS = {
    "text": "text",
    **{kind: f"{kind}.data" for kind in _MEDIA},
    **{f"{kind}_url": f"{kind}.url" for kind in _MEDIA},
}
_MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")


def generate_request(
    prompt: str | Sequence[int], options: Mapping[str, Any], *, is_stream: bool = False
) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest()
    _set_prompt(request, prompt, _MANY_TO_GENERATE)
    _set_options(request, options, {**GENERATE_FIELDS, **(STREAM_FIELDS if is_stream else {})})
    return request


def chat_request(
    messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], *, is_stream: bool = False
) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest()
    request.chat.messages.extend(_chat_messages(messages))
    fields = {**GENERATE_FIELDS, **CHAT_FIELDS, **(STREAM_FIELDS if is_stream else {})}
    _set_options(request, options, fields)
    return request


def embed_request(prompt: str | Sequence[int], options: EmbedOptions) -> inference_pb2.EmbedRequest:
    request = inference_pb2.EmbedRequest()
    _set_prompt(request, prompt, _MANY_TO_POOL)
    _set_options(request, options, _fields(EmbedOptions))
    return request


class EmbedRequests:
    """Iterates lazily over the requests of many prompts; invalid options fail on construction.

    `failure` ended it.
    """

    def __init__(
        self, prompts: Iterable[str | Sequence[int]] | AsyncIterable[str | Sequence[int]], options: StreamEmbedOptions
    ) -> None:
        if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable | AsyncIterable):
            raise UserError(f"prompts must be texts or lists of token ids, got {shown(prompts)}.", "prompts", prompts)
        self.failure: Exception | None = None
        self.metadata_of_call: Callable[[], Awaitable[Any]] | None = None
        self._prompts = prompts
        self._common = inference_pb2.EmbedRequest()
        _set_options(self._common, options, _fields(StreamEmbedOptions))
        self._built = self._build()

    def __iter__(self) -> Iterator[inference_pb2.EmbedRequest]:
        return self

    def __next__(self) -> inference_pb2.EmbedRequest:
        return next(self._built)

    def _build(self) -> Iterator[inference_pb2.EmbedRequest]:
        try:
            for prompt in self._prompts:  # pyright: ignore[reportGeneralTypeIssues]
                yield self._request(prompt)
        except Exception as error:  # gRPC would log and lose it
            self.failure = error

    async def __aiter__(self) -> AsyncIterator[inference_pb2.EmbedRequest]:
        # Writing to a refused call hides the reason (grpc/grpc#36066): wait until the server accepts.
        if self.metadata_of_call is not None and not await self.metadata_of_call():
            return
        if not isinstance(self._prompts, AsyncIterable):
            for request in self:
                yield request
            return
        try:
            async for prompt in self._prompts:
                yield self._request(prompt)
        except Exception as error:
            self.failure = error

    def _request(self, prompt: str | Sequence[int]) -> inference_pb2.EmbedRequest:
        request = inference_pb2.EmbedRequest()
        request.CopyFrom(self._common)
        _set_prompt(request, prompt, "give each as a separate prompt.")
        return request


def classify_request(prompt: str | Sequence[int], options: ClassifyOptions) -> inference_pb2.ClassifyRequest:
    request = inference_pb2.ClassifyRequest()
    _set_prompt(request, prompt, _MANY_TO_POOL)
    _set_options(request, options, _fields(ClassifyOptions))
    return request


def score_request(
    text_1: str | Sequence[str], text_2: str | Sequence[str], options: ScoreOptions
) -> inference_pb2.ScoreRequest:
    request = inference_pb2.ScoreRequest()
    for name, given in (("text_1", text_1), ("text_2", text_2)):
        set_field(request, name, name, [given] if isinstance(given, str) else given)
    _set_options(request, options, _fields(ScoreOptions))
    return request


def tokenize_request(
    prompt: str | Sequence[Mapping[str, Any]], model: str, add_special_tokens: bool | None, options: Mapping[str, Any]
) -> inference_pb2.TokenizeRequest:
    request = inference_pb2.TokenizeRequest()
    set_field(request, "model", "model", model)
    if isinstance(prompt, str):
        set_field(request, "text", "prompt", prompt)
        fields = {}
    else:
        request.chat.messages.extend(_chat_messages(prompt))
        fields = CHAT_FIELDS
    if add_special_tokens is not None:
        set_field(request, "add_special_tokens", "add_special_tokens", add_special_tokens)
    _set_options(request, options, fields)
    return request


def detokenize_request(token_ids: Sequence[int], model: str) -> inference_pb2.DetokenizeRequest:
    request = inference_pb2.DetokenizeRequest()
    set_field(request, "token_ids", "token_ids", token_ids)
    set_field(request, "model", "model", model)
    return request


def abort_request(request_ids: str | Sequence[str]) -> control_pb2.AbortRequest:
    request = control_pb2.AbortRequest()
    ids = [request_ids] if isinstance(request_ids, str) else request_ids
    set_field(request, "request_ids", "request_ids", ids)
    return request


def pause_mode_of(mode: str) -> Any:
    return number_of("mode", mode, _PAUSE_MODES)


def pause_request(mode: str, clear_cache: bool | None) -> control_pb2.PauseGenerationRequest:
    request = control_pb2.PauseGenerationRequest(mode=pause_mode_of(mode))
    if clear_cache is not None:
        set_field(request, "clear_cache", "clear_cache", clear_cache)
    return request


def _fields(options: type[Any]) -> dict[str, str]:
    return {name: name for name in options.__annotations__}


def _set_prompt(request: Any, prompt: Any, many: str) -> None:
    """Set a request's prompt, text or token ids; `many` is advice for several prompts."""
    if isinstance(prompt, str):
        set_field(request, "text", "prompt", prompt)
        return
    if isinstance(prompt, Mapping | bytes) or not hasattr(prompt, "__iter__"):
        raise UserError(f"prompt must be a text or a list of token ids, got {shown(prompt)}.", "prompt", prompt)
    ids = list(prompt)
    if any(isinstance(item, str | list | tuple | Mapping) for item in ids[:1]):
        raise UserError(f"prompt must be one text or one list of token ids: {many}", "prompt", prompt)
    request.token_ids.SetInParent()
    set_field(request, "token_ids.ids", "prompt", ids)


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
            value = as_json(name, list(value) if isinstance(value, Sequence) else value)
        elif name in ("logprobs", "prompt_logprobs") and value is True:
            value = 1
        elif name in _NEVER_EMPTY and isinstance(value, Sequence) and not value:
            raise UserError(f"{name} must not be empty.", name, value)
        if name == "structured_outputs":
            _set_structure(request, value)
        elif name == "tool_choice":
            _set_tool_choice(request, value)
        elif name == "extra_args":
            _set_arguments(request, value)
        elif name == "repetition_detection":
            _set_repetition(request, value)
        elif name == "beam_search":
            _set_beams(request, value)
        else:
            set_field(request, fields[name], name, value)
    asked = any(options.get(name) is not None for name in ("logprobs", "prompt_logprobs", "logprob_token_ids"))
    if asked and options.get("logprob_texts") is None:
        set_field(request, "output.logprob_texts", "logprob_texts", True)


def _set_arguments(request: Message, value: object) -> None:
    if not isinstance(value, Mapping):
        raise UserError(f"extra_args must map names to numbers, got {shown(value)}.", "extra_args", value)
    for name, numbers in value.items():
        if not isinstance(name, str):
            raise UserError(f"extra_args must have names for keys, got {shown(name)}.", "extra_args", name)
        numbers = numbers if isinstance(numbers, list | tuple) else [numbers]
        own = types_pb2.Numbers()
        set_field(own, "values", "extra_args", numbers)
        request.sampling.extra_args[name].CopyFrom(own)  # pyright: ignore[reportAttributeAccessIssue]


def _set_repetition(request: Message, value: object) -> None:
    given = asdict(value) if isinstance(value, RepetitionDetectionParams) else value
    names = types_pb2.RepetitionDetection.DESCRIPTOR.fields_by_name
    if not isinstance(given, Mapping) or not all(name in names for name in given):
        message = f"repetition_detection must be a mapping with {', '.join(names)}, got {shown(value)}."
        raise UserError(message, "repetition_detection", value)
    for name, number in given.items():
        set_field(request, f"stop.repetition_detection.{name}", "repetition_detection", number)


def _set_beams(request: Message, value: object) -> None:
    names = types_pb2.BeamSearch.DESCRIPTOR.fields_by_name
    if not isinstance(value, Mapping) or not all(name in names for name in value):
        message = f"beam_search must be a mapping with {', '.join(names)}, got {shown(value)}."
        raise UserError(message, "beam_search", value)
    request.sampling.beam_search.SetInParent()  # pyright: ignore[reportAttributeAccessIssue]
    if "length_penalty" in value:
        set_field(request, "sampling.beam_search.length_penalty", "beam_search", value["length_penalty"])
    stopping = value.get("early_stopping", False)
    if not isinstance(stopping, bool | str) or stopping not in _EARLY_STOPPING:
        message = f"early_stopping of beam_search must be True, False or 'never', got {shown(stopping)}."
        raise UserError(message, "beam_search", value)
    set_field(request, "sampling.beam_search.early_stopping", "beam_search", _EARLY_STOPPING[stopping])


def _set_structure(request: Message, value: object) -> None:
    if callable(getattr(value, "model_json_schema", None) or getattr(value, "json_schema", None)):
        value = StructuredOutputsParams(json=value)
    constraint = read_structured_outputs(value)
    assert constraint is not None
    for name in SERVERS:
        if getattr(constraint, name):
            message = f"structured_outputs.{name} can only be set by the server; remove it."
            raise UserError(message, "structured_outputs", value)
    field = _CONSTRAINTS[constraint.kind]
    set_field(request, f"structured_output.{field}", "structured_outputs", getattr(constraint, constraint.kind))
    for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        if getattr(constraint, name):
            set_field(request, f"structured_output.{name}", "structured_outputs", getattr(constraint, name))


def _set_tool_choice(request: Message, value: object) -> None:
    function = value.get("function") if isinstance(value, Mapping) and value.get("type") == "function" else None
    if isinstance(function, Mapping) and function.get("name"):
        set_field(request, "chat.required_tool", "tool_choice", function["name"])
        value = "required"
    set_field(request, "chat.tool_choice", "tool_choice", number_of("tool_choice", value, _TOOL_CHOICES))


def _chat_messages(messages: object) -> Iterator[types_pb2.ChatMessage]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise UserError(
            f"messages must be a list of {{'role': ..., 'content': ...}}, got {shown(messages)}.", "messages", messages
        )
    for number, message in enumerate(messages):
        yield _chat_message(f"messages[{number}]", message)


def _chat_message(where: str, given: object) -> types_pb2.ChatMessage:
    if not isinstance(given, Mapping):
        raise UserError(f"{where} must be a mapping with a role and a content, got {shown(given)}.", where, given)
    message = types_pb2.ChatMessage()
    if not given.get("role"):
        raise UserError(f"{where} needs a role.", f"{where}.role")
    for key, value in given.items():
        name = f"{where}.{key}"
        if key not in _MESSAGE_KEYS:
            near = difflib.get_close_matches(str(key), _MESSAGE_KEYS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UserError(f"{name} is not a field of a message.{hint}", name, value)
        if value is None:
            continue
        if key == "content" and not isinstance(value, str):
            message.parts.extend(_parts(name, value))
        elif key == "tool_calls":
            message.tool_calls.extend(_tool_calls(name, value))
        else:
            set_field(message, "reasoning_text" if key.startswith("reasoning") else key, name, value)
    return message


def _parts(where: str, parts: object) -> Iterator[types_pb2.ContentPart]:
    if isinstance(parts, Mapping) or not isinstance(parts, Sequence):
        raise UserError(f"{where} must be a text or a list of parts, got {shown(parts)}.", where, parts)
    for number, given in enumerate(parts):
        name = f"{where}[{number}]"
        kind = given.get("type", "text") if isinstance(given, Mapping) else None
        part = types_pb2.ContentPart()
        if not isinstance(given, Mapping) or kind not in _PART_FIELDS or kind not in given:
            kinds = "text, image_url, audio_url or video_url (a URL), or image, audio or video (a file's bytes)"
            expected = f"a part of type {kinds}, with a field of that name"
            raise UserError(f"{name} must be {expected}, got {shown(kind or given)}.", name, given)
        value = given[kind]
        if kind.endswith("_url") and isinstance(value, Mapping):
            value = value.get("url")
        set_field(part, _PART_FIELDS[kind], f"{name}.{kind}", value)
        yield part


def _tool_calls(where: str, calls: object) -> Iterator[types_pb2.ToolCall]:
    if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
        raise UserError(f"{where} must be a list of tool calls, got {shown(calls)}.", where, calls)
    for number, given in enumerate(calls):
        name = f"{where}[{number}]"
        function = given.get("function") if isinstance(given, Mapping) else None
        if not isinstance(function, Mapping) or not function.get("name"):
            expected = "{'id': ..., 'function': {'name': ..., 'arguments': ...}}"
            message = f"{name} must be {expected}, got {shown(given)}."
            raise UserError(message, name, given)
        arguments = function.get("arguments") or "{}"
        call = types_pb2.ToolCall()
        set_field(call, "id", f"{name}.id", given.get("id") or "")
        set_field(call, "name", f"{name}.function.name", function["name"])
        if not isinstance(arguments, str):
            arguments = as_json(f"{name}.function.arguments", arguments)
        set_field(call, "arguments_json", f"{name}.function.arguments", arguments)
        yield call
