r"""Translate Python regular expressions to llguidance's dialect, with the matches of `re.fullmatch`.

Parsed by Python, because dialects differ: `$` within a text, `\w` and combining marks, lazy quantifiers.
"""

from __future__ import annotations

import re
import unicodedata
import warnings
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Any

from jaxllm.errors import UserError

# Each step tokenizes forced text again: 0.4 s to compile "a?a?a?..." of this length.
MAX_CHARS = 2**13

_parser: Any = vars(re)["_parser"]

_AGE = ".".join(unicodedata.unidata_version.split(".")[:2])  # llguidance's Unicode may be newer
_WORD = rf"[[\p{{L}}\p{{N}}_]&&\p{{age:{_AGE}}}]"  # Python's \w; Rust's has combining marks
# Subsets of Python's categories, for Unicode and re.ASCII.
_CATEGORIES = {
    "CATEGORY_DIGIT": ("0-9", "0-9"),
    "CATEGORY_NOT_DIGIT": (r"\P{Nd}", "[^0-9]"),
    "CATEGORY_SPACE": (r"\s", r" \t\n\r\x0b\x0c"),
    "CATEGORY_NOT_SPACE": (r"[^\s\x1c-\x1f]", r"[^ \t\n\r\x0b\x0c]"),
    "CATEGORY_WORD": (_WORD, "0-9A-Za-z_"),
    "CATEGORY_NOT_WORD": (r"[^\p{L}\p{N}_]", "[^0-9A-Za-z_]"),
}
# Supersets, for negated classes.
_LEFT_OUT = {
    "CATEGORY_DIGIT": r"\p{Nd}",
    "CATEGORY_NOT_DIGIT": "[^0-9]",
    "CATEGORY_SPACE": r"\s\x1c-\x1f",
    "CATEGORY_NOT_SPACE": r"\S\x1c-\x1f",
    "CATEGORY_WORD": r"\p{L}\p{N}_",
    "CATEGORY_NOT_WORD": rf"[^\p{{L}}\p{{N}}_]\P{{age:{_AGE}}}",
}
_REFUSED = {
    "ASSERT": "a lookahead or lookbehind, (?=...) or (?<=...)",
    "ASSERT_NOT": "a negative lookahead or lookbehind, (?!...) or (?<!...)",
    "GROUPREF": r"a backreference, \1 or (?P=name)",
    "GROUPREF_EXISTS": "a conditional group, (?(1)...)",
    "ATOMIC_GROUP": "an atomic group, (?>...)",
    "POSSESSIVE_REPEAT": "a possessive quantifier, as *+",
    "AT_BOUNDARY": r"a word boundary, \b",
    "AT_NON_BOUNDARY": r"a word boundary, \B",
    "AT_BEGINNING": "^ that is not at the beginning",
    "AT_BEGINNING_STRING": r"\A that is not at the beginning",
    "AT_END": "$ that is not at the end",
    "AT_END_STRING": r"\Z that is not at the end",
}
_BEGINNINGS, _ENDS = ("AT_BEGINNING", "AT_BEGINNING_STRING"), ("AT_END", "AT_END_STRING")

# JSON schema patterns: `\d` and `\w` are ASCII, as in ECMA 262; `\D` and `\W` exclude all digits and letters.
_OF_PATTERNS = _CATEGORIES | {
    "CATEGORY_WORD": ("0-9A-Za-z_", "0-9A-Za-z_"),
    "CATEGORY_NOT_SPACE": (r"[^\s\x1c-\x1f\x{feff}]", r"[^ \t\n\r\x0b\x0c]"),
}
_LEFT_OUT_OF_PATTERNS = _LEFT_OUT | {
    "CATEGORY_SPACE": r"\s\x1c-\x1f\x{feff}",
    "CATEGORY_NOT_WORD": "[^0-9A-Za-z_]",
}
_UNWRITABLE = r"[\x00-\x07\x0b\x0e-\x1f\x7f]"  # need a \u escape in JSON
_ANY_TEXT = "(?s:.*)"
_FIRST_PROPERTY = 0xF0000  # replace \p{...} for Python
_OF_ECMA = re.compile(
    r"(?P<property>\\[pP]\{\^?[\w=:]+\})|\\u\{(?P<code>[0-9a-fA-F]{1,6})\}|\\.|(?P<named>\(\?<(?=\w))", re.DOTALL
)


