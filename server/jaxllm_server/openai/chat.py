"""`/v1/chat/completions`: requests to calls, chunks to messages or deltas. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.errors import UserError
from jaxllm.outputs import Logprob
from jaxllm_server.generation.calls import Call, Chunk, NamedTool, Part, TokenUsage, ToolChoice, is_forced
from jaxllm_server.openai.conversation import CONVERSATION, conversation_of, with_transferred_ids
from jaxllm_server.openai.replies import (
    finish_reason,
    finite,
    prompt_logprobs_of,
    reported,
    token_name,
    transfer_fields,
    usage_fields,
    usage_without,
)
from jaxllm_server.parsers.tool_parsers import ToolCallDelta
from jaxllm_server.requests.fields import Body, flag, integer, mapping, one_of, text
from jaxllm_server.requests.form import Form, form_of
from jaxllm_server.requests.shared_fields import SHARED, UNBUILT, given, names_of, sampling_of, shared_call_fields
from jaxllm_server.shared.options import ServerOptions

_UNBUILT = {
    **UNBUILT,
    "documents": ([],),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "functions": ([],),  # former names of tools and tool_choice
    "function_call": ("none", "auto"),
}
_FIELDS = (
    SHARED
    | CONVERSATION
    | _UNBUILT.keys()
    | {"max_completion_tokens", "top_logprobs", "tool_choice", "parallel_tool_calls", "include_reasoning"}
    | {"echo", "prompt_token_ids", "verbosity", "prediction"}
)
_SHOWN_NAME = 64
_VERBOSITIES = ("low", "medium", "high")


class ChatReply:
    """Reads a request of `/v1/chat/completions` and builds its answer."""

    fields, unbuilt = _FIELDS, _UNBUILT
    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, body: Body, options: ServerOptions, request_id: str) -> None:
        self.ignored: list[str] = []
        body = with_transferred_ids(body)
        fields = given(body, self.fields, self.unbuilt, options.unknown_fields, self.ignored)
        # Validated, then ignored: templates cannot use `verbosity`; `prediction` only affects speed.
        one_of(fields, "verbosity", _VERBOSITIES)
        mapping(fields, "prediction")
        sampling = sampling_of(fields)
        num_logprobs = _num_logprobs(fields)
        if num_logprobs is not None:
            sampling["logprobs"] = num_logprobs
        names = {"prompt": "messages", "logprobs": "top_logprobs", "template_kwargs": "chat_template_kwargs"}
        names |= names_of(fields)
        most = fields.get("max_completion_tokens")
        if most is not None:
            if "max_tokens" in fields and integer(fields, "max_tokens", 1) != most:
                raise UserError("max_tokens and max_completion_tokens differ: give one of them.", "max_tokens")
            sampling["max_tokens"] = most
            names["max_tokens"] = "max_completion_tokens"
        self.names: Mapping[str, str] = names
        if num_logprobs is None and fields.get("logprob_token_ids"):
            num_logprobs = 0
        includes_reasoning = bool(flag(fields, "include_reasoning", True))
        # Tokens would reveal omitted reasoning; as in vLLM.
        hides_tokens = options.reasoning_parser is not None and not includes_reasoning
        self.form = form_of(fields, options, None if hides_tokens else num_logprobs)
        self._shows_ids = self.form.return_token_ids and not hides_tokens
        self.is_stream = self.form.stream
        own_id = text(fields, "request_id")
        self.request_id = request_id if own_id is None else own_id
        self._role = options.response_role
        self._takes_one_call = flag(fields, "parallel_tool_calls", True) is False
        conversation = conversation_of(fields)
        self._adds_prompt = bool(conversation["add_generation_prompt"])
        self._echoes = bool(flag(fields, "echo", False))
        self._echo = self._echo_of(conversation["messages"])
        if conversation.get("written_ids") is not None:
            self.names = {**names, "prompt": "prompt_token_ids"}
        asked = fields.get("tool_choice")
        if isinstance(asked, dict) and asked.get("type") == "allowed_tools":
            asked, conversation["tools"] = _allowed(asked.get("allowed_tools"), conversation["tools"] or [])
        choice = _tool_choice(asked, conversation["tools"] is not None)
        self._is_named = isinstance(choice, NamedTool)
        if is_forced(choice) and fields.get("structured_outputs") is None and "response_format" in fields:
            # A forced call has no content to constrain, as in vLLM (tool_parsers/abstract_tool_parser.py,
            # adjust_request).
            sampling.pop("structured_outputs", None)
        self.calls: Sequence[Call] = [
            Call(
                **conversation,
                tool_choice=choice,
                takes_one_call=self._takes_one_call,
                sampling=sampling,
                request_id=self.request_id,
                include_reasoning=includes_reasoning,
                **shared_call_fields(fields),
            )
        ]
        self._usage: list[TokenUsage] = []
        self._has_spoken: set[int] = set()

    def response(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        (chunk,) = chunks
        return self.answer(chunk, self.calls[0].messages or ())

    def answer(self, chunk: Chunk, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        choices, echo = [], self._echo_of(messages)
        for part in chunk.outputs:
            choice = {
                "index": part.index,
                "message": self._message(part, echo),
                "logprobs": logprobs_of(part.logprobs, self.form),
                "finish_reason": self._finish_reason(part),
                "stop_reason": part.stop_reason,
                "token_ids": list(part.token_ids) if self._shows_ids else None,
            }
            choices.append(choice)
        answer: dict[str, Any] = {"choices": choices, "usage": usage_fields([chunk.usage], self.form)}
        answer |= {"prompt_logprobs": None, "prompt_token_ids": None}
        if self.form.shows_prompt_logprobs and chunk.prompt is not None:
            answer["prompt_logprobs"] = prompt_logprobs_of(chunk.prompt.logprobs)
        if self.form.return_token_ids and chunk.prompt is not None:
            answer["prompt_token_ids"] = list(chunk.prompt.token_ids)
        return answer | transfer_fields(chunk)

    def events(self, number: int, chunk: Chunk) -> list[dict[str, Any]]:
        self._usage = [chunk.usage]
        tails: list[dict[str, Any]] = []
        for place, part in enumerate(chunk.outputs):
            if part.index not in self._has_spoken:
                self._has_spoken.add(part.index)
                tails.append({"choices": [_choice(part.index, {"role": self._role, "content": ""})]})
                self._add_usage(tails[-1], chunk, place)
                if self._echo:
                    tails.append({"choices": [_choice(part.index, {"content": self._echo})]})
                    self._add_usage(tails[-1], chunk, place)
            delta = self._delta(part)
            has_ids = self._shows_ids and bool(part.token_ids)
            has_logprobs = self.form.num_logprobs is not None and bool(part.logprobs)
            # A possible stop string or tool call is held back.
            if delta or part.finish_reason or has_logprobs or has_ids:
                choice = _choice(part.index, delta)
                if has_logprobs:
                    choice["logprobs"] = logprobs_of(part.logprobs, self.form)
                if part.finish_reason:
                    choice["finish_reason"] = self._finish_reason(part)
                    choice["stop_reason"] = part.stop_reason
                if has_ids:
                    choice["token_ids"] = list(part.token_ids)
                tails.append({"choices": [choice]})
                self._add_usage(tails[-1], chunk, place + 1)
        if self.form.return_token_ids and chunk.prompt is not None and tails:
            tails[0]["prompt_token_ids"] = list(chunk.prompt.token_ids)
        if tails:
            tails[-1] |= transfer_fields(chunk)
        return tails

    def last_event(self) -> dict[str, Any] | None:
        return {"choices": [], "usage": usage_fields(self._usage, self.form)} if self.form.include_usage else None

    def _add_usage(self, tail: dict[str, Any], chunk: Chunk, place: int) -> None:
        """Add requested usage to an event's `tail`, without the chunk's parts from `place` on; null if due last."""
        if self.form.continuous_usage:
            tail["usage"] = usage_fields([usage_without(chunk.usage, chunk.outputs[place:])], self.form)
        elif self.form.include_usage:
            tail["usage"] = None

    def _message(self, part: Part, echo: str) -> dict[str, Any]:
        calls: dict[int, dict[str, Any]] = {}
        for delta in self._calls(part):
            if delta.index not in calls:
                calls[delta.index] = {
                    "id": delta.id,
                    "type": "function",
                    "function": {"name": delta.name, "arguments": ""},
                }
            calls[delta.index]["function"]["arguments"] += delta.arguments
        has_more, content = bool(calls or part.reasoning), echo + part.text
        message: dict[str, Any] = {
            "role": self._role,
            "content": None if has_more and not content else content,
            "refusal": None,
        }
        message |= _reasoning(part)
        if calls:
            message["tool_calls"] = list(calls.values())
        return message

    def _echo_of(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the last message's text if the answer continues it or has its role, as in vLLM."""
        last: Mapping[str, Any] = messages[-1] if messages else {}
        if not self._echoes or (self._adds_prompt and last.get("role") != self._role):
            return ""
        content = last.get("content")
        if isinstance(content, list):
            parts = [part.get("text") for part in content if isinstance(part, dict)]
            content = "\n".join(part for part in parts if isinstance(part, str))
        return content if isinstance(content, str) else ""

    def _delta(self, part: Part) -> dict[str, Any]:
        delta: dict[str, Any] = _reasoning(part)
        if part.text:
            delta["content"] = part.text
        calls = [_tool_call_delta(call) for call in self._calls(part)]
        if calls:
            delta["tool_calls"] = calls
        return delta

    def _finish_reason(self, part: Part) -> str | None:
        """Return a part's finish reason; "stop" for a named tool (vLLM's openai/chat_completion/serving.py)."""
        reason = finish_reason(part)
        return "stop" if reason == "tool_calls" and self._is_named else reason

    def _calls(self, part: Part) -> list[ToolCallDelta]:
        return [call for call in part.tool_calls if call.index == 0] if self._takes_one_call else part.tool_calls


