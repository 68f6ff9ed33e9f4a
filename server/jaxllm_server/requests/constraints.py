"""Reads constraints, checking shapes only. Pure."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

from jaxllm.errors import UnsupportedError, UserError
from jaxllm.structured_outputs_params import SERVERS

# vLLM's former field -> StructuredOutputsParams.
GUIDED: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_whitespace_pattern": "whitespace_pattern",
}
FIELDS = frozenset({"response_format", "structured_outputs", *GUIDED})
_SCHEMA_KEYS = ("name", "schema", "json_schema", "strict", "description")
_NAME = "response_format"
_SHOWN = 64


def constraint_of(fields: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the constraining field's name and its value as `structured_outputs`, if any.

    `strict` has no effect: a schema is always enforced, as in vLLM.
    """
    found: dict[str, Any] = {}
    wanted = _response_format(fields.get("response_format"))
    if wanted is not None:
        found["response_format"] = wanted
    structured = fields.get("structured_outputs")
    if structured is not None:
        for name in SERVERS if isinstance(structured, Mapping) else ():
            if structured.get(name) is not None:
                message = f"structured_outputs.{name} can only be set by the server; remove it."
                raise UserError(message, "structured_outputs")
        found["structured_outputs"] = structured
    guided = {name: fields[old] for old, name in GUIDED.items() if fields.get(old) is not None}
    if guided:
        first = next(old for old in GUIDED if fields.get(old) is not None)
        warnings.warn(f"a client sent {first}, vLLM's former name of structured_outputs; it is accepted.", stacklevel=2)
        found[first] = guided
    if len(found) > 1:
        *others, last = found
        raise UserError(f"{', '.join(others)} and {last} exclude each other: give one of them.", last)
    return next(iter(found.items()), None)


def _response_format(wanted: Any) -> dict[str, Any] | None:
    if wanted is None:
        return None
    if not isinstance(wanted, dict) or not isinstance(wanted.get("type"), str):
        _refuse('response_format must be an object with a type, as {"type": "text"}.')
    kind = wanted["type"]
    if kind == "structural_tag":
        raise UnsupportedError("response_format of type structural_tag is not supported by jaxllm yet.", _NAME)
    if kind not in ("text", "json_object", "json_schema"):
        _refuse(f"response_format.type must be text, json_object or json_schema, got {kind[:_SHOWN]!r}.")
    for name, value in wanted.items():
        if value is not None and name not in (("type", "json_schema") if kind == "json_schema" else ("type",)):
            _refuse(f"response_format of type {kind} has no {name[:_SHOWN]!r}; a schema is of type json_schema.")
    if kind == "json_schema":
        return {"json": _schema(wanted.get("json_schema"))}
    return {"json_object": True} if kind == "json_object" else None


def _schema(given: Any) -> Any:
    if not isinstance(given, dict):
        _refuse('response_format.json_schema must be an object, as {"name": "person", "schema": {…}}.')
    for name in given:
        if name not in _SCHEMA_KEYS:
            _refuse(f"response_format.json_schema has no {name[:_SHOWN]!r}; it has name, schema, strict, description.")
    if not isinstance(given.get("name"), str) or not given["name"]:
        _refuse("response_format.json_schema needs a name, a text.")
    if not isinstance(given.get("strict"), bool | None) or not isinstance(given.get("description"), str | None):
        _refuse("response_format.json_schema: strict must be true or false, description a text.")
    schemas = [given[name] for name in ("schema", "json_schema") if given.get(name) is not None]
    if len(schemas) != 1 or not isinstance(schemas[0], dict):
        _refuse("response_format.json_schema needs one schema, an object.")
    return schemas[0]


def _refuse(message: str) -> NoReturn:
    raise UserError(message, _NAME)
