"""Convert grammars in Lark notation or llama.cpp's GBNF to llguidance's Lark dialect, or refuse them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from llguidance.gbnf_to_lark import gbnf_to_lark

from jaxllm.checks import shown
from jaxllm.errors import UserError

# If all rules nest: 2 kB of stack each; overflow kills the process.
MAX_LEVELS = 2**10
MAX_TEXT = 2**13  # as schemas.MAX_TEXT
MAX_GBNF_RULES = 500  # gbnf_to_lark is quadratic in rules

_GBNF_RULE = re.compile(r"(?m)^[ \t]*([A-Za-z0-9][\w-]*)[ \t]*::=")
# Unclosed texts match to the end: searching from each quote would be quadratic.
_GBNF_PARTS = re.compile(r'#[^\n]*|"(?:\\.|[^"\\])*(?:"|(?P<open>))|\[(?:\\.|[^\]\\])*(?:\]|(?P<open_class>))')
_GBNF_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))|\\.", re.DOTALL)
_SET_OPERATIONS = ("&&", "--", "~~")  # of Rust's classes; literal in GBNF

# As llguidance's lexer (parser/src/lark/lexer.rs).
_LARK = re.compile(
    r'(?P<text>(?:#|//)[^\n]*|"(?:\\.|[^"\\\n])*(?:"|(?P<open>))|/(?:\\.|[^/\\])+(?:/|(?P<open_expression>)))'
    r"|(?P<special><[^<>\s]+>)|(?P<keyword>%(?:json|llguidance|regex))\b|(?P<attribute>(?<![a-z_])[a-z_]+)\s*=|(?P<bracket>[(){}\[\]])"
    r"|(?P<colon>:)"
)
_REPEATS = re.compile(r"\{\s*0*(\d{1,9})")
_ATTRIBUTES = ("lazy", "suffix", "capture", "")
_OPTIONS = ("no_forcing", "allow_initial_skip", "ignore_once")


def of_the_server(grammar: str, prepare_schema: Callable[[Any], Any]) -> str:
    """Return a grammar of the server as `to_lark`; it may contain token ids."""
    return _checked_lark(grammar, prepare_schema, takes_tokens=True)


def to_lark(grammar: str, prepare_schema: Callable[[Any], Any]) -> str:
    """Return a client's grammar in Lark notation; raise UserError if unsupported.

    `prepare_schema` converts embedded JSON schemas.
    """
    first = _GBNF_RULE.search(grammar)
    try:
        return _checked_lark(grammar if first is None else _converted(grammar, first[1]), prepare_schema)
    except RecursionError as error:
        raise _refusal("is nested too deeply; use fewer levels of parentheses") from error


def _refusal(said: str) -> UserError:
    return UserError(f"grammar {said}.", "structured_outputs")


def _converted(gbnf: str, first_rule: str) -> str:
    names = _GBNF_RULE.findall(gbnf)
    if len(names) > MAX_GBNF_RULES:
        raise _refusal(f"has more than {MAX_GBNF_RULES} rules: {len(names)}; Lark's notation allows more")
    if len(names) > len(set(names)):
        raise _refusal(f"defines {next(name for name in names if names.count(name) > 1)} twice; rename one")
    text = _GBNF_PARTS.sub(_spelled, gbnf)
    _check_levels(_GBNF_PARTS.sub("", text), len(names))
    if "root" not in names:
        text = f"root ::= {first_rule}\n{text}"
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise
    except Exception as error:
        raise _refusal(f"is not valid GBNF: {' '.join(str(error).split())[:200]}") from error


def _spelled(found: re.Match[str]) -> str:
    part = found[0]
    if found["open"] is not None or found["open_class"] is not None:
        raise _refusal(f"is not valid GBNF: it has a text or a class that is not closed: {shown(part)}")
    if part.startswith("#"):
        return ""
    if part.startswith("["):
        operation = next((each for each in _SET_OPERATIONS if each in part), None)
        if operation is not None:
            raise _refusal(f"has {operation} within a class; escape it or write the characters apart")
    return _GBNF_ESCAPE.sub(_spelled_character, part)


def _spelled_character(found: re.Match[str]) -> str:
    digits = found[1] or found[2] or found[3]
    if digits is None:
        return found[0]
    code = int(digits, 16)
    if 0xD800 <= code <= 0xDFFF or code > 0x10FFFF:
        raise _refusal(f"has {found[0]}, which is not a valid character of Unicode")
    character = chr(code)
    return character if character.isalnum() or code >= 0xA0 else f"\\x{code:02x}"


def _checked_lark(lark: str, prepare_schema: Callable[[Any], Any], takes_tokens: bool = False) -> str:
    written: list[str] = []
    outside: list[str] = []
    position = num_rules = 0
    while (found := _LARK.search(lark, position)) is not None:
        written.append(lark[position : found.end()])
        position = found.end()
        if found["open"] is not None or found["open_expression"] is not None:
            raise _refusal(f"has a text or an expression that is not closed: {shown(found[0])}")
        if found["special"] and not takes_tokens:
            raise _refusal(f"has the token {shown(found[0])}; only texts are supported")
        if found["attribute"] and found["attribute"] not in _ATTRIBUTES:
            raise _refusal(f"has the attribute {shown(found['attribute'])}, which is not supported; remove it")
        if found["text"] and len(found[0]) > MAX_TEXT and found[0][0] == '"':
            raise _refusal(f"has a text of {len(found[0])} characters; the limit is {MAX_TEXT}")
        if found["text"] and found[0][0] == "/" and any(int(each) > MAX_TEXT for each in _REPEATS.findall(found[0])):
            raise _refusal(f"has an expression that repeats a part more than {MAX_TEXT} times")
        if found["bracket"]:
            outside.append(found[0])
        num_rules += found["colon"] is not None
        if found["keyword"]:
            value, position = _json_at(lark, position)
            if found["keyword"] == "%json":
                value = prepare_schema(value)
            if found["keyword"] == "%llguidance" and not set(value) <= set(_OPTIONS):
                raise _refusal(
                    f"has the option {shown(min(set(value) - set(_OPTIONS)))}, which is not supported; remove it"
                )
            written.append(f" {json.dumps(value)}")
    _check_levels("".join(outside), num_rules)
    return "".join(written) + lark[position:]


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")


def _json_at(text: str, position: int) -> tuple[Any, int]:
    while text[position : position + 1].isspace():
        position += 1
    try:
        value, end = json.JSONDecoder(parse_constant=_refuse_constant).raw_decode(text, position)
    except ValueError as error:
        raise _refusal(f"has JSON that cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise _refusal(f"has {shown(value)} where a JSON object is expected")
    return value, end


def _check_levels(text: str, num_rules: int) -> None:
    depth = most = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        most = max(most, depth)
    if num_rules * (1 + most) > MAX_LEVELS:
        raise _refusal(
            f"has {num_rules} rules with parentheses {most} deep; rules times depth may be at most {MAX_LEVELS}"
        )
