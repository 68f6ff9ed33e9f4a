"""JSON schemas before they are compiled: what is refused whatever llguidance says of it, and objects closed.

Pure: values in, values out.
"""

from __future__ import annotations

from typing import Any

from jaxllm import checks
from jaxllm.errors import UserError

_DATA = frozenset({"enum", "const", "default", "examples", "required", "dependentRequired", "type"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_OBJECT = ("properties", "patternProperties")
_CLOSING = ("additionalProperties", "unevaluatedProperties")


def prepare(schema: Any, close_objects: bool) -> Any:
    """Return a schema as it may be compiled; `close_objects`: without properties that it does not name.

    A value under an unknown name may be a schema that something refers to, as OpenAPI's "components" are.

    Raises:
        UserError: for a reference to another document and for llguidance's own options.
    """
    if isinstance(schema, list):
        return [prepare(each, close_objects) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "x-guidance" in schema:
        raise UserError("json has x-guidance, which is not for a schema to say.", "structured_outputs")
    for name in _REFERENCES:
        if name in schema and not str(schema[name]).startswith("#"):
            message = f"json has a {name} to {checks.shown(schema[name])}; only this document's own (#...) are read."
            raise UserError(message, "structured_outputs")
    prepared = {name: _value(name, value, close_objects) for name, value in schema.items()}
    # As vLLM does it: an object without any named properties stays open.
    if close_objects and any(name in schema for name in _OBJECT) and not any(name in schema for name in _CLOSING):
        prepared["additionalProperties"] = False
    return prepared


def _value(name: str, value: Any, close_objects: bool) -> Any:
    if name in _DATA:
        return value
    if name in _BY_NAME and isinstance(value, dict):
        return {key: prepare(each, close_objects) for key, each in value.items()}
    return prepare(value, close_objects)
