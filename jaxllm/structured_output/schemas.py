"""Check JSON schemas and close their objects, in bounded time and stack."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from jaxllm import checks
from jaxllm.errors import UserError
from jaxllm.structured_output.exactness import BY_NAME, DATA

MAX_PROPERTIES = 2000  # quadratic time; 0.9 s
MAX_INTERSECTED = 16  # patterns; 0.14 s, twice that for each more
MAX_LEAST = 2**13  # items or characters; as MAX_TEXT
MAX_PATTERN_PROPERTIES = 64  # compared pairwise: 0.1 s for 100, 19 s for 400
MAX_DIVISOR = 10_000  # least common multiple of all `multipleOf`: states, 0.04 s
MAX_TEXT = 2**13  # each step tokenizes forced text again
MAX_LEVELS = 2**12  # 2 kB of stack each if all references nest

_UNWRITABLE = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")  # need \\u escapes, disabled in grammars.py
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_OBJECT = ("properties", "patternProperties")
_CLOSING = ("additionalProperties", "unevaluatedProperties")


def prepare(schema: Any, close_objects: bool) -> Any:
    """Return a schema ready to compile; `close_objects` forbids unnamed properties.

    Includes values of unknown keywords, which references may use. Raises UserError for references to other documents
    and llguidance's options.
    """
    if isinstance(schema, list):
        return [prepare(each, close_objects) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "x-guidance" in schema:
        raise UserError("json has x-guidance, which a schema may not set; remove it.", "structured_outputs")
    for name in _REFERENCES:
        if name in schema and not str(schema[name]).startswith("#"):
            message = (
                f"json has {name} to {checks.shown(schema[name])}; only references within it (#...) are supported."
            )
            raise UserError(message, "structured_outputs")
    required = schema.get("required")
    if _is_more(schema.get("minProperties"), 1 + (len(set(map(str, required))) if isinstance(required, list) else 0)):
        # llguidance allows duplicates of unnamed properties.
        message = "json has a minProperties of more than one property besides the required ones; name them in required."
        raise UserError(message, "structured_outputs")
    properties = schema.get("properties")
    named = list(properties) if isinstance(properties, dict) else []
    for text in _texts([schema.get("const"), schema.get("enum"), named]):
        if _UNWRITABLE.search(text):
            message = (
                f"json has {checks.shown(text)}, with a control character, which no output can contain; remove it."
            )
            raise UserError(message, "structured_outputs")
    prepared = {name: _value(name, value, close_objects) for name, value in schema.items()}
    # As vLLM: an object without named properties stays open.
    if close_objects and any(name in schema for name in _OBJECT) and not any(name in schema for name in _CLOSING):
        prepared["additionalProperties"] = False
    return prepared


def _value(name: str, value: Any, close_objects: bool) -> Any:
    if name in DATA:
        return value
    if name in BY_NAME and isinstance(value, dict):
        return {key: prepare(each, close_objects) for key, each in value.items()}
    return prepare(value, close_objects)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def check_size(schema: Any) -> None:
    objects = list(_objects(schema))
    targets = {str(node[name]) for node in objects for name in _REFERENCES if name in node}
    levels = (1 + len(targets)) * _depth(schema)
    if levels > MAX_LEVELS:
        raise _too_much(
            f"{len(targets)} different $ref in a schema of {_depth(schema)} levels", MAX_LEVELS, " for their product"
        )
    num_properties = sum(len(node["properties"]) for node in objects if isinstance(node.get("properties"), dict))
    if num_properties > MAX_PROPERTIES:
        raise _too_much(f"{num_properties} properties", MAX_PROPERTIES, " in all")
    num_patterns = len({str(node["pattern"]) for node in objects if "pattern" in node})
    num_conjuncts = sum(_num_conjuncts(node) for node in objects)
    if min(num_patterns, num_conjuncts) > MAX_INTERSECTED:
        raise _too_much(
            f"{num_patterns} patterns and {num_conjuncts} parts of allOf", MAX_INTERSECTED, " of one of them"
        )
    divisor = 1
    for node in objects:
        if isinstance(node.get("patternProperties"), dict) and len(node["patternProperties"]) > MAX_PATTERN_PROPERTIES:
            raise _too_much(
                f"{len(node['patternProperties'])} patternProperties", MAX_PATTERN_PROPERTIES, " in one object"
            )
        for name in ("minLength", "minItems"):
            if _is_more(node.get(name), MAX_LEAST):
                raise _too_much(f"{name} {node[name]}", MAX_LEAST)
        divisor = math.lcm(divisor, _digits(node.get("multipleOf")))
        if divisor > MAX_DIVISOR:
            raise _too_much(
                f"multipleOf whose least common multiple is {divisor}", MAX_DIVISOR, ", without final zeros"
            )


def _num_conjuncts(schema: dict[str, Any]) -> int:
    """Count the schemas to intersect: of allOf, and a pattern next to a reference or alternatives."""
    parts = schema.get("allOf")
    beside = "pattern" in schema and any(name in schema for name in (*_REFERENCES, "anyOf", "oneOf"))
    return beside + (len(parts) if isinstance(parts, list) else 0)


def _too_much(what: str, most: int, where: str = "") -> UserError:
    return UserError(f"json has {what}; the limit is {most}{where}.", "structured_outputs")


def _is_more(value: Any, most: int) -> bool:
    return isinstance(value, int | float) and value > most


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            yield each
            waiting += [*each, *each.values()]
        elif isinstance(each, list):
            waiting += each
        elif isinstance(each, str) and len(each) > MAX_TEXT:
            raise _too_much(f"a text of {len(each)} characters", MAX_TEXT)


def _depth(value: Any) -> int:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, children), default=0)


def _digits(multiple: Any) -> int:
    """Return significant digits as an integer: 25 for 2.5 and 25,000."""
    if isinstance(multiple, bool) or not isinstance(multiple, int | float) or not math.isfinite(_as_float(multiple)):
        return 1
    digits = "".join(map(str, Decimal(json.dumps(multiple)).as_tuple().digits)).rstrip("0")
    return int(digits or "1")


def _as_float(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return 0.0
