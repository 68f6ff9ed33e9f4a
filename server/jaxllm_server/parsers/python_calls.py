"""Parser for Python-style calls of Llama 4 and 3.2: `[get_weather(city="Paris", days=2), now()]`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm_server.parsers.python_literal import PythonLiteral
from jaxllm_server.parsers.tool_call_json import MAX_NAME, skip
from jaxllm_server.parsers.tool_parsers import MakeId, ToolParser

# Of OpenAI's tool names, and of dotted ones.
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")


class PythonicParser(ToolParser):
    """Parses `[name(key=literal, …), …]` at the start of an output, or after any `<|python_start|>`.

    A call is emitted from its first value on, or at its end, with JSON arguments; an invalid value ends it, and the
    rest is content.
    """

    markers = ("<|python_start|>", "<|python_end|>")

    def __init__(self, make_id: MakeId, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(make_id, tools)
        self._read = self._read_opening
        self._called = ""
        self._has_begun = False  # part was emitted
        self._key = ""
        self._literal = PythonLiteral()

    def _read_content(self, text: str, start: int) -> int:
        end, marker = self._seek(text, start, self.markers[:1], self._content)
        if marker:
            self._held = [marker]
            self._read = self._read_opening
        return end

    def _read_opening(self, text: str, start: int) -> int:
        end, marker = self._match_after_space(text, start, self.markers[:1])
        if marker:
            self._held.append(marker)
        elif end < len(text) and text[end] == "[" and not self._partial:
            self._held.append("[")
            self._begin_name()
            return end + 1
        elif end < len(text):
            self._refuse()
        return end

    def _begin_name(self) -> None:
        self._name = ""
        self._read = self._read_name

    def _read_name(self, text: str, start: int) -> int:
        return self._read_word(text, start, "(")

    def _read_key(self, text: str, start: int) -> int:
        return self._read_word(text, start, "=)")

    def _read_word(self, text: str, start: int, ends: str) -> int:
        end = start
        while end < len(text) and (text[end] in _NAME or text[end] in " \n\t\r"):
            end += 1
        self._held.append(text[start:end])
        self._name += text[start:end]
        if len(self._name) > MAX_NAME:
            self._refuse()
            return end
        if end < len(text):
            word = self._name.strip()
            is_empty = text[end] == ")"  # no keyword, as in `now()`
            if text[end] not in ends or len(word.split()) != (0 if is_empty else 1):
                self._refuse()
                return end
            self._held.append(text[end])
            self._take_word(word, text[end])
            return end + 1
        return end

    def _take_word(self, word: str, end: str) -> None:
        self._name = ""
        if end == "(":
            self._called = word
            self._read = self._read_key
        elif end == "=":
            self._key, self._literal = word, PythonLiteral()
            self._read = self._read_value
        else:
            self._close_call()

    def _read_value(self, text: str, start: int) -> int:
        literal = self._literal
        end = literal.read(text, start)
        converted = literal.take()
        if converted and self._key:
            before = ", " if self._has_begun else "{"
            self._pass_on(f"{before}{json.dumps(self._key)}: {converted}")
            self._key = ""
        elif converted:
            self._pass_on(converted)
        elif self._key:
            self._held.append(text[start:end])
        if literal.is_broken:
            self._held += [] if self._key else [literal.unread()]
            self._refuse()
        elif literal.is_over:
            self._read = self._read_comma
        return end

    def _pass_on(self, arguments: str) -> None:
        if self._has_begun:
            self._held = []
            self._extend_call(arguments)
        else:
            self._begin_call(self._called, arguments)
            self._has_begun = True

    def _read_comma(self, text: str, start: int) -> int:
        end = skip(text, start)
        self._held.append(text[start:end])
        if end == len(text):
            return end
        if text[end] not in ",)":
            self._refuse()
            return end
        self._held.append(text[end])
        if text[end] == ",":
            self._read = self._read_key
        else:
            self._close_call()
        return end + 1

    def _close_call(self) -> None:
        self._pass_on("}" if self._has_begun else "{}")
        self._has_begun = False
        self._read = self._read_next

    def _read_next(self, text: str, start: int) -> int:
        end = skip(text, start)
        self._held.append(text[start:end])
        if end == len(text):
            return end
        if text[end] not in ",]":
            self._refuse()
            return end
        if text[end] == ",":
            self._held.append(",")
            self._begin_name()
        else:
            self._held = []
            self._read = self._read_after
        return end + 1

    def _read_after(self, text: str, start: int) -> int:
        end, marker = self._match_after_space(text, start, self.markers)
        if marker and marker == self.markers[0]:
            self._held = [marker]
            self._read = self._read_opening
        elif marker:
            self._held = []
        elif end < len(text):
            self._refuse()
        return end

    def _refuse(self) -> None:
        self._give_up()
        self._has_begun = False
        self._read = self._read_content

    def _end(self) -> None:
        is_between = self._read in (self._read_next, self._read_after) and not self._partial
        if not self._has_begun and not is_between:
            self._give_up()