class _Edge(Enum):
    """The context at one end of a part."""

    INNER = auto()
    HELD = auto()  # start or end of the text
    OPEN = auto()  # any text, unless anchored


def translate(pattern: str, name: str = "regex") -> str:
    """Rewrite a Python regular expression in llguidance's dialect, with the same meaning.

    Raises UserError if invalid, too long, or unsupported; messages begin with `name`.
    """
    return _Writer(name).write(pattern)


def translate_whitespace(pattern: str) -> str:
    """Translate an expression for whitespace between JSON's parts, which must match nothing else."""
    return _Writer("whitespace_pattern", characters=" \t\n\r").write(pattern)


def translate_pattern(pattern: str) -> str:
    r"""Translate a JSON schema pattern to an expression for the whole text.

    Classes lose control characters that need a \\u escape, with which llguidance matches escaped quotes.
    """
    return f"^(?:{_PatternWriter('pattern').write(pattern)})$"


class _Writer:
    """Translates one expression; it may match only `characters`, if set."""

    _edge = _Edge.HELD

    def __init__(self, name: str, characters: str | None = None) -> None:
        self._name = name
        self._characters = characters

    def write(self, pattern: str) -> str:
        if len(pattern) > MAX_CHARS:
            raise self._refusal(f"has more than {MAX_CHARS} characters: {len(pattern)}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                parsed = _parser.parse(pattern)
            least = parsed.getwidth()[0]
            if least > MAX_CHARS:
                raise self._refusal(f"matches no text of fewer than {least} characters; the limit is {MAX_CHARS}")
            return self._sequence(parsed, parsed.state.flags, self._edge, self._edge)
        except re.error as error:
            raise self._refusal(f"is not a valid regular expression: {error}") from error
        except (RecursionError, OverflowError) as error:
            raise self._refusal("is nested too deeply or repeats too often; simplify it") from error

    def _refusal(self, said: str) -> UserError:
        return UserError(f"{self._name} {said}.", "structured_outputs")

    def _refused(self, construct: str) -> UserError:
        return self._refusal(f"has {construct}, which is not supported; write the expression without it")

    def _sequence(self, items: Iterable[Any], flags: int, begin: _Edge, end: _Edge) -> str:
        parts = [(str(op), value) for op, value in items]
        is_inner = [op != "AT" for op, _ in parts]
        first = is_inner.index(True) if any(is_inner) else len(parts)
        last = len(parts) - is_inner[::-1].index(True) if any(is_inner) else 0
        before, begin = self._edge_of(parts[: first + 1], _BEGINNINGS, flags, begin)
        after, end = self._edge_of(parts[max(0, last - 1) :][::-1], _ENDS, flags, end)
        written = [
            self._part(
                op, value, flags, begin if number <= first else _Edge.INNER, end if number >= last - 1 else _Edge.INNER
            )
            for number, (op, value) in enumerate(parts)
        ]
        return before + "".join(written) + after

    @staticmethod
    def _edge_of(
        parts: Sequence[tuple[str, Any]], names: tuple[str, ...], flags: int, edge: _Edge
    ) -> tuple[str, _Edge]:
        """Return the expression to insert at one end of a sequence, and the context there.

        `parts` are its anchors and the next part, `names` the anchors of this end.
        """
        if edge is not _Edge.OPEN:
            return "", edge
        asserted = [str(value) for op, value in parts if op == "AT" and str(value) in names]
        if not asserted:
            passes_on = bool(parts) and parts[-1][0] in ("BRANCH", "SUBPATTERN")
            return ("", edge) if passes_on else (_ANY_TEXT, _Edge.HELD)
        if flags & re.MULTILINE and not any(each.endswith("STRING") for each in asserted):
            line = rf"{_ANY_TEXT}\n" if names is _BEGINNINGS else rf"\n{_ANY_TEXT}"
            return f"(?:{line})?", _Edge.HELD
        return "", _Edge.HELD

    def _part(self, op: str, value: Any, flags: int, begin: _Edge, end: _Edge) -> str:
        if op in ("LITERAL", "NOT_LITERAL"):
            return self._class([("NEGATE", None)] * (op == "NOT_LITERAL") + [("LITERAL", value)], flags)
        if op == "IN":
            return self._class(value, flags)
        if op == "ANY":
            if self._characters is not None:
                raise self._refused("a dot")
            return "(?s:.)" if flags & re.DOTALL else r"[^\n]"
        if op == "BRANCH":
            return f"(?:{'|'.join(self._sequence(each, flags, begin, end) for each in value[1])})"
        if op == "SUBPATTERN":
            _, added, removed, inner = value
            return f"(?:{self._sequence(inner, (flags | added) & ~removed, begin, end)})"
        if op in ("MAX_REPEAT", "MIN_REPEAT"):  # equal in full matches
            least, most, inner = value
            bound = "" if most is _parser.MAXREPEAT or str(most) == "MAXREPEAT" else int(most)
            return f"(?:{self._sequence(inner, flags, _Edge.INNER, _Edge.INNER)}){{{int(least)},{bound}}}"
        at_an_end = (begin is not _Edge.INNER and str(value) in _BEGINNINGS) or (
            end is not _Edge.INNER and str(value) in _ENDS
        )
        if op == "AT" and at_an_end:
            return ""
        raise self._refused(_REFUSED.get(str(value) if op == "AT" else op, f"the construct {op}"))

    def _class(self, items: Sequence[tuple[Any, Any]], flags: int) -> str:
        is_negated = str(items[0][0]) == "NEGATE"
        if is_negated and self._characters is not None:
            raise self._refused("a negated class")
        if is_negated and flags & re.IGNORECASE:
            raise self._refused("a negated class that ignores case")
        parts = [self._class_part(str(op), value, flags, is_negated) for op, value in items[is_negated:]]
        return f"[{'^' * is_negated}{''.join(parts)}]"

    def _class_part(self, op: str, value: Any, flags: int, is_negated: bool) -> str:
        if op == "CATEGORY":
            return self._category(str(value), flags, is_negated)
        low, high = (value, value) if op == "LITERAL" else value
        if any(0xD800 <= end <= 0xDFFF for end in (low, high)):
            raise self._refused("half of a surrogate pair")
        if self._characters is not None and not set(_characters(low, high)) <= set(self._characters):
            raise self._refused("more than JSON's whitespace")
        if flags & re.IGNORECASE and high > max(low, 0x7F):
            raise self._refused("a range beyond ASCII that ignores case")
        return self._span(low, high) + (_other_case(low, high) if flags & re.IGNORECASE else "")

    def _span(self, low: int, high: int) -> str:
        return _span(low, high)

    def _category(self, name: str, flags: int, is_negated: bool) -> str:
        if self._characters is not None:
            if name != "CATEGORY_SPACE":
                raise self._refused("more than JSON's whitespace")
            return r" \t\n\r"
        if is_negated and not flags & re.ASCII:
            return _LEFT_OUT[name]
        return _CATEGORIES[name][bool(flags & re.ASCII)]


class _PatternWriter(_Writer):
    r"""Translates JSON schema patterns: Python expressions with \\p{...}."""

    _edge = _Edge.OPEN

    def write(self, pattern: str) -> str:
        self._properties: list[str] = []
        return super().write(_OF_ECMA.sub(self._as_python, pattern))

    def _as_python(self, found: re.Match[str]) -> str:
        if found["property"]:
            self._properties.append(found["property"])
            return chr(_FIRST_PROPERTY + len(self._properties) - 1)
        if found["code"]:
            return rf"\U{int(found['code'], 16):08x}"
        return "(?P<" if found["named"] else found[0]

    def _class(self, items: Sequence[tuple[Any, Any]], flags: int) -> str:
        return f"[{super()._class(items, flags)}--{_UNWRITABLE}]"

    def _span(self, low: int, high: int) -> str:
        if low == high and 0 <= low - _FIRST_PROPERTY < len(self._properties):
            return self._properties[low - _FIRST_PROPERTY]
        return super()._span(low, high)

    def _category(self, name: str, flags: int, is_negated: bool) -> str:
        if flags & re.ASCII:
            return super()._category(name, flags, is_negated)
        return _LEFT_OUT_OF_PATTERNS[name] if is_negated else _OF_PATTERNS[name][0]


def _characters(low: int, high: int) -> list[str]:
    return [chr(each) for each in range(low, min(high, low + 32) + 1)]


def _span(low: int, high: int) -> str:
    return rf"\x{{{low:x}}}" if low == high else rf"\x{{{low:x}}}-\x{{{high:x}}}"


def _other_case(low: int, high: int) -> str:
    spans = []
    for first, last, distance in ((0x41, 0x5A, 32), (0x61, 0x7A, -32)):
        start, end = max(low, first), min(high, last)
        if start <= end:
            spans.append(_span(start + distance, end + distance))
    return "".join(spans)
