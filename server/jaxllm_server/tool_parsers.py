"""Finds tool calls in a model's text while it comes: each character is looked at once, nothing is parsed again.

A call goes out as the model writes it: its name with the first delta, its arguments as their JSON text, character for
character. Text is held back only while it may still become a call. What turns out not to be one is content, so nothing
but the syntax of calls is lost: their markers, the space around calls, and members other than name and arguments.
Knows nothing of requests, of the tools that were offered, and of protocols.

vLLM (tool_parsers/hermes_tool_parser.py, llama_tool_parser.py) reads the whole text again with every token and takes a
marker inside a JSON string for a marker; neither is done here.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType

_SPACE = frozenset(" \t\r\n")  # JSON's
_SCALAR = frozenset(
    "+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
)  # of numbers, true, false, null
_ARGUMENTS = ("arguments", "parameters")  # Hermes' name for them and Llama's


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
    def _follow(self, call: _CallObject) -> Callable[[str, int], int]:
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
        call = _CallObject(needs_arguments)
        self._read = lambda text, start: self._read_object(call, text, start)

    def _read_object(self, call: _CallObject, text: str, start: int) -> int:
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
        end = _skip_space(text, start)
        self._held.append(text[start:end])
        if end < len(text):
            if text[end] == "{":
                self._begin_object(needs_arguments=False)
            else:
                self._give_up()
                self._read = self._read_content
        return end

    def _follow(self, call: _CallObject) -> Callable[[str, int], int]:
        self._expected = self.markers
        return self._read_between if call.is_call else self._read_content

    def _read_between(self, text: str, start: int) -> int:
        """Read what follows a call: its end tag, space, the next call's tag; anything else is content."""
        if not self._partial:
            end = _skip_space(text, start)
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
        end = _skip_space(text, start)
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

    def _follow(self, call: _CallObject) -> Callable[[str, int], int]:
        self._may_separate = self._may_mark = True
        return self._read_between if call.is_call and not call.is_broken else self._read_content

    def _end(self) -> None:
        is_separator = self._num_calls and not self._partial and "".join(self._held).strip() in ("", ";")
        if self._read != self._read_between or not is_separator:
            self._give_up()


class _Phase(Enum):
    """What a reader of an object expects next."""

    OPENING = auto()  # `{`
    FIRST_KEY = auto()  # or `}`
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    NEXT = auto()  # `,` or `}`
    NOTHING = auto()


_MARKS = MappingProxyType(
    {
        (_Phase.OPENING, "{"): _Phase.FIRST_KEY,
        (_Phase.FIRST_KEY, "}"): _Phase.NOTHING,
        (_Phase.COLON, ":"): _Phase.VALUE,
        (_Phase.NEXT, ","): _Phase.KEY,
        (_Phase.NEXT, "}"): _Phase.NOTHING,
    }
)


class _Role(Enum):
    """What a value is to the object it stands in."""

    KEY = auto()
    NAME = auto()
    ARGUMENTS = auto()
    OTHER = auto()


