"""Builds the JSON schema of an answer that must call tools. Pure.

As in vLLM (tool_parsers/utils.py), except that a tool without parameters takes only `{}`, and references are local to
each tool.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jaxllm.errors import UserError
from jaxllm.structured_outputs_params import check_size
from jaxllm_server.generation.calls import Call, NamedTool, is_forced

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_COMBINED = ("type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")  # map names to schemas
_VALUES = ("enum", "const", "default", "examples")  # contain values, not schemas


def with_forced_calls(call: Call, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling parameters that constrain the answer to calls; raise UserError for bad tools."""
    if sampling.get("structured_outputs") is not None:
        message = "structured_outputs and a tool_choice that forces a call exclude each other: give one of them."
        raise UserError(message, "tool_choice")
    tools = {tool["function"]["name"]: tool["function"].get("parameters") for tool in reversed(call.tools or ())}
    with blaming_tools(call):
        check_size([*tools.values()])
    if isinstance(call.tool_choice, NamedTool):
        if call.tool_choice.name not in tools:
            shown = call.tool_choice.name[:64]
            raise UserError(f"tool_choice names {shown!r}, which is not in tools.", "tool_choice")
        schema = parameters_of(tools[call.tool_choice.name])
    elif not tools:
        raise UserError("tool_choice=required needs tools.", "tool_choice")
    else:
        schema = list_of_calls([(name, tools[name]) for name in reversed(tools)], call.takes_one_call)
    return {**sampling, "structured_outputs": {"json": schema}}


@contextmanager
def blaming_tools(call: Call) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        if is_forced(call.tool_choice) and error.parameter == "structured_outputs":
            raise type(error)(str(error), "tools") from error
        raise


def parameters_of(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if not parameters:
        return _NO_ARGUMENTS
    return parameters if any(name in parameters for name in _COMBINED) else {"type": "object", **parameters}


def list_of_calls(tools: Sequence[tuple[str, Mapping[str, Any] | None]], is_single: bool) -> dict[str, Any]:
    kinds, definitions = [], {}
    for number, (name, parameters) in enumerate(tools):
        key = f"{number}"
        definitions[key] = moved(parameters_of(parameters), f"#/$defs/{key}")
        kinds.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{key}"}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    items = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
    most = {"maxItems": 1} if is_single else {}
    return {"type": "array", "minItems": 1, **most, "items": items, "$defs": definitions}


def moved(schema: Any, to: str) -> Any:
    """Prefix internal references by `to`."""
    if isinstance(schema, list):
        return [moved(item, to) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    copied = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            value = to + value[1:]
        elif key in _BY_NAME and isinstance(value, Mapping):
            value = {name: moved(item, to) for name, item in value.items()}
        elif key not in _VALUES:
            value = moved(value, to)
        copied[key] = value
    return copied
