"""Finds tool calls in a model's text while it comes: each character is looked at once, nothing is parsed again.

A call goes out as the model writes it: its name with the first delta, its arguments as their JSON text, character for
character. Text is held back only while it may still become a call. What turns out not to be one is content, so nothing
but the syntax of calls is lost: their markers, the space around calls, and members other than name and arguments.
Knows nothing of requests, of the tools that were offered, and of protocols.

vLLM (tool_parsers/hermes_tool_parser.py, llama_tool_parser.py) reads the whole text again with every token and takes a
marker inside a JSON string for a marker; neither is done here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jaxllm_server.parsers.tool_call_json import CallObject, skip_space


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What is new of one call; `id` and `name` are in its first delta only."""

    index: int  # of the call in its output
    id: str | None
    name: str | None
    arguments: str  # the next piece of the arguments' JSON text


class ToolParser(ABC):
    """Splits one output into content and calls. What `push` and `finish` return does not depend on how text is cut."""

    markers: tuple[str, ...] = ()  # special tokens of some vocabularies: their text must not be skipped

    def __init__(self, make_id: Callable[[], str]) -> None:
        self._make_id = make_id
        self._read: Callable[[str, int], int]  # the state: reads text from an index on, returns where the next goes on
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._num_calls = 0
        self._held: list[str] = []  # text that may still be part of a call
        self._partial = ""  # text after it that may become a marker

    def push(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        """Take in more text; return the content and the pieces of calls that are certain now."""
        position = 0
        while position < len(text):
            position = self._read(text, position)
        return self._taken()

    def finish(self) -> tuple[str, list[ToolCallDelta]]:
        """Return what was held back, now that no text follows. A call that was cut off keeps the arguments it has."""
        self._end()
        return self._taken()

    @abstractmethod
    def _end(self) -> None:
        """Make content of what is held, if it belongs there."""

    @abstractmethod
    def _follow(self, call: CallObject) -> Callable[[str, int], int]:
        """Return the state that reads what follows a call's object, or what follows held text that was no call."""

    def _taken(self) -> tuple[str, list[ToolCallDelta]]:
        content, calls = "".join(self._content), self._calls
        self._content, self._calls = [], []
        return content, calls

    def _give_up(self) -> None:
        """Let what is held be content."""
        self._content += [*self._held, self._partial]
        self._held, self._partial = [], ""

    def _match(self, text: str, start: int, markers: tuple[str, ...]) -> tuple[int, str | None]:
        """Extend `_partial` as far as a marker goes on with `text`; return where that ended, and a whole marker.

        No marker holds its first character twice, so where one breaks off none can have begun inside `_partial`.
        """
        for position in range(start, len(text)):
            longer = self._partial + text[position]
            if longer in markers:
                self._partial = ""
                return position + 1, longer
            for marker in markers:
                if marker.startswith(longer):
                    self._partial = longer
                    break
            else:
                return position, None
        return len(text), None

    def _begin_object(self, needs_arguments: bool) -> None:
        call = CallObject(needs_arguments)
        self._read = lambda text, start: self._read_object(call, text, start)

    def _read_object(self, call: CallObject, text: str, start: int) -> int:
        """Read a call's JSON object; pass it on from the moment on that it is sure to be a call."""
        was_call = call.is_call
        end = call.read(text, start)
        if not call.is_call:
            self._held.append(text[start:end])
        else:
            self._held = []
            arguments = call.take_arguments()
            if not was_call:
                self._calls.append(ToolCallDelta(self._num_calls, self._make_id(), call.name, arguments))
                self._num_calls += 1
            elif arguments:
                self._calls.append(ToolCallDelta(self._num_calls - 1, None, None, arguments))
        if call.is_over:
            if not call.is_call:
                self._give_up()
            self._read = self._follow(call)
        return end


class HermesParser(ToolParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number of them, with text around.

    Content before the first call goes out as it is, its last newline too, as in vLLM. After a call, space before
    another call or the end is dropped; other text there is content (vLLM drops it). An object without arguments is a
    call with `{}`. A missing end tag does no harm, and tags inside JSON strings are text.
    """

    markers = ("<tool_call>", "</tool_call>")

    def __init__(self, make_id: Callable[[], str]) -> None:
        super().__init__(make_id)
        self._read = self._read_content
        self._expected = self.markers[:1]  # between calls

    def _read_content(self, text: str, start: int) -> int:
        opening = self.markers[0]
        if self._partial:
            end, marker = self._match(text, start, (opening,))
            if marker:
                self._open(marker)
            elif end < len(text):
                self._give_up()
            return end
        found = text.find(opening, start)
        if found >= 0:
            self._content.append(text[start:found])
            self._open(opening)
            return found + len(opening)
        last = text.rfind("<", start)
        if last >= 0 and opening.startswith(text[last:]):
            self._partial = text[last:]
        self._content.append(text[start : len(text) - len(self._partial)])
        return len(text)

    def _open(self, marker: str) -> None:
        self._held = [marker]
        self._read = self._read_opening

    def _read_opening(self, text: str, start: int) -> int:
        """Read the space between a tag and its object."""
        end = skip_space(text, start)
        self._held.append(text[start:end])
        if end < len(text):
            if text[end] == "{":
                self._begin_object(needs_arguments=False)
            else:
                self._give_up()
                self._read = self._read_content
        return end

    def _follow(self, call: CallObject) -> Callable[[str, int], int]:
        self._expected = self.markers
        return self._read_between if call.is_call else self._read_content

    def _read_between(self, text: str, start: int) -> int:
        """Read what follows a call: its end tag, space, the next call's tag; anything else is content."""
        if not self._partial:
            end = skip_space(text, start)
            self._held.append(text[start:end])
            start = end
        end, marker = self._match(text, start, self._expected)
        if marker == self.markers[0]:
            self._open(self.markers[0])
        elif marker:
            self._held = []
            self._expected = self.markers[:1]
        elif end < len(text):
            self._give_up()
            self._read = self._read_content
        return end

    def _end(self) -> None:
        if self._read != self._read_between or self._partial:
            self._give_up()


class LlamaParser(ToolParser):
    """`{"name": …, "parameters": {…}}`, after `<|python_tag|>` or not, several with `;` between them.

    Only an output that begins so has calls, as in vLLM's stream; any other is content as a whole. An object is a call
    only with both a name and arguments, since without a marker it may just be JSON that was asked for. Space, `;` and
    the marker around calls are dropped; from the first text after a call that begins no call all is content.
    """

    markers = ("<|python_tag|>",)

    def __init__(self, make_id: Callable[[], str]) -> None:
        super().__init__(make_id)
        self._read = self._read_between
        self._may_separate = False  # a `;` may come
        self._may_mark = True

    def _read_between(self, text: str, start: int) -> int:
        """Read what may stand before an object."""
        if self._partial:
            end, marker = self._match(text, start, self.markers)
            if marker:
                self._held.append(marker)
                self._may_mark = self._may_separate = False
            elif end < len(text):
                self._refuse()
            return end
        end = skip_space(text, start)
        self._held.append(text[start:end])
        if end == len(text):
            return end
        if text[end] == "{":
            self._begin_object(needs_arguments=True)
        elif text[end] == ";" and self._may_separate:
            self._held.append(";")
            self._may_separate = False
            return end + 1
        elif text[end] == "<" and self._may_mark:
            self._partial = "<"
            return end + 1
        else:
            self._refuse()
        return end

    def _refuse(self) -> None:
        self._give_up()
        self._read = self._read_content

    def _read_content(self, text: str, start: int) -> int:
        self._content.append(text[start:])
        return len(text)

    def _follow(self, call: CallObject) -> Callable[[str, int], int]:
        self._may_separate = self._may_mark = True
        return self._read_between if call.is_call and not call.is_broken else self._read_content

    def _end(self) -> None:
        is_separator = self._num_calls and not self._partial and "".join(self._held).strip() in ("", ";")
        if self._read != self._read_between or not is_separator:
            self._give_up()


TOOL_PARSERS: Mapping[str, Callable[[Callable[[], str]], ToolParser]] = MappingProxyType(
    {"hermes": HermesParser, "llama3_json": LlamaParser}
)
