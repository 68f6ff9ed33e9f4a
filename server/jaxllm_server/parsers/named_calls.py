"""Parsers for a name and arguments between markers: DeepSeek and Kimi."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from jaxllm_server.parsers.tool_call_json import SPACE, skip
from jaxllm_server.parsers.tool_parsers import MakeId, ToolParser, is_name

_FENCE = SPACE | frozenset("`json")  # characters of "```json"


class SectionedCalls(ToolParser):
    """Base of parsers for calls that begin with a marker, perhaps in a section.

    Space and markers between calls are dropped; other text is content.
    """

    _openings: tuple[str, ...]
    _closings: tuple[str, ...]
    _space: frozenset[str] = SPACE

    def __init__(self, make_id: MakeId, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(make_id, tools)
        self._read = self._read_content
        self._is_opened = False  # a section or call is open, and no call was read since

    def _read_content(self, text: str, start: int) -> int:
        end, marker = self._seek(text, start, self._openings, self._content)
        if marker:
            self._open(marker)
        return end

    def _read_between(self, text: str, start: int) -> int:
        end, marker = self._match_after_space(text, start, self._openings + self._closings, self._space)
        if marker and marker in self._openings:
            self._open(marker)
        elif marker and self._is_opened:
            self._held.append(marker)
        elif marker:
            self._held = []
        elif end < len(text):
            self._refuse()
        return end

    def _open(self, marker: str) -> None:
        self._held.append(marker)
        self._is_opened = True
        self._read = self._read_between
        if marker == self._openings[-1]:
            self._name = ""
            self._read = self._read_name

    @abstractmethod
    def _read_name(self, text: str, start: int) -> int:
        pass

    def _begin_call(self, name: str, arguments: str, identity: str = "") -> None:
        super()._begin_call(name, arguments, identity)
        self._is_opened = False

    def _refuse(self) -> None:
        self._give_up()
        self._is_opened = False
        self._read = self._read_content

    def _end(self) -> None:
        if self._read != self._read_between or self._is_opened or self._partial:
            self._give_up()


class CallMarkers(NamedTuple):
    """Around a section and a call, and between name and arguments."""

    section: str
    call: str
    separator: str
    call_end: str
    section_end: str


class MarkedCalls(SectionedCalls):
    """Parses `<section><call>name<separator>{…}</call><call>…</call></section>` for any markers.

    Arguments are unchanged, `{}` if missing.
    """

    _marks: ClassVar[CallMarkers]

    def __init__(self, make_id: MakeId, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(make_id, tools)
        marks = self._marks
        self.markers, self._openings = tuple(marks), (marks.section, marks.call)
        self._closings = (marks.section_end, marks.call_end)

    def _read_name(self, text: str, start: int) -> int:
        end = start
        if not self._partial:
            end, is_short = self._extend_name(text, start, "<\n")
            if not is_short or (end < len(text) and text[end] == "\n"):
                self._refuse()
                return end
        end, marker = self._match(text, end, self.markers)
        if marker and marker == self._marks.separator and is_name(self._name.strip()):
            self._held.append(marker)
            self._read = self._read_brace
        elif marker:
            self._give_up_at(marker)
        elif end < len(text):
            self._refuse()
        return end

    def _give_up_at(self, marker: str) -> None:
        if marker in self._openings:
            self._refuse()
            self._open(marker)
        else:
            self._held.append(marker)
            self._refuse()

    def _read_brace(self, text: str, start: int) -> int:
        end, marker = self._match_after_space(text, start, self.markers, self._space)
        if marker == self._marks.call_end:
            self._begin_call(*self._identified("{}"))
            self._read = self._read_between
        elif marker:
            self._give_up_at(marker)
        elif end < len(text) and text[end] == "{" and not self._partial:
            self._begin_call(*self._identified(""))
            self._begin_arguments(self._read_between)
        elif end < len(text):
            self._refuse()
        return end

    def _identified(self, arguments: str) -> tuple[str, str, str]:
        return self._name.strip(), arguments, ""


class DeepSeekParser(MarkedCalls):
    """Parses `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>` of DeepSeek-V3.1, and V3's and R1's form.

    V3 writes `function` before the separator, then the name, and on the next line the arguments as a Markdown block.
    """

    _marks = CallMarkers(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    )
    _space = SPACE | {"`"}

    def _read_brace(self, text: str, start: int) -> int:
        if self._name.strip() != "function" or text[start] == "{":
            self._read = super()._read_brace
        else:
            self._name = ""
            self._read = self._read_typed_name
        return start

    def _read_typed_name(self, text: str, start: int) -> int:
        end, is_short = self._extend_name(text, start, "\n{<")
        if not is_short or (end < len(text) and (text[end] == "<" or not is_name(self._name.strip()))):
            self._refuse()
        elif end < len(text):
            self._read = self._read_fence
        return end

    def _read_fence(self, text: str, start: int) -> int:
        end = skip(text, start, _FENCE)
        self._held.append(text[start:end])
        if end < len(text):
            self._read = super()._read_brace
        return end


class KimiParser(MarkedCalls):
    """Parses `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`, in a section.

    The model expects the id, `functions.name:0`, back in the conversation.
    """

    _marks = CallMarkers(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    )

    def _identified(self, arguments: str) -> tuple[str, str, str]:
        identity = self._name.strip()
        name, colon, number = identity.removeprefix("functions.").rpartition(":")
        if colon and name and number.isascii() and number.isdigit():
            return name, arguments, identity
        return identity.removeprefix("functions.") or identity, arguments, ""