def _allowed(allowed: Any, tools: list[Any]) -> tuple[str, list[Any]]:
    given = allowed.get("tools") if isinstance(allowed, dict) else None
    names = {_name_of(tool) for tool in given} if isinstance(given, list) else set()
    if not names or None in names or allowed.get("mode") not in ("auto", "required"):
        form = '{"mode": "auto" or "required", "tools": [{"type": "function", "function": {"name": …}}]}'
        raise UserError(f"allowed_tools of tool_choice must be {form}.", "tool_choice")
    unknown = names - {_name_of(tool) for tool in tools}
    if unknown:
        shown = min(map(str, unknown))[:_SHOWN_NAME]
        raise UserError(f"tool_choice allows {shown!r}, which is not in tools.", "tool_choice")
    return allowed["mode"], [tool for tool in tools if _name_of(tool) in names]


def _name_of(tool: Any) -> str | None:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name else None


def _tool_choice(choice: Any, has_tools: bool) -> ToolChoice:
    if choice is None or choice == "none":
        return choice
    if isinstance(choice, dict):
        name = _name_of(choice)
        if choice.get("type") != "function" or name is None:
            message = 'tool_choice must name a tool as {"type": "function", "function": {"name": …}}.'
            raise UserError(message, "tool_choice")
        choice = NamedTool(name)
    elif choice not in ("auto", "required"):
        raise UserError("tool_choice must be none, auto, required, allowed tools or a named tool.", "tool_choice")
    if not has_tools and choice == "auto":
        return None
    if not has_tools:
        shown = "A named tool" if isinstance(choice, NamedTool) else f"tool_choice={choice}"
        raise UserError(f"{shown} needs tools.", "tool_choice")
    return choice


