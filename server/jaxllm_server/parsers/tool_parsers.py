"""Finds tool calls in a model's text while it comes: each character is looked at once, nothing is parsed again.

What every form of calls has in common; the forms are in json_calls.py, named_calls.py, tagged_calls.py, python_calls.py
and harmony.py, their names in table.py.

A call goes out as the model writes it: its name with the first delta, its arguments as JSON text, character for
character where the model writes JSON, else as they are converted. Text is held back only while it may still become a
call. What turns out not to be one is content, so nothing but the syntax of calls is lost: their markers, the space
around calls, and members other than name and arguments. Knows nothing of requests and of protocols.

vLLM (tool_parsers/hermes_tool_parser.py, llama_tool_parser.py) reads the whole text again with every token and takes a
marker inside a JSON string for a marker; neither is done here.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jaxllm_server.parsers.marker_reader import MarkerReader
from jaxllm_server.parsers.tool_call_json import MAX_NAME, SPACE, JsonValue, skip

_NAME = re.compile(r"[\w.:/-]+")  # OpenAI's API takes fewer: letters, digits, `_` and `-`
MakeId: TypeAlias = Callable[[str], str]  # of a tool's name


def is_name(text: str) -> bool:
    """Whether text between markers may be the name of a tool, rather than a call of another form."""
    return len(text) <= MAX_NAME and _NAME.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What is new of one call; `id` and `name` are in its first delta only."""

    index: int  # of the call in its output
    id: str | None
    name: str | None
    arguments: str  # the next piece of the arguments' JSON text


class ToolParser(MarkerReader, ABC):
    """Splits one output into content and calls. What `push` and `finish` return does not depend on how text is cut.

    `make_id` makes the id of a call that the model gives none; `tools` are those that were offered, as in a request.
    """

    markers: tuple[str, ...] = ()  # special tokens of some vocabularies: their text must not be skipped

    def __init__(self, make_id: MakeId, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__()
        self._make_id = make_id
        self._tools = tools
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._num_calls = 0
        self._held: list[str] = []  # text before `_partial` that may still be part of a call
        self._name = ""  # what has come of a name; part of what is held

    def push(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        """Take in more text; return the content and the pieces of calls that are certain now."""
        self._feed(text)
        return self._taken()

    def finish(self, is_cut_off: bool = False) -> tuple[str, list[ToolCallDelta]]:
        """Return the text held back at the end of an output. A truncated call keeps the arguments so far.

        With `is_cut_off` the output reached a bound: held text is part of a marker or of a call, and is dropped.
        """
        if is_cut_off:
            self._drop()
        else:
            self._end()
        return self._taken()

    def _drop(self) -> None:
        """Drop held text, which is neither content nor a call."""
        self._held, self._partial = [], ""

    @abstractmethod
    def _end(self) -> None:
        """Make content of what is held, if it belongs there."""

    def _taken(self) -> tuple[str, list[ToolCallDelta]]:
        content, calls = "".join(self._content), self._calls
        self._content, self._calls = [], []
        return content, calls

    def _give_up(self) -> None:
        """Let what is held be content."""
        self._content += [*self._held, self._partial]
        self._held, self._partial = [], ""

    def _begin_call(self, name: str, arguments: str, identity: str = "") -> None:
        """Pass on a call's name and the first of its arguments; what was held was syntax."""
        self._held = []
        self._calls.append(ToolCallDelta(self._num_calls, identity or self._make_id(name), name, arguments))
        self._num_calls += 1

    def _extend_call(self, arguments: str) -> None:
        if arguments:
            self._calls.append(ToolCallDelta(self._num_calls - 1, None, None, arguments))

    def _begin_arguments(self, after: Callable[[str, int], int]) -> None:
        """Read a JSON object, and pass it on as arguments character for character; `after` is the state behind it."""
        value = JsonValue("{")

        def read(text: str, start: int) -> int:
            end = value.read(text, start)
            self._extend_call(text[start:end])
            if value.is_over or value.is_broken:
                self._read = after
            return end

        self._read = read

    def _read_rest(self, text: str, start: int) -> int:
        """Read what is content in any case."""
        self._content.append(text[start:])
        return len(text)

    def _match_after_space(
        self, text: str, start: int, markers: tuple[str, ...], space: frozenset[str] = SPACE
    ) -> tuple[int, str | None]:
        """Hold space back, and match a marker behind it."""
        if not self._partial:
            end = skip(text, start, space)
            self._held.append(text[start:end])
            start = end
        return self._match(text, start, markers)

    def _extend_name(self, text: str, start: int, stops: str) -> tuple[int, bool]:
        """Take in a name up to one of `stops`; return where that is, and whether it may still be a name."""
        end = start
        while end < len(text) and text[end] not in stops:
            end += 1
        self._held.append(text[start:end])
        self._name += text[start:end]
        return end, len(self._name) <= MAX_NAME
