"""`/v1/responses`: requests to calls, chunks to a response or events. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Literal

from jaxllm.errors import FeatureDisabledError, UnsupportedError, UserError
from jaxllm.outputs import Logprob
from jaxllm_server.generation.calls import Call, Chunk, Part, TokenUsage, is_forced
from jaxllm_server.openai.chat import logprobs_of
from jaxllm_server.openai.conversation import conversation_of
from jaxllm_server.requests.fields import Body, flag, integer, text
from jaxllm_server.requests.form import form_of
from jaxllm_server.requests.shared_fields import (
    SAMPLING,
    UNBUILT,
    WITHOUT_EFFECT,
    given,
    names_of,
    sampling_of,
    shared_call_fields,
)
from jaxllm_server.responses import request
from jaxllm_server.responses.items import (
    MOST_PARTS,
    RESPONSE_PREFIX,
    Item,
    check_outputs,
    continues_answer,
    items_of,
    messages_of,
    num_parts,
)
from jaxllm_server.responses.output import Event, Output
from jaxllm_server.shared.error_table import code_of, message_of, row_of
from jaxllm_server.shared.options import ServerOptions

Status = Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]

_UNBUILT = {
    **UNBUILT,
    "prompt": (),
    "conversation": (),
    "context_management": ([],),
    "moderation": (),
    "previous_response": (),  # vLLM's, like the next two
    "previous_input_messages": (),
    "enable_response_messages": (False,),
}
# A response has a single output and its log-probabilities.
_SAMPLING = SAMPLING - {"n", "max_tokens", "prompt_logprobs", "logprob_token_ids", "repetition_detection"}
REPEATED_NUMBERS = ("temperature", "top_p", "presence_penalty", "frequency_penalty")  # returned, defaults filled in
_REPEATED = ("user", "safety_identifier", "prompt_cache_key")  # returned unchanged, without effect
_OF_PROMPT = frozenset({"chat_template_kwargs", "enable_thinking", "think", "thinking", "mm_processor_kwargs"})
FIELDS = (
    _SAMPLING
    | _OF_PROMPT
    | WITHOUT_EFFECT
    | _UNBUILT.keys()
    | {"model", "input", "instructions", "previous_response_id", "store", "background", "stream", "stream_options"}
    | {"tools", "tool_choice", "parallel_tool_calls", "max_tool_calls", "text", "reasoning", "include", "top_logprobs"}
    | {"max_output_tokens", "truncation", "metadata", "structured_outputs", "prompt_cache_options"}
    | {"request_id", "priority", "cache_salt", "vllm_xargs", "time_limit"}
)
_STATUSES: Mapping[str, Status] = MappingProxyType(
    {"length": "incomplete", "context": "incomplete", "time_limit": "incomplete", "abort": "cancelled"}
)


class ResponseReply:
    """Reads a request of `/v1/responses` and builds its response.

    `history` is the conversation so far, `kept` the referenced stored items.
    """

    id_prefix = RESPONSE_PREFIX
    fields, unbuilt = FIELDS, _UNBUILT

    def __init__(
        self,
        body: Body,
        options: ServerOptions,
        request_id: str,
        history: Sequence[Item] = (),
        kept: Mapping[str, Item] = MappingProxyType({}),
    ) -> None:
        request.check_names(body)
        self.ignored: list[str] = []
        fields = given(body, FIELDS, _UNBUILT, options.unknown_fields, self.ignored)
        own_id = text(fields, "request_id")
        if own_id is not None and len(own_id) > options.max_request_id_chars:  # item ids contain it
            most = options.max_request_id_chars
            raise UserError(f"request_id may have at most {most} characters.", "request_id")
        self.request_id = request_id if own_id is None else own_id
        self.is_background = bool(flag(fields, "background", False))
        self.is_kept = bool(flag(fields, "store", True)) and options.max_stored_response_bytes > 0
        self.previous = text(fields, "previous_response_id")
        if "input" not in fields:
            raise UserError("input is missing: give a text or a list of items.", "input")
        self.items = items_of(fields["input"], self.request_id, kept)
        sampling, self.names = self._sampling(fields)
        wants_logprobs = "logprobs" in sampling
        self._form = form_of(fields, options, sampling.get("logprobs"))
        self.is_stream = self._form.stream
        if self.is_background:
            _check_background(fields, options)
        self._takes_one_call = flag(fields, "parallel_tool_calls", True) is False
        tools = request.tools_of(fields, options.max_tools)
        choice, shown = request.choice_of(fields, tools)
        if is_forced(choice) and "structured_outputs" not in fields:
            sampling.pop("structured_outputs", None)
        reasoning = request.reasoning_of(fields)
        # Streamed, so that polling returns partial output.
        shared: dict[str, Any] = {**shared_call_fields(fields), "stream": self.is_stream or self.is_background}
        self.calls: Sequence[Call] = [
            Call(
                **_conversation(fields, history, self.items, shown, reasoning["effort"]),
                tool_choice=choice,
                takes_one_call=self._takes_one_call,
                sampling=sampling,
                request_id=self.request_id,
                may_fill_context=True,  # agents request more than is left; as in vLLM
                **shared,
            )
        ]
        self._repeated = {
            "background": self.is_background,
            "instructions": text(fields, "instructions"),
            "max_output_tokens": fields.get("max_output_tokens"),
            "max_tool_calls": integer(fields, "max_tool_calls", 0) if "max_tool_calls" in fields else None,
            "metadata": request.metadata_of(fields),
            "parallel_tool_calls": not self._takes_one_call,
            "previous_response_id": self.previous,
            "reasoning": reasoning,
            "service_tier": "default",
            "store": self.is_kept,
            "text": request.format_of(fields)[0],
            "tool_choice": request.shown_choice(fields),
            "tools": tools,
            "top_logprobs": sampling["logprobs"] if wants_logprobs else 0,
            "truncation": fields.get("truncation", "disabled"),
            **request.texts_of(fields, _REPEATED),
        }
        self._head: dict[str, Any] = {}
        self._clock: Callable[[], float] = float
        self._completed_at: int | None = None
        self._output = Output(self.request_id)
        self._status: Status = "queued"
        self._error: dict[str, Any] | None = None
        self._usage: TokenUsage | None = None
        self._num_events = 0
        self._is_before_content = self._form.shows_reasoning

    def begin(self, head: Mapping[str, Any]) -> None:
        """Set `id`, `created` and `clock` (seconds since 1970), `model` and REPEATED_NUMBERS."""
        rest = {name: head[name] for name in ("model", *REPEATED_NUMBERS)}
        self._clock = head["clock"]
        self._head = {"id": head["id"], "object": "response", "created_at": head["created"], **rest}

    def response(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        for number, chunk in enumerate(chunks):
            self.events(number, chunk)
        return self.snapshot()

    def events(self, number: int, chunk: Chunk) -> list[Event]:
        events: list[Event] = []
        if self._status == "queued":
            self._status = "in_progress"
            events = [{"type": f"response.{kind}", "response": self.snapshot()} for kind in ("created", "in_progress")]
        self._usage = chunk.usage
        for part in chunk.outputs:
            calls = [call for call in part.tool_calls if call.index == 0] if self._takes_one_call else part.tool_calls
            events += self._output.add(part.reasoning, part.text, calls, self._logprobs(part))
            if part.finish_reason is not None:
                self._status = _STATUSES.get(part.finish_reason, "completed")
                if self._status == "completed":
                    self._completed_at = int(self._clock())
                events += self._output.end(is_whole=self._status == "completed")
        return self._numbered(events)

    def last_events(self) -> list[Event]:
        """Return the final response's event; a cancelled one is incomplete."""
        kind = "completed" if self._status == "completed" else "incomplete"
        return self._numbered([{"type": f"response.{kind}", "response": self.snapshot()}])

    def failure(self, error: BaseException) -> list[Event]:
        row, message = row_of(error), message_of(error)
        parameter = error.parameter if isinstance(error, UserError) else None
        parameter = parameter and self.names.get(parameter, parameter)
        events = self._output.end(is_whole=False)
        self._status = "failed"
        code = "rate_limit_exceeded" if row.http == 429 else "invalid_prompt" if row.http < 500 else "server_error"
        self._error = {"code": code, "message": message}
        events.append({"type": "error", "code": code_of(row.reason), "message": message, "param": parameter})
        events.append({"type": "response.failed", "response": self.snapshot()})
        return self._numbered(events)

    def cancel(self) -> None:
        self._output.end(is_whole=False)
        self._status = "cancelled"

    def snapshot(self) -> dict[str, Any]:
        is_cut = self._status == "incomplete"
        return {
            **self._head,
            "completed_at": self._completed_at,
            "status": self._status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output.items(),
            "usage": None if self._status in ("queued", "in_progress") else _usage(self._usage),
            **self._repeated,
        }

    def _sampling(self, fields: Body) -> tuple[dict[str, Any], Mapping[str, str]]:
        """Return sampling parameters, and their request fields for errors."""
        form = request.format_of(fields)[1]
        if form is not None and form["type"] != "text" and "structured_outputs" in fields:
            message = "text.format and structured_outputs exclude each other: give one of them."
            raise UserError(message, "structured_outputs")
        told = {**fields, "response_format": form} if form is not None else fields
        sampling = sampling_of(told)
        names = {"prompt": "input", "messages": "input", "logprobs": "top_logprobs"}
        names |= {"template_kwargs": "chat_template_kwargs", "max_tokens": "max_output_tokens", **names_of(told)}
        if names.get("structured_outputs") == "response_format":
            names["structured_outputs"] = "text"
        if "max_output_tokens" in fields:
            sampling["max_tokens"] = fields["max_output_tokens"]
        top = fields.get("top_logprobs")
        if isinstance(top, bool):
            raise UserError("top_logprobs must be an integer.", "top_logprobs")
        if request.LOGPROBS in request.includes(fields) or top:
            sampling["logprobs"] = top or 0
        if request.chosen(fields, "truncation", ("auto", "disabled"), "truncation", "truncation") == "auto":
            sampling.setdefault("truncate_prompt_tokens", -1)
            names["truncate_prompt_tokens"] = "truncation"
        return sampling, names

    def _logprobs(self, part: Part) -> Sequence[dict[str, Any]]:
        entries = part.logprobs or []
        if self._is_before_content:
            self._is_before_content = not (part.text or part.tool_calls)
            entries = [] if self._is_before_content else _from_content(entries, part.text)
        written = logprobs_of(entries, self._form)
        return [] if written is None else written["content"]

    def _numbered(self, events: list[Event]) -> list[Event]:
        for event in events:
            event["sequence_number"] = self._num_events
            self._num_events += 1
        return events