def _num_logprobs(fields: Body) -> Any:
    top = fields.get("top_logprobs")
    if not flag(fields, "logprobs", False):
        if top:
            raise UserError("top_logprobs needs logprobs=true.", "top_logprobs")
        return None
    if isinstance(top, bool):
        raise UserError("top_logprobs must be an integer.", "top_logprobs")
    return 0 if top is None else top


def _reasoning(part: Part) -> dict[str, Any]:
    """Return the reasoning under vLLM's name and DeepSeek's."""
    return {"reasoning": part.reasoning, "reasoning_content": part.reasoning} if part.reasoning else {}


def _choice(index: int, delta: Mapping[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _tool_call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def logprobs_of(entries: Sequence[dict[int, Logprob]] | None, form: Form) -> dict[str, Any] | None:
    if entries is None or form.num_logprobs is None:
        return None
    content = []
    for candidates in reported(entries, form) or ():
        token, entry = next(iter(candidates.items()))
        likeliest = sorted(candidates.items(), key=lambda item: -finite(item[1]))
        if form.num_logprobs >= 0 and not form.logprob_ids:
            likeliest = likeliest[: form.num_logprobs]
        content.append({**_token(token, entry, form), "top_logprobs": [_token(*item, form) for item in likeliest]})
    return {"content": content, "refusal": None}


def _token(token: int, entry: Logprob, form: Form) -> dict[str, Any]:
    name = token_name(token, entry, form)
    return {"token": name, "logprob": finite(entry), "bytes": list(entry.decoded_bytes)}
