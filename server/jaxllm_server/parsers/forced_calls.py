"""Reads calls that an output was constrained to: a list of them where some are required, a named tool's arguments.

Knows the two forms, whatever the model's own form of calls is; text that is none of them is content, as after an output
that was cut off.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxllm_server.parsers.tool_call_json import CallObject, skip_space
from jaxllm_server.parsers.tool_parsers import ToolCallDelta, ToolParser


class RequiredCalls(ToolParser):
    """`[{"name": …, "parameters": {…}}, …]`. Brackets, commas and space around calls are dropped."""

    def __init__(self, make_id: Callable[[], str]) -> None:
        super().__init__(make_id)
        self._read = self._read_between
        self._expected = "["

    def _read_between(self, text: str, start: int) -> int:
        """Read what may stand before an object, or after the last one."""
        end = skip_space(text, start)
        self._held.append(text[start:end])
        if end == len(text):
            return end
        if text[end] == "{" == self._expected:
            self._begin_object(needs_arguments=True)
        elif text[end] in self._expected and text[end] != "{":
            self._held.append(text[end])
            self._expected = "" if text[end] == "]" else "{"
            return end + 1
        else:
            self._give_up()
            self._read = self._read_content
        return end

    def _read_content(self, text: str, start: int) -> int:
        self._content.append(text[start:])
        return len(text)

    def _follow(self, call: CallObject) -> Callable[[str, int], int]:
        self._expected = ",]"
        return self._read_between if call.is_call and not call.is_broken else self._read_content

    def _end(self) -> None:
        if self._read != self._read_between or not self._num_calls:
            self._give_up()


class NamedCall:
    """The arguments of one call, character for character."""

    markers: tuple[str, ...] = ()

    def __init__(self, make_id: Callable[[], str], name: str) -> None:
        self._make_id = make_id
        self._name = name
        self._has_begun = False

    def push(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        """Take in more text; return no content, and the next piece of the call."""
        if not text:
            return "", []
        if self._has_begun:
            return "", [ToolCallDelta(0, None, None, text)]
        self._has_begun = True
        return "", [ToolCallDelta(0, self._make_id(), self._name, text)]

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """Nothing is held back."""
        return "", []
