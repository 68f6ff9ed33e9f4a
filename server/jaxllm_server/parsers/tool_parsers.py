"""Base of the streaming tool-call parsers, which read each character once.

A call's name is emitted first, then its arguments as JSON text. Only text that may become a call is held back.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jaxllm_server.parsers.marker_reader import MarkerReader
from jaxllm_server.parsers.tool_call_json import MAX_NAME, SPACE, JsonValue, skip

_NAME = re.compile(r"[\w.:/-]+")  # OpenAI's API allows letters, digits, `_` and `-`
MakeId: TypeAlias = Callable[[str], str]


def is_name(text: str) -> bool:
    return len(text) <= MAX_NAME and _NAME.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a call; only the first has `id` and `name`."""

    index: int
    id: str | None
    name: str | None
    arguments: str


class ToolParser(MarkerReader, ABC):
    """Splits an output into content and calls, independently of its chunks."""

    markers: tuple[str, ...] = ()  # special tokens that detokenization must keep

    def __init__(self, make_id: MakeId, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__()
        self._make_id = make_id
        self._tools = tools
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._num_calls = 0
        self._held: list[str] = []  # before `_partial`, perhaps of a call
        self._name = ""

    def push(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        """Return final content and call deltas."""
        self._feed(text)
        return self._taken()

    def finish(self, is_cut_off: bool = False) -> tuple[str, list[ToolCallDelta]]:
        """Return the rest at the output's end: held-back text that is not call syntax, as content.

        With `is_cut_off`, the output was truncated: held-back text is dropped, and a call with an emitted beginning
        keeps its partial arguments.
        """
        if is_cut_off:
            self._drop()
        else:
            self._end()
        return self._taken()

    def _drop(self) -> None:
        self._held, self._partial = [], ""

    @abstractmethod
    def _end(self) -> None:
        """Emit held text as content unless it is call syntax."""

    def _taken(self) -> tuple[str, list[ToolCallDelta]]:
        content, calls = "".join(self._content), self._calls
        self._content, self._calls = [], []
        return content, calls

    def _give_up(self) -> None:
        self._content += [*self._held, self._partial]
        self._held, self._partial = [], ""

    def _begin_call(self, name: str, arguments: str, identity: str = "") -> None:
        """Emit a call's beginning; discard the held text, its syntax."""
        self._held = []
        self._calls.append(ToolCallDelta(self._num_calls, identity or self._make_id(name), name, arguments))
        self._num_calls += 1

    def _extend_call(self, arguments: str) -> None:
        if arguments:
            self._calls.append(ToolCallDelta(self._num_calls - 1, None, None, arguments))

    def _begin_arguments(self, after: Callable[[str, int], int]) -> None:
        """Enter a state that emits a JSON object as arguments, followed by the state `after`."""
        value = JsonValue("{")

        def read(text: str, start: int) -> int:
            end = value.read(text, start)
            self._extend_call(text[start:end])
            if value.is_over or value.is_broken:
                self._read = after
            return end

        self._read = read

    def _read_rest(self, text: str, start: int) -> int:
        self._content.append(text[start:])
        return len(text)

    def _match_after_space(
        self, text: str, start: int, markers: tuple[str, ...], space: frozenset[str] = SPACE
    ) -> tuple[int, str | None]:
        if not self._partial:
            end = skip(text, start, space)
            self._held.append(text[start:end])
            start = end
        return self._match(text, start, markers)

    def _extend_name(self, text: str, start: int, stops: str) -> tuple[int, bool]:
        """Return the end, and whether the name is short enough."""
        end = start
        while end < len(text) and text[end] not in stops:
            end += 1
        self._held.append(text[start:end])
        self._name += text[start:end]
        return end, len(self._name) <= MAX_NAME
