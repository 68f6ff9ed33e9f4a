"""`/v1/messages` and `/v1/messages/count_tokens`, as in https://docs.anthropic.com/en/api/messages. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxllm.errors import UnsupportedError, UserError
from jaxllm.sampling_fields import ANTHROPIC, names_in
from jaxllm.sampling_params import SamplingParams
from jaxllm_server.anthropic.conversation import is_prefilled, messages_of, tool_choice_of, tool_id, tools_of
from jaxllm_server.anthropic.errors import error_body_of
from jaxllm_server.generation.calls import Call, Chunk, Part, TokenUsage, is_forced
from jaxllm_server.parsers.tool_parsers import ToolCallDelta
from jaxllm_server.requests.fields import Body, flag, integer, mapping, text
from jaxllm_server.requests.shared_fields import given, shared_call_fields
from jaxllm_server.shared import strict_json
from jaxllm_server.shared.options import ServerOptions

_PROMPT = frozenset({"model", "messages", "system", "tools", "tool_choice", "thinking", "output_config"})
_SAMPLING = names_in(SamplingParams, ANTHROPIC).keys()  # seed and min_p are vLLM's
_BEYOND = frozenset({"chat_template_kwargs", "priority", "cache_salt", "time_limit"})
# Of Anthropic's service; some agents always send them.
_WITHOUT_EFFECT = frozenset(
    (
        *("metadata", "service_tier", "inference_geo", "speed", "billing_policy", "user_profile_id", "workspace_id"),
        *("cache_control", "context_management", "compaction", "diagnostics", "fallbacks", "fallback_credit_token"),
        *("betas", "anthropic_beta", "anthropic_version"),
    )
)
_UNBUILT: Mapping[str, tuple[Any, ...]] = {"container": (), "mcp_servers": ([],), "thread": ()}
_FIELDS = (
    _PROMPT
    | _SAMPLING
    | _BEYOND
    | _WITHOUT_EFFECT
    | _UNBUILT.keys()
    | {"max_tokens", "stop_sequences", "stream", "output_format"}
)
# Template variables: `enable_thinking` for Qwen and most others, `thinking` for DeepSeek and Granite.
_THINKING: Mapping[str, bool | None] = {"enabled": True, "disabled": False, "adaptive": None, "between_tools": None}
_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "context": "model_context_window_exceeded"}
# Not verified, but clients drop thinking with an empty signature.
_SIGNATURE = "jaxllm"
_DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}


class MessagesReply:
    """Reads a request of `/v1/messages` and builds its answer."""

    fields, unbuilt = _FIELDS, _UNBUILT
    id_prefix = "msg_"
    names: Mapping[str, str] = {
        "stop": "stop_sequences",
        "structured_outputs": "output_config",
        "continue_final_message": "messages",
    }

    def __init__(self, body: Body, options: ServerOptions, request_id: str) -> None:
        self.ignored: list[str] = []
        fields = given(body, _FIELDS, _UNBUILT, options.unknown_fields, self.ignored)
        self.request_id = request_id
        self.is_stream = bool(flag(fields, "stream", False))
        self._shows_cached = options.enable_prompt_tokens_details
        self._shows_reasoning = options.reasoning_parser is not None
        self._max_depth = options.max_json_depth
        call = _call_of(fields)
        most = fields.get("max_tokens")
        if most is None:
            raise UserError("max_tokens is missing: set the maximum length of the answer.", "max_tokens")
        self._is_warming = integer(fields, "max_tokens", 0) == 0
        sampling = _sampling_of(fields) | ({} if self._is_warming else {"max_tokens": most})
        if is_forced(call["tool_choice"]):
            sampling.pop("structured_outputs", None)  # a forced call has no content to constrain
        self._takes_one_call = call["takes_one_call"]
        self.calls: Sequence[Call] = [
            Call(
                **call,
                sampling=sampling,
                request_id=request_id,
                scores_prompt=self._is_warming,
                may_fill_context=True,  # agents request 32,000 tokens
            )
        ]
        self._head: Mapping[str, Any] = {}
        self._usage: TokenUsage | None = None
        self._last: Part | None = None
        self._index = -1
        self._open: str | int | None = None  # open block's type, or its call's index

    def begin(self, head: Mapping[str, Any]) -> None:
        self._head = head

    def response(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        (chunk,) = chunks
        message: dict[str, Any] = {}
        pieces: list[list[str]] = []
        for event in [*self.events(0, chunk), *self.last_events()]:
            match event["type"]:
                case "message_start":
                    message = event["message"]
                case "content_block_start":
                    message["content"].append(event["content_block"])
                    pieces.append([])
                case "content_block_delta":
                    delta, block = event["delta"], message["content"][-1]
                    if delta["type"] == "input_json_delta":
                        pieces[-1].append(delta["partial_json"])
                    else:
                        block[_DELTAS[delta["type"]]] += delta[_DELTAS[delta["type"]]]
                case "message_delta":
                    message |= event["delta"] | {"usage": event["usage"]}
        for block, texts in zip(message["content"], pieces, strict=True):
            if block["type"] == "tool_use":
                block["input"] = _input_of("".join(texts), self._max_depth)
        return message

    def events(self, number: int, chunk: Chunk) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        if self._usage is None:
            message = {
                "id": self._head["id"],
                "type": "message",
                "role": "assistant",
                "model": self._head["model"],
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": self._usage_of(chunk.usage) | {"output_tokens": 0},
            }
            events += [{"type": "message_start", "message": message}, {"type": "ping"}]
        self._usage = chunk.usage
        for part in chunk.outputs:
            self._last = part
            if not self._is_warming:
                events += self._pieces(part)
        return events

    def last_events(self) -> list[dict[str, Any]]:
        reason, sequence = ("max_tokens", None) if self._is_warming else _stop_of(self._last)
        usage = self._usage_of(self._usage or TokenUsage())
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [*self._close(), {"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"}]

    def failure(self, error: Exception) -> list[dict[str, Any]]:
        return [error_body_of(error, self.request_id)]

    def _pieces(self, part: Part) -> Iterator[dict[str, Any]]:
        """Yield a part's events: reasoning, text and calls, with the rest of an open call before the text."""
        if part.reasoning:
            yield from self._piece("thinking", {"type": "thinking_delta", "thinking": part.reasoning})
        calls = [call for call in part.tool_calls if call.index == 0] if self._takes_one_call else part.tool_calls
        for call in calls:
            if call.index == self._open:
                yield from self._call(call)
        open_before = self._open
        if part.text:
            yield from self._piece("text", {"type": "text_delta", "text": part.text})
        for call in calls:
            if call.index != open_before:
                yield from self._call(call)

    def _call(self, call: ToolCallDelta) -> Iterator[dict[str, Any]]:
        if call.name is not None:
            block = {"type": "tool_use", "id": tool_id(call.id), "name": call.name, "input": {}}
            yield from self._start(call.index, block)
        if call.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _piece(self, kind: str, delta: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if self._open != kind:
            empty = {"thinking": "", "signature": ""} if kind == "thinking" else {"text": ""}
            yield from self._start(kind, {"type": kind, **empty})
        yield self._delta(delta)

    def _start(self, kind: str | int, block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._open = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        events: list[dict[str, Any]] = [{"type": "content_block_stop", "index": self._index}]
        if self._open == "thinking":
            events.insert(0, self._delta({"type": "signature_delta", "signature": _SIGNATURE}))
        self._open = None
        return events

    def _usage_of(self, usage: TokenUsage) -> dict[str, Any]:
        """Return the `usage` object; `input_tokens` excludes reported cached tokens."""
        fields: dict[str, Any] = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
        if self._is_warming:
            fields["output_tokens"] = 0
        if self._shows_cached:
            fields["input_tokens"] -= usage.cached_prompt_tokens
            fields["cache_read_input_tokens"] = usage.cached_prompt_tokens
        if self._shows_reasoning:
            fields["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
        return fields


def count_call_of(body: Body, policy: str = "refuse", ignored: list[str] | None = None) -> Call:
    return Call(**_call_of(given(body, _FIELDS, _UNBUILT, policy, ignored)))


def _call_of(fields: Body) -> dict[str, Any]:
    messages, tools = messages_of(fields), tools_of(fields)
    choice, takes_one_call = tool_choice_of(fields, tools is not None)
    template_kwargs, include_reasoning = _thinking_of(fields)
    continues = is_prefilled(messages)
    return {
        "messages": messages,
        "tools": tools,
        "tool_choice": choice,
        "takes_one_call": takes_one_call,
        "template_kwargs": template_kwargs,
        "include_reasoning": include_reasoning,
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
        **shared_call_fields(fields),
    }


def _thinking_of(fields: Body) -> tuple[dict[str, Any], bool]:
    """Return the template's variables, and whether to return the thinking.

    A thinking budget is ignored: `max_tokens` limits both.
    """
    variables: dict[str, Any] = {}
    thinking = mapping(fields, "thinking") or {}
    kind = thinking.get("type")
    if thinking and (not isinstance(kind, str) or kind not in _THINKING):
        raise UserError(f"thinking.type must be one of {', '.join(_THINKING)}.", "thinking")
    if kind is not None and _THINKING[kind] is not None:
        variables = dict.fromkeys(("enable_thinking", "thinking"), _THINKING[kind])
    effort = text(mapping(fields, "output_config") or {}, "effort")
    if effort is not None:
        variables["reasoning_effort"] = effort
    return variables | (mapping(fields, "chat_template_kwargs") or {}), thinking.get("display") != "omitted"


def _sampling_of(fields: Body) -> dict[str, Any]:
    sampling = {name: fields[name] for name in _SAMPLING if name in fields}
    stops = fields.get("stop_sequences")
    if stops is not None:
        if not isinstance(stops, list):
            raise UserError("stop_sequences must be a list of strings.", "stop_sequences")
        sampling["stop"] = stops
    form = (mapping(fields, "output_config") or {}).get("format")
    form = fields.get("output_format") if form is None else form  # Anthropic's beta
    if form is not None:
        if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
            message = 'output_config.format must be {"type": "json_schema", "schema": {…}}.'
            raise UnsupportedError(message, "output_config")
        sampling["structured_outputs"] = {"json": form["schema"]}
    return sampling


def _stop_of(part: Part | None) -> tuple[str, str | None]:
    """Return `stop_reason` and `stop_sequence`; other causes count as max_tokens."""
    reason = None if part is None else part.finish_reason
    if part is not None and reason == "stop" and isinstance(part.stop_reason, str):
        return "stop_sequence", part.stop_reason
    return _STOP_REASONS.get(reason or "", "max_tokens"), None


def _input_of(arguments: str, max_depth: int) -> dict[str, Any]:
    """Parse arguments, {} if empty; invalid JSON becomes {"INVALID_JSON": text}, which clients return to the model.

    https://docs.anthropic.com/en/docs/agents-and-tools/tool-use/fine-grained-tool-streaming
    """
    if not arguments.strip():
        return {}
    value = strict_json.object_of(arguments, max_depth)
    return {"INVALID_JSON": arguments} if value is None else value