def _from_content(entries: Sequence[dict[int, Logprob]], text: str) -> Sequence[dict[int, Logprob]]:
    """Return the log-probabilities of the content's tokens, without reasoning.

    Searches the tokens' bytes, since the number of tokens that end reasoning varies by model.
    """
    pieces = [next(iter(entry.values())).decoded_bytes for entry in entries]
    ends, written = list(accumulate(map(len, pieces))), b"".join(pieces)
    start = max(written.rfind(text.encode()), 0) if text else len(written)
    return entries[bisect_right(ends, start) :]


def _check_background(fields: Body, options: ServerOptions) -> None:
    if options.max_stored_response_bytes == 0:
        message = "This server stores no responses (--max-stored-response-bytes 0), so none can be polled."
        raise FeatureDisabledError(message, "background")
    if not flag(fields, "store", True):
        raise UserError("background can only be used when `store` is true.", "background")
    if flag(fields, "stream", False):
        raise UnsupportedError(
            "background with stream is not supported by jaxllm yet: poll the response.", "background"
        )


def _conversation(
    fields: Body, history: Sequence[Item], own: Sequence[Item], tools: Sequence[Body], effort: str | None
) -> dict[str, Any]:
    """Return the `Call` fields of the prompt; `instructions` apply to this request only."""
    items = [*history, *own]
    if not items:
        raise UserError("input must hold at least one item.", "input")
    if num_parts(items) > MOST_PARTS:
        raise UserError(f"a conversation may hold at most {MOST_PARTS} items and parts of items.", "input")
    check_outputs(items)
    instructions = text(fields, "instructions")
    first = [{"role": "system", "content": instructions}] if instructions else []
    continues = continues_answer(items)
    return conversation_of(
        {
            "messages": first + messages_of(items, len(history)),
            "tools": request.chat_tools(tools),
            "reasoning_effort": effort,
            **{name: fields[name] for name in _OF_PROMPT if name in fields},
            "add_generation_prompt": not continues,
            "continue_final_message": continues,
        }
    )


def _usage(usage: TokenUsage | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_prompt_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