class _CallObject:
    """Reads one JSON object with a name and arguments, in linear time.

    The object's own members are checked; inside a value only strings and brackets are followed, so that arguments with
    a mistake in them go out whole. A `<` outside of a string breaks them off: JSON has none there, and a tag begins
    with one. Of several names or arguments the first counts, since it may have gone out already.
    """

    def __init__(self, needs_arguments: bool) -> None:
        self.name: str | None = None
        self.is_call = False  # surely one; never taken back
        self.is_over = False
        self.is_broken = False  # over before its closing brace
        self._needs_arguments = needs_arguments
        self._phase = _Phase.OPENING
        self._value: _Value | None = None  # being read
        self._role = _Role.OTHER  # of that value
        self._key: str | None = None
        self._text: list[str] = []  # of a key or a name, with its quotes
        self._arguments: list[str] | None = None  # of their text, what `take_arguments` has not returned

    def read(self, text: str, start: int) -> int:
        """Read on from `start`; return where reading stopped: at the end of `text`, or where the object is over."""
        position = start
        while position < len(text) and not self.is_over:
            character = text[position]
            if self._value is not None:
                position = self._read_value(self._value, text, position)
            elif character in _SPACE:
                position += 1
            elif self._begins_value(character):
                self._begin_value(character)
            elif (self._phase, character) in _MARKS:
                self._phase = _MARKS[self._phase, character]
                position += 1
                if self._phase is _Phase.NOTHING:
                    self._close()
            else:
                self._break()
        return position

    def take_arguments(self) -> str:
        """Return what came of the arguments' text since the last time."""
        taken = "".join(self._arguments or ())
        self._arguments = []
        return taken

    def _begins_value(self, character: str) -> bool:
        if self._phase in (_Phase.FIRST_KEY, _Phase.KEY):
            return character == '"'
        return self._phase is _Phase.VALUE and (character in '"{[' or character in _SCALAR)

    def _begin_value(self, character: str) -> None:
        if self._phase is not _Phase.VALUE:
            self._role = _Role.KEY
        elif self._key == "name" and self.name is None:
            self._role = _Role.NAME
        elif self._key in _ARGUMENTS and self._arguments is None:
            self._role = _Role.ARGUMENTS
            self._arguments = []
            self.is_call = self.name is not None
        else:
            self._role = _Role.OTHER
        self._value = _Value(character)

    def _read_value(self, value: _Value, text: str, start: int) -> int:
        end = value.read(text, start)
        if self._role is _Role.ARGUMENTS:
            assert self._arguments is not None
            self._arguments.append(text[start:end])
        elif self._role is not _Role.OTHER:
            self._text.append(text[start:end])
        if value.is_broken:
            self._break()
        elif value.is_over:
            self._end_value()
        return end

    def _end_value(self) -> None:
        self._value = None
        text, self._text = "".join(self._text), []
        if self._role is _Role.KEY:
            self._key = _string(text)
            self._phase = _Phase.COLON
            return
        self._phase = _Phase.NEXT
        if self._role is _Role.NAME:
            self.name = _string(text)
            if self.name is None:
                self._break()
            self.is_call = self.name is not None and self._arguments is not None

    def _close(self) -> None:
        self.is_over = True
        if self.name is not None and self._arguments is None and not self._needs_arguments:
            self._arguments = ["{}"]
            self.is_call = True

    def _break(self) -> None:
        self.is_over = self.is_broken = True


class _Value:
    """Finds the end of one JSON value. Counts brackets without telling their kinds apart: depth costs no memory."""

    def __init__(self, first: str) -> None:
        self.is_over = False
        self.is_broken = False
        self._is_scalar = first in _SCALAR
        self._depth = 0
        self._is_string = False
        self._is_escaped = False

    def read(self, text: str, start: int) -> int:
        """Read on from `start`; return where reading stopped: at the end of `text`, or where the value is over."""
        for position in range(start, len(text)):
            character = text[position]
            if self._is_scalar:
                if character not in _SCALAR:
                    self.is_over = True
                    return position
            elif self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_escaped = character == "\\"
                self._is_string = character != '"'
            elif character == '"':
                self._is_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
            elif character == "<":
                self.is_broken = True
                return position
            if not (self._is_scalar or self._is_string or self._depth):
                self.is_over = True
                return position + 1
        return len(text)


def _skip_space(text: str, start: int) -> int:
    position = start
    while position < len(text) and text[position] in _SPACE:
        position += 1
    return position


def _string(text: str) -> str | None:
    """Decode a JSON string; None if it is none, or holds half of a surrogate pair, which no protocol could carry."""
    try:
        decoded = json.loads(text)
        return decoded if isinstance(decoded, str) and decoded.encode() else None
    except ValueError:
        return None


TOOL_PARSERS: Mapping[str, Callable[[Callable[[], str]], ToolParser]] = MappingProxyType(
    {"hermes": HermesParser, "llama3_json": LlamaParser}
)
