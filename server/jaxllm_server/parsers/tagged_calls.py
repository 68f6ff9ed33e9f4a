"""Parsers for calls with tagged parameters: Qwen3-Coder, Seed-OSS, MiniMax-M2, GLM-4.5.

Arguments become JSON by the tool's schema; strings are streamed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from jaxllm_server.parsers.named_calls import SectionedCalls
from jaxllm_server.parsers.parameter_types import choices_of, converted, is_text, schema_of, types_of
from jaxllm_server.parsers.tool_parsers import MakeId, is_name


class Tags(NamedTuple):
    """The tags around a call's parts, or ""."""

    section: str
    call: str
    name_end: str
    key: str
    key_end: str
    value: str
    value_end: str
    call_end: str
    section_end: str


class TaggedCalls(SectionedCalls):
    """Parses `<section><call>name<key>…<value>…</value></call></section>` for any tags.

    A call is emitted from its first parameter, or at its end. Values may contain end tags: only one before another
    parameter or the call's end counts.
    """

    tags: ClassVar[Tags]
    _has_lines: ClassVar[bool] = True  # values are on separate lines

    def __init__(self, make_id: MakeId, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(make_id, tools)
        tags = self.tags
        self.markers = (tags.section, tags.section_end) if tags.section else (tags.call, tags.call_end)
        self._openings = (*filter(None, (tags.section, tags.call)),)
        self._closings = (*filter(None, (tags.call_end, tags.section_end)),)
        self._after_value = (tags.key, *self._closings)
        self._called = ""
        self._schema: Mapping[str, Any] = {}
        self._has_begun = False  # part was emitted
        self._value: _Value | None = None

    def _read_name(self, text: str, start: int) -> int:
        ending = self.tags.name_end
        end = start
        if not self._partial:
            end, is_short = self._extend_name(text, start, "<\n" + ending[:1])
            if not is_short or (end < len(text) and not self._may_end_name(text[end])):
                self._refuse()
                return end
        if end < len(text) and ending:
            return self._read_tag(text, end, ending, self._begin_members)
        if end < len(text) and self._name.strip():
            self._begin_members()
        elif end < len(text):
            self._held.append(text[end])
            end += 1
        return end

    def _may_end_name(self, character: str) -> bool:
        is_early = character == "\n" and not self._name.strip() and not self.tags.name_end
        return is_early or is_name(self._name.strip())

    def _read_tag(self, text: str, start: int, tag: str, then: Callable[[], None]) -> int:
        end, marker = self._match(text, start, (tag,))
        if marker:
            self._held.append(marker)
            then()
        elif end < len(text):
            self._refuse()
        return end

    def _begin_members(self) -> None:
        self._called, self._has_begun = self._name.strip(), False
        self._schema = schema_of(self._tools, self._called)
        self._read = self._read_members

    def _read_members(self, text: str, start: int) -> int:
        end, marker = self._match_after_space(text, start, self._after_value)
        if marker:
            self._take_tag(marker)
        elif end < len(text):
            self._refuse()
        return end

    def _take_tag(self, tag: str) -> None:
        self._held.append(tag)
        if tag == self.tags.key:
            self._name = ""
            self._read = self._read_key
        else:
            self._pass_on("}" if self._has_begun else "{}")
            self._has_begun = False
            self._read = self._read_between

    def _read_key(self, text: str, start: int) -> int:
        end = start
        if not self._partial:
            end, is_short = self._extend_name(text, start, "<>\n" + self.tags.key_end[:1])
            if not is_short or (end < len(text) and not self._name.strip()):
                self._refuse()
                return end
        if end < len(text):
            end = self._read_tag(text, end, self.tags.key_end, self._end_key)
        return end

    def _end_key(self) -> None:
        if self.tags.value:
            self._read = self._read_value_tag
        else:
            self._begin_value()

    def _read_value_tag(self, text: str, start: int) -> int:
        end, marker = self._match_after_space(text, start, (self.tags.value,))
        if marker:
            self._begin_value()
        elif end < len(text):
            self._refuse()
        return end

    def _begin_value(self) -> None:
        key = self._name.strip()
        before = ", " if self._has_begun else "{"
        opening = f"{before}{json.dumps(key, ensure_ascii=False)}: "
        types, choices = types_of(self._schema, key), choices_of(self._schema, key)
        self._value = _Value(opening, types, choices, self._has_lines)
        self._held = []
        self._read = self._read_value

    def _read_value(self, text: str, start: int) -> int:
        parts: list[str] = []
        end, marker = self._seek(text, start, (self.tags.value_end,), parts)
        self._extend_value("".join(parts))
        if marker:
            self._held = [marker]
            self._read = self._read_value_end
        return end

    def _read_value_end(self, text: str, start: int) -> int:
        again = self.tags.value_end
        end, marker = self._match_after_space(text, start, (*self._after_value, again))
        if marker == again:
            self._extend_value("".join(self._held))
            self._held = [again]
        elif marker:
            self._end_value()
            self._take_tag(marker)
        elif end < len(text):
            self._extend_value("".join([*self._held, self._partial]))
            self._held, self._partial = [], ""
            self._read = self._read_value
        return end

    def _extend_value(self, text: str) -> None:
        if self._value is not None:
            self._pass_on(self._value.push(text))

    def _end_value(self) -> None:
        if self._value is not None:
            self._pass_on(self._value.finish())
            self._value = None

    def _pass_on(self, arguments: str) -> None:
        if arguments and not self._has_begun:
            self._begin_call(self._called, arguments)
            self._has_begun = True
        else:
            self._extend_call(arguments)
        self._held = []

    def _refuse(self) -> None:
        self._has_begun = False
        super()._refuse()

    def _drop(self) -> None:
        self._end_value()  # excludes a partial end tag
        super()._drop()

    def _end(self) -> None:
        if self._value is None:
            if not self._has_begun:
                super()._end()
            return
        if self._read == self._read_value:
            self._extend_value(self._partial)
        self._end_value()


class _Value:
    """Writes a parameter as JSON: a string incrementally, other values at the end."""

    def __init__(self, opening: str, types: Sequence[str], choices: Sequence[Any], has_lines: bool) -> None:
        self._opening = opening  # punctuation and key, "" once emitted
        self._types = types
        self._choices = choices
        self._is_text = is_text(types)
        self._has_lines = has_lines
        self._is_first = True
        self._newline = ""  # pending; dropped if last
        self._text: list[str] = []

    def push(self, text: str) -> str:
        if self._has_lines and text:
            text = self._newline + (text.removeprefix("\n") if self._is_first else text)
            self._is_first = False
            self._newline = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        if not self._is_text:
            self._text.append(text)
            return ""
        return self._begin() + json.dumps(text, ensure_ascii=False)[1:-1] if text else ""

    def finish(self) -> str:
        if self._is_text:
            return self._begin() + '"'
        return self._opening + converted("".join(self._text), self._types, self._choices)

    def _begin(self) -> str:
        opening, self._opening = self._opening, ""
        return opening + '"' if opening else ""


class Qwen3CoderParser(TaggedCalls):
    """Parses `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, on separate lines.

    The model sometimes omits the first tag.
    """

    tags = Tags("<tool_call>", "<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>", "</tool_call>")


class SeedOssParser(TaggedCalls):
    """Parses Qwen3-Coder's format in `<seed:tool_call>`."""

    tags = Qwen3CoderParser.tags._replace(section="<seed:tool_call>", section_end="</seed:tool_call>")


class MiniMaxParser(TaggedCalls):
    """`<minimax:tool_call><invoke name="…"><parameter name="…">value</parameter></invoke></minimax:tool_call>`."""

    tags = Tags(
        *("<minimax:tool_call>", '<invoke name="', '">', '<parameter name="', '">', "", "</parameter>", "</invoke>"),
        "</minimax:tool_call>",
    )


class GlmParser(TaggedCalls):
    """`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`; line breaks are optional."""

    tags = Tags(*("", "<tool_call>", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>", ""))
    _has_lines = False
