"""Grammars of tool calls in the model's format. Pure.

In llguidance's Lark notation, `<[7]>` is token 7. The format's parser reads every output of its grammar. Arguments
follow the schema of `strict` tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from jaxllm_server.generation.forced_calls import moved, parameters_of
from jaxllm_server.parsers.harmony import CALL_HEADERS, HarmonyParser
from jaxllm_server.parsers.json_calls import GraniteParser, HermesParser, LlamaParser, MistralParser
from jaxllm_server.parsers.named_calls import DeepSeekParser, KimiParser
from jaxllm_server.parsers.python_calls import PythonicParser
from jaxllm_server.parsers.tagged_calls import (
    GlmParser,
    MiniMaxParser,
    Qwen3CoderParser,
    SeedOssParser,
    TaggedCalls,
)
from jaxllm_server.parsers.tool_parsers import ToolParser

SpecialId: TypeAlias = Callable[[str], int | None]
_SPACE = "SPACE: /[ \\t\\r\\n]{1,4}/\n"
_PYTHON = r"""
literal: STRING | NUMBER | "True" | "False" | "None" | "[" items? "]" | "{" members? "}"
items: literal (", " literal)*
members: STRING ": " literal (", " STRING ": " literal)*
STRING: /"([^"\\\x00-\x1f]|\\["\\nt])*"/
NUMBER: /-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?/
"""


class Calls:
    """Builds grammar parts for a request's tools."""

    def __init__(self, tools: Sequence[Mapping[str, Any]], is_single: bool, special_id: SpecialId) -> None:
        functions = [tool["function"] for tool in tools]
        self.tools: Mapping[str, Mapping[str, Any]] = {each["name"]: each for each in functions}
        self._is_single = is_single
        self._special_id = special_id

    def text(self, text: str) -> str:
        token = self._special_id(text)
        return json.dumps(text, ensure_ascii=False) if token is None else f"<[{token}]>"

    def row(self, call: str, separator: str = "SPACE?") -> str:
        return call if self._is_single else f"{call} ({separator} {call})*"

    def any_tool(self, rule: Callable[[str], str]) -> str:
        rules = [f"tool{number}: {rule(name)}\n" for number, name in enumerate(self.tools)]
        return "".join([f"tool: {' | '.join(f'tool{number}' for number in range(len(rules)))}\n", *rules])

    def schema(self, name: str) -> Mapping[str, Any]:
        tool = self.tools[name]
        return parameters_of(tool.get("parameters")) if tool.get("strict") is True else {"type": "object"}

    def arguments(self, name: str) -> str:
        return f"%json {json.dumps(self.schema(name))}"

    def object(self, name: str, key: str = "arguments") -> str:
        schema = {
            "type": "object",
            "properties": {"name": {"const": name}, key: {"$ref": "#/$defs/arguments"}},
            "required": ["name", key],
            "additionalProperties": False,
            "$defs": {"arguments": moved(self.schema(name), "#/$defs/arguments")},
        }
        return f"%json {json.dumps(schema)}"

    def keys(self, name: str) -> Sequence[str]:
        properties = (self.tools[name].get("parameters") or {}).get("properties")
        return tuple(properties) if isinstance(properties, Mapping) else ()


def _hermes(calls: Calls) -> str:
    begin, end = map(calls.text, HermesParser.markers)
    rules = calls.any_tool(calls.object)
    return f"start: {calls.row('call')}\ncall: {begin} SPACE? tool SPACE? {end}\n{rules}"


def _llama(calls: Calls) -> str:
    rules = calls.any_tool(lambda name: calls.object(name, "parameters"))
    row = calls.row("tool", '";" SPACE?')
    return f"start: {calls.text(LlamaParser.markers[0])}? {row}\n{rules}"


def _list(calls: Calls) -> str:
    row = calls.row("tool", 'SPACE? "," SPACE?')
    return f'list: "[" SPACE? {row} SPACE? "]"\n{calls.any_tool(calls.object)}'


def _granite(calls: Calls) -> str:
    return f"start: ({' | '.join(map(calls.text, GraniteParser.markers))}) SPACE? list\n{_list(calls)}"


def _mistral(calls: Calls) -> str:
    begin, arguments, _ = map(calls.text, MistralParser.markers)
    named = [f"{calls.text(name)} {arguments}? {calls.arguments(name)}" for name in calls.tools]
    rules = "".join(f"named{number}: {begin} {each}\n" for number, each in enumerate(named))
    row = calls.row("named", "")
    names = " | ".join(f"named{number}" for number in range(len(named)))
    return f"start: {begin} SPACE? list | {row}\nnamed: {names}\n{rules}{_list(calls)}"


def _deepseek(calls: Calls) -> str:
    marks = [calls.text(each) for each in DeepSeekParser(str).markers]
    section, begin, separator, end, section_end = marks

    def tool(name: str) -> str:
        arguments, typed = calls.arguments(name), json.dumps(f"{name}\n```json\n", ensure_ascii=False)
        plain = f"{json.dumps(name, ensure_ascii=False)} {separator} {arguments}"
        return rf'{plain} | "function" {separator} {typed} {arguments} "\n```"'

    row = calls.row(f"{begin} tool {end}")
    return f"start: {section} {row} {section_end}\n{calls.any_tool(tool)}"


def _kimi(calls: Calls) -> str:
    section, begin, separator, end, section_end = map(calls.text, KimiParser(str).markers)

    def tool(name: str) -> str:
        return f"{json.dumps(f'functions.{name}:', ensure_ascii=False)} NUMBER {separator} {calls.arguments(name)}"

    row = calls.row(f"{begin} tool {end}")
    return f"start: {section} section\nsection: {row} {section_end}\n{calls.any_tool(tool)}NUMBER: /[0-9]{{1,3}}/\n"


def _pythonic(calls: Calls) -> str:
    begin, end = map(calls.text, PythonicParser.markers)

    def tool(name: str) -> str:
        keys = [key for key in calls.keys(name) if key.isidentifier() and key.isascii()]
        key = f"({' | '.join(map(json.dumps, keys))})" if keys else "KEY"
        return f'{json.dumps(name + "(")} ({key} "=" literal (", " {key} "=" literal)*)? ")"'

    row = calls.row("tool", '", "')
    rules = calls.any_tool(tool) + _PYTHON + "KEY: /[a-z_][a-z0-9_]{0,63}/\n"
    return f'start: list | {begin} list {end}?\nlist: "[" {row} "]"\n{rules}'


def _tagged(parser: type[TaggedCalls]) -> Callable[[Calls], str]:
    tags = parser.tags

    def write(calls: Calls) -> str:
        def tag(text: str) -> str:
            return calls.text(text) if text else ""

        def tool(name: str) -> str:
            keys = calls.keys(name)
            key = f"({' | '.join(json.dumps(each, ensure_ascii=False) for each in keys)})" if keys else "KEY"
            value = f"SPACE? {tag(tags.value)}" if tags.value else ""
            member = f"SPACE? {tag(tags.key)} {key} {tag(tags.key_end)} {value} value"
            return f"{json.dumps(name, ensure_ascii=False)} {tag(tags.name_end)} ({member})*"

        end = calls.text(tags.value_end)
        pattern = re.escape(tags.value_end).replace("/", r"\/")
        value = (
            f"value[lazy]: /(?s:.*){pattern}/\n" if end.startswith('"') else f"value: TEXT? {end}\nTEXT: /(?s:.+)/\n"
        )
        row = calls.row(f"{tag(tags.call)} tool SPACE? {tag(tags.call_end)}")
        start = f"{tag(tags.section)} SPACE? {row} SPACE? {tag(tags.section_end)}" if tags.section else row
        return f'start: {start}\n{calls.any_tool(tool)}{value}KEY: /[^<>\\n"= ]{{1,64}}/\n'

    return write


_GRAMMARS: Mapping[type[ToolParser], Callable[[Calls], str]] = MappingProxyType(
    {
        HermesParser: _hermes,
        LlamaParser: _llama,
        GraniteParser: _granite,
        MistralParser: _mistral,
        DeepSeekParser: _deepseek,
        KimiParser: _kimi,
        PythonicParser: _pythonic,
        **{each: _tagged(each) for each in (Qwen3CoderParser, SeedOssParser, MiniMaxParser, GlmParser)},
    }
)


def grammar_of(parser: type[ToolParser], calls: Calls) -> str | None:
    """Return the grammar of an output of calls only; None if `headers_of` applies."""
    write = _GRAMMARS.get(parser)
    return None if write is None else write(calls) + _SPACE


def headers_of(parser: type[ToolParser], calls: Calls, kept_ends: Sequence[str] = ()) -> tuple[tuple[str, str], ...]:
    """Return texts that begin a call within unconstrained output, with the grammars after them.

    `kept_ends` are markers of calls that also end reasoning.
    """
    if issubclass(parser, HarmonyParser):
        return tuple(
            (header.format(name=name), f"start: {calls.arguments(name)}\n")
            for name in calls.tools
            for header in CALL_HEADERS
        )
    whole = grammar_of(parser, calls)
    if parser is not KimiParser or whole is None:
        return ()
    return tuple((end, "start: section\n" + whole.split("\n", 1)[1]) for end in kept_ends)
