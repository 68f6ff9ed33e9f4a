"""Streaming reader of a call's JSON object."""

from __future__ import annotations

import json
from enum import Enum, auto
from types import MappingProxyType

SPACE = frozenset(" \t\r\n")
_SCALAR = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_ARGUMENTS = ("arguments", "parameters")  # Hermes' key and Llama's
_MEMBERS = frozenset({"name", "id", "type", "function", *_ARGUMENTS})

MAX_NAME = 256  # characters; a longer name is text


class _Phase(Enum):
    """The expected token."""

    OPENING = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    NEXT = auto()
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
    KEY = auto()
    NAME = auto()
    ARGUMENTS = auto()
    OTHER = auto()


class CallObject:
    """Reads a call's name, and its arguments' text unchanged, in linear time.

    In values only strings and brackets are tracked, so malformed arguments pass. A `<` outside strings aborts, as a tag
    may begin. Of duplicate members the first counts, which may have been emitted.
    """

    def __init__(self, needs_arguments: bool) -> None:
        self.name: str | None = None
        self.is_call = False  # final once True
        self.is_over = False
        self.is_broken = False
        self.is_foreign = False
        self._needs_arguments = needs_arguments
        self._phase = _Phase.OPENING
        self._value: JsonValue | None = None
        self._role = _Role.OTHER
        self._key: str | None = None
        self._text: list[str] = []
        self._arguments: list[str] | None = None

    def read(self, text: str, start: int) -> int:
        """Read text from `start` on; return the index after it."""
        position = start
        while position < len(text) and not self.is_over:
            character = text[position]
            if self._value is not None:
                position = self._read_value(self._value, text, position)
            elif character in SPACE:
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
        self._value = JsonValue(character)

    def _read_value(self, value: JsonValue, text: str, start: int) -> int:
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
            self.is_foreign = self.is_foreign or self._key not in _MEMBERS
            self._phase = _Phase.COLON
            return
        self._phase = _Phase.NEXT
        if self._role is _Role.NAME:
            self.name = _string(text)
            if self.name is not None and len(self.name) > MAX_NAME:
                self.name = None
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


class JsonValue:
    """Finds a JSON value's end by counting brackets of any kind, so nesting needs no memory."""

    def __init__(self, first: str) -> None:
        self.is_over = False
        self.is_broken = False
        self._is_scalar = first in _SCALAR
        self._depth = 0
        self._is_string = False
        self._is_escaped = False

    def read(self, text: str, start: int) -> int:
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


def skip(text: str, start: int, characters: frozenset[str] = SPACE) -> int:
    position = start
    while position < len(text) and text[position] in characters:
        position += 1
    return position


def _string(text: str) -> str | None:
    """Decode a JSON string; None if invalid."""
    try:
        decoded = json.loads(text)
        return decoded if isinstance(decoded, str) and decoded.encode() else None
    except ValueError:
        return None
