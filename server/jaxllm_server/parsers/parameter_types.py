"""Converts a parameter's text to JSON by its tool's schema. Pure.

Text of another type becomes a string, as in vLLM (tool_parsers/utils.py, qwen3coder_tool_parser.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxllm_server.parsers.python_literal import as_json

# Type names that JSON Schema lacks, as in vLLM.
_OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array"}
)
_NAMES: Mapping[type, str] = MappingProxyType(
    {
        **{str: "string", bool: "boolean", int: "integer", float: "number"},
        **{type(None): "null", list: "array", dict: "object"},
    }
)
_COMBINED = ("anyOf", "oneOf", "allOf")
_MOST_SCHEMAS = 16  # per parameter; schemas may refer to each other
_MOST_STEPS = 8


def schema_of(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            schema = function.get("parameters")
            return schema if isinstance(schema, Mapping) else {}
    return {}


def types_of(schema: Mapping[str, Any], parameter: str) -> tuple[str, ...]:
    """Return declared types, or those of listed values; by default string."""
    types: list[str] = []
    for alternative in _schemas_of(schema, parameter):
        given = alternative.get("type")
        if given is not None:
            named = given[:_MOST_SCHEMAS] if isinstance(given, list) else [given]
            types += [_OTHER_NAMES.get(each, each) for each in named if isinstance(each, str)]
        else:
            types += [_NAMES[type(value)] for value in _listed(alternative)]
    return tuple(dict.fromkeys(types)) or ("string",)


def choices_of(schema: Mapping[str, Any], parameter: str) -> list[Any]:
    return [value for own in _schemas_of(schema, parameter) for value in _listed(own)]


def _listed(schema: Mapping[str, Any]) -> list[Any]:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else []


def _schemas_of(schema: Mapping[str, Any], parameter: str) -> Iterator[Mapping[str, Any]]:
    properties = schema.get("properties")
    waiting = [properties.get(parameter)] if isinstance(properties, Mapping) else []
    for _ in range(_MOST_SCHEMAS):
        if not waiting:
            break
        current = waiting.pop(0)
        if not isinstance(current, Mapping):
            continue
        reference = current.get("$ref")
        if current.get("type") is not None or _listed(current):
            yield current
        elif isinstance(reference, str):
            waiting.insert(0, _referred(reference, schema))
        else:
            kinds = next((current[name] for name in _COMBINED if isinstance(current.get(name), list)), [])
            waiting = [*kinds[:_MOST_SCHEMAS], *waiting[:_MOST_SCHEMAS]]


def _referred(reference: str, root: Any) -> Any:
    for part in reference.removeprefix("#/").split("/", _MOST_STEPS):
        root = root.get(part) if isinstance(root, Mapping) else None
    return root


def is_text(types: Sequence[str]) -> bool:
    return tuple(types) == ("string",)


def converted(text: str, types: Sequence[str], choices: Sequence[Any] = ()) -> str:
    """Return the matching value of `choices`, or the text as the first fitting type."""
    word = text.strip()
    for value in choices:
        if text == value or (not isinstance(value, str) and _is_written(word, value)):
            return json.dumps(value, ensure_ascii=False)
    if word in ("null", "None") and ("null" in types or "string" not in types):
        return "null"
    value = None if is_text(types) else _json(word) or as_json(word)
    for kind in types:
        if kind == "string":
            break
        if kind == "boolean" and word.lower() in ("true", "false"):
            return word.lower()
        if value is not None and _is_of(value, kind):
            return value
    return json.dumps(text, ensure_ascii=False)


def _is_written(word: str, value: Any) -> bool:
    written = _json(word) or as_json(word)
    return written is not None and json.dumps(json.loads(written)) == json.dumps(value)


def _is_of(value: str, kind: str) -> bool:
    if kind == "integer":
        digits = value.removeprefix("-")
        return digits.isascii() and digits.isdigit()
    first = {"number": "-0123456789", "object": "{", "array": "[", "boolean": "", "null": ""}.get(kind)
    return first is None or value[0] in first


def _json(word: str) -> str | None:
    try:
        json.loads(word, parse_constant=_refuse, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return None
    return word


def _refuse(constant: str) -> None:
    raise ValueError(constant)
