"""Builds a response's output items and a stream's events. Pure.

Items do not depend on chunks, except that each streamed text between calls is a message, while a single chunk's text is
one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxllm_server.parsers.tool_parsers import ToolCallDelta
from jaxllm_server.responses.items import item_id

Event = dict[str, Any]
Kind = Literal["reasoning", "message", "function_call"]
_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_TEXTS = {"reasoning": "reasoning_text", "message": "output_text"}


@dataclass
class _Item:
    kind: Kind
    id: str
    index: int
    call: ToolCallDelta | None = None  # first delta
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": _TEXTS[self.kind], "text": self.text}
        return part if self.kind == "reasoning" else part | {"annotations": [], "logprobs": list(self.logprobs)}

    def written(self, has_content: bool = True) -> dict[str, Any]:
        head = {"id": self.id, "type": self.kind, "status": self.status}
        if self.call is not None:
            arguments = self.text if has_content else ""
            return head | {"call_id": self.call.id, "name": self.call.name, "arguments": arguments}
        own = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return head | own | {"content": [self.part()] if has_content else []}


class Output:
    """A model's output so far."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._items: list[_Item] = []
        self._events: list[Event] = []
        self._space: list[str] = []  # leading, as around calls; kept only before text
        self._logprobs: list[dict[str, Any]] = []

    def items(self) -> list[dict[str, Any]]:
        return [item.written() for item in self._items]

    def add(
        self, reasoning: str, text: str, calls: Sequence[ToolCallDelta], logprobs: Sequence[dict[str, Any]]
    ) -> list[Event]:
        """Return the events of new output: the rest of the open call, reasoning, text, new calls.

        `logprobs` belong to the tokens of text and calls.
        """
        calls = list(calls)
        while calls and calls[0].name is None:
            self._grow(calls.pop(0).arguments)
        if reasoning:
            self._open("reasoning")
            self._grow(reasoning)
        self._logprobs += _covering(logprobs, text) if calls else logprobs
        if text:
            self._say(text)
        for call in calls:
            if call.name is not None:
                self._open("function_call", call)
                self._logprobs.clear()
            self._grow(call.arguments)
        return self._taken()

    def end(self, is_whole: bool) -> list[Event]:
        """Return the final events; a truncated output's last item is incomplete.

        Space alone becomes a message only after text or if nothing else exists. A whole output has a message or a call:
        some clients repeat requests without.
        """
        kinds = {item.kind for item in self._items}
        if self._space and ("message" in kinds or "function_call" not in kinds):
            self._open("message")
            self._grow("".join(self._space))
        elif is_whole and not kinds & {"message", "function_call"}:
            self._open("message")
        if self._logprobs and self._last_is("message"):
            self._grow("")
        self._close("completed" if is_whole else "incomplete")
        return self._taken()

    def _say(self, text: str) -> None:
        if not self._last_is("message"):
            self._space.append(text)
            if text.isspace():
                return
            text, self._space = "".join(self._space), []
            self._open("message")
        self._grow(text)

    def _last_is(self, kind: Kind) -> bool:
        return bool(self._items) and self._items[-1].kind == kind and self._items[-1].status == "in_progress"

    def _open(self, kind: Kind, call: ToolCallDelta | None = None) -> None:
        if call is None and self._last_is(kind):
            return
        self._close("completed")
        index = len(self._items)
        item = _Item(kind, item_id(_PREFIXES[kind], self._request_id, str(index)), index, call)
        self._items.append(item)
        added = {"type": "response.output_item.added", "output_index": index, "item": item.written(has_content=False)}
        self._events.append(added)
        if kind != "function_call":
            self._tell(item, "response.content_part.added", part=item.part())

    def _grow(self, text: str) -> None:
        """Append text to the last item and emit its delta.

        A message also takes pending log-probabilities, which may precede their text.
        """
        item = self._items[-1]
        if item.kind == "message":
            logprobs, self._logprobs = self._logprobs, []
            if text or logprobs:
                item.logprobs += logprobs
                self._tell(item, "response.output_text.delta", delta=text, logprobs=logprobs)
        elif text and item.kind == "reasoning":
            self._tell(item, "response.reasoning_text.delta", delta=text)
        elif text:
            self._tell(item, "response.function_call_arguments.delta", delta=text)
        item.pieces.append(text)

    def _close(self, status: Literal["completed", "incomplete"]) -> None:
        if not self._items or self._items[-1].status != "in_progress":
            return
        item = self._items[-1]
        item.status = status
        if item.call is not None:
            done = "response.function_call_arguments.done"
            self._tell(item, done, name=item.call.name, arguments=item.text)
        else:
            shown = {"logprobs": list(item.logprobs)} if item.kind == "message" else {}
            self._tell(item, f"response.{_TEXTS[item.kind]}.done", text=item.text, **shown)
            self._tell(item, "response.content_part.done", part=item.part())
        self._events.append(
            {"type": "response.output_item.done", "output_index": item.index, "item": item.written()},
        )

    def _tell(self, item: _Item, kind: str, **facts: Any) -> None:
        event: Event = {"type": kind, "item_id": item.id, "output_index": item.index}
        if item.kind != "function_call":
            event["content_index"] = 0
        self._events.append(event | facts)

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def _covering(logprobs: Sequence[dict[str, Any]], text: str) -> Sequence[dict[str, Any]]:
    length = 0
    for number, entry in enumerate(logprobs):
        if length >= len(text):
            return logprobs[:number]
        length += len(entry["token"])
    return logprobs
