"""What the text of a parameter stands for, by the schema of its tool: formats like XML write all values alike.

As in vLLM (tool_parsers/utils.py, qwen3coder_tool_parser.py): a value that is not of its type is a string, as is one of
a parameter that the schema does not know. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxllm_server.parsers.python_literal import as_json

# Not JSON Schema's, but written in tools, as in vLLM's list.
_OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array"}
)
_MOST_REFERENCES = 8  # that are followed from one schema to another


def types_of(tools: Sequence[Mapping[str, Any]], name: str, parameter: str) -> tuple[str, ...]:
    """Return the types that a parameter of the tool `name` may have, in their order; a string if that is not known."""
    functions = (tool["function"] for tool in tools)
    schema = next((function.get("parameters") for function in functions if function["name"] == name), None)
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    own = properties.get(parameter) if isinstance(properties, Mapping) else None
    return tuple(dict.fromkeys(_types(own, schema, _MOST_REFERENCES))) or ("string",)


def _types(schema: Any, root: Any, most: int) -> list[str]:
    if not isinstance(schema, Mapping) or not most:
        return []
    given = schema.get("type")
    if given is not None:
        named = given if isinstance(given, list) else [given]
        return [_OTHER_NAMES.get(each, each) for each in named if isinstance(each, str)]
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _types(_referred(reference, root), root, most - 1)
    for name in ("anyOf", "oneOf", "allOf"):
        kinds = schema.get(name)
        if isinstance(kinds, list):
            return [each for kind in kinds for each in _types(kind, root, most - 1)]
    return []


def _referred(reference: str, root: Any) -> Any:
    """Return the schema at `#/$defs/…` of another."""
    for part in reference.removeprefix("#/").split("/")[:_MOST_REFERENCES]:
        root = root.get(part) if isinstance(root, Mapping) else None
    return root


def is_text(types: Sequence[str]) -> bool:
    """Whether a value is its text in any case, so that it need not be known as a whole."""
    return tuple(types) == ("string",)


def converted(text: str, types: Sequence[str]) -> str:
    """Return the JSON of a value: of the first type that it can have."""
    word = text.strip()
    if word in ("null", "None") and ("null" in types or "string" not in types):
        return "null"
    for kind in types:
        if kind == "string":
            break
        value = _value(word, kind)
        if value is not None:
            return value
    return json.dumps(text, ensure_ascii=False)


def _value(word: str, kind: str) -> str | None:
    if kind == "boolean":
        return word.lower() if word.lower() in ("true", "false") else None
    value = _json(word) or as_json(word)
    if value is None:
        return None
    if kind == "integer":
        digits = value.removeprefix("-")
        return value if digits.isascii() and digits.isdigit() else None
    if kind == "number":
        return value if value[0] in "-0123456789" else None
    if kind in ("object", "array"):
        return value if value[0] == ("{" if kind == "object" else "[") else None
    return value if kind != "null" else None


def _json(word: str) -> str | None:
    """Return text that is JSON as it is."""
    try:
        json.loads(word, parse_constant=_refuse, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return None
    return word


def _refuse(constant: str) -> None:
    raise ValueError(constant)
