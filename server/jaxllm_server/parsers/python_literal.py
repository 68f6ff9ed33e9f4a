"""Converts a streamed Python literal to JSON in linear time.

Models mix in JSON's `true`, `false` and `null`. Anything else, such as a tuple, is an error, as in vLLM
(tool_parsers/utils.py, get_parameter_value).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType

_SPACE = frozenset(" \t\r\n")
_SCALAR = frozenset("+-._0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_CONSTANTS: Mapping[str, str] = MappingProxyType(
    {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
)
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_MAX_PYTHON_NUMBER = 64  # in a notation that JSON lacks
_CLOSERS: Mapping[str, str] = MappingProxyType({"[": "]", "{": "}"})
_ESCAPES: Mapping[str, str] = MappingProxyType(
    {
        **{"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"},
        **{"\\": "\\", "'": "'", '"': '"', "\n": "", "/": "/"},  # "/" is JSON's
    }
)
_HEX_DIGITS: Mapping[str, int] = MappingProxyType({"x": 2, "u": 4, "U": 8})


class _Phase(Enum):
    """The expected token outside strings and scalars."""

    VALUE = auto()
    FIRST = auto()
    COLON = auto()
    NEXT = auto()


class PythonLiteral:
    """Reads a literal; the JSON from `take` is independent of the input's chunks."""

    def __init__(self) -> None:
        self.is_over = False
        self.is_broken = False
        self._phase = _Phase.VALUE
        self._open: list[str] = []
        self._json: list[str] = []
        self._comma = ""
        self._scalar: list[str] | None = None
        self._string: _String | None = None

    def read(self, text: str, start: int) -> int:
        """Convert text from `start` on; return the index after it."""
        position = start
        while position < len(text) and not self.is_over:
            if self._string is not None:
                position = self._string.read(text, position, self._json)
                self._end_string(self._string)
            elif self._scalar is not None:
                position = self._read_scalar(self._scalar, text, position)
            else:
                position = self._read_mark(text[position], position)
        return position

    def take(self) -> str:
        taken, self._json = "".join(self._json), []
        return taken

    def unread(self) -> str:
        return self._string.unread if self._string is not None else "".join([self._comma, *(self._scalar or ())])

    def _read_mark(self, character: str, position: int) -> int:
        bracket = self._open[-1] if self._open else ""
        if character in _SPACE:
            pass
        elif self._phase in (_Phase.FIRST, _Phase.NEXT) and bracket and character == _CLOSERS[bracket]:
            self._open.pop()
            self._json.append(character)
            self._comma, self._phase = "", _Phase.VALUE
            self._end_value()
        elif self._phase is _Phase.NEXT and character == ",":
            self._comma = ", "
            self._phase = _Phase.FIRST
        elif self._phase is _Phase.COLON and character == ":":
            self._json.append(": ")
            self._phase = _Phase.VALUE
        elif self._phase in (_Phase.VALUE, _Phase.FIRST) and self._begins_value(character):
            return position if self._scalar is not None else position + 1
        else:
            self._break()
            return position
        return position + 1

    def _begins_value(self, character: str) -> bool:
        if character in "'\"":
            self._json.append(self._comma + '"')
            self._string = _String(character)
        elif character in _SCALAR:
            self._scalar = []
        elif character in _CLOSERS and not self._is_key:
            self._json.append(self._comma + character)
            self._open.append(character)
            self._phase = _Phase.FIRST
        else:
            return False
        if self._scalar is None:
            self._comma = ""
        return True

    @property
    def _is_key(self) -> bool:
        return self._phase is _Phase.FIRST and self._open[-1] == "{"

    def _read_scalar(self, scalar: list[str], text: str, start: int) -> int:
        end = start
        while end < len(text) and text[end] in _SCALAR:
            end += 1
        scalar.append(text[start:end])
        if end < len(text):
            converted = _number("".join(scalar))
            if converted is None:
                self._break()
                return end
            self._json.append(self._comma + (f'"{converted}"' if self._is_key else converted))
            self._comma, self._scalar = "", None
            self._end_value()
        return end

    def _end_string(self, string: _String) -> None:
        if string.is_broken:
            self._break()
        elif string.is_over:
            self._string = None
            self._end_value()

    def _end_value(self) -> None:
        self._phase = _Phase.COLON if self._is_key else _Phase.NEXT
        self.is_over = not self._open

    def _break(self) -> None:
        self.is_over = self.is_broken = True


class _String:
    """Reads a string with Python's escapes, after its first quote."""

    def __init__(self, quote: str) -> None:
        self.is_over = False
        self.is_broken = False
        self.unread = ""
        self._quote = quote
        self._is_opening = True
        self._is_triple = False

    def read(self, text: str, start: int, into: list[str]) -> int:
        """Append JSON to `into`, up to the closing quote."""
        position = start
        while position < len(text) and not (self.is_over or self.is_broken):
            if self._is_opening:
                position = self._read_opening(text, position, into)
            elif self.unread.startswith("\\"):
                position = self._read_escape(text[position], position, into)
            elif self.unread:
                position = self._read_closing(text[position], position, into)
            else:
                end = position
                while end < len(text) and text[end] != self._quote and text[end] != "\\":
                    end += 1
                into.append(_inside(text[position:end]))
                self.unread = text[end : end + 1]
                position = end + len(self.unread)
                if self.unread == self._quote and not self._is_triple:
                    self._close(into)
        return position

    def _read_opening(self, text: str, position: int, into: list[str]) -> int:
        if text[position] == self._quote:
            self.unread += self._quote
            if len(self.unread) == 2:
                self._is_triple, self._is_opening, self.unread = True, False, ""
            return position + 1
        if self.unread:
            self._close(into)
        self._is_opening = False
        return position

    def _read_closing(self, character: str, position: int, into: list[str]) -> int:
        if character != self._quote:
            into.append(_inside(self.unread))
            self.unread = ""
            return position
        self.unread += character
        if len(self.unread) == 3:
            self._close(into)
        return position + 1

    def _read_escape(self, character: str, position: int, into: list[str]) -> int:
        self.unread += character
        kind = self.unread[1]
        if kind not in _HEX_DIGITS:
            known = _ESCAPES.get(kind)
            into.append(_inside(self.unread if known is None else known))  # unknown escapes stay, as in Python
            self.unread = ""
        elif len(self.unread) > 2 and character not in "0123456789abcdefABCDEF":
            self.is_broken = True
        elif len(self.unread) == 2 + _HEX_DIGITS[kind]:
            code = int(self.unread[2:], 16)
            if code > 0x10FFFF:
                self.is_broken = True
                return position + 1
            into.append(json.dumps(chr(code))[1:-1])
            self.unread = ""
        return position + 1

    def _close(self, into: list[str]) -> None:
        into.append('"')
        self.unread = ""
        self.is_over = True


def as_json(text: str) -> str | None:
    """Convert a complete Python literal to JSON; return None if invalid."""
    literal = PythonLiteral()
    source = text + "\n"
    end = literal.read(source, 0)
    return literal.take() if literal.is_over and not literal.is_broken and not source[end:].strip() else None


def _inside(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _number(scalar: str) -> str | None:
    if scalar in _CONSTANTS:
        return _CONSTANTS[scalar]
    if _JSON_NUMBER.fullmatch(scalar):
        return scalar
    if len(scalar) > _MAX_PYTHON_NUMBER:
        return None
    for read in (lambda written: int(written, 0), float):
        try:
            number = read(scalar)
        except ValueError:
            continue
        return json.dumps(number) if math.isfinite(number) else None
    return None
