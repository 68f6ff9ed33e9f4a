"""Flags that constrain an output."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.commands.arguments import UsageError
from jaxllm.errors import UserError
from jaxllm.structured_outputs_params import StructuredOutputsParams

_FLAGS = {
    "json_schema": "--json-schema",
    "json_object": "--json-object",
    "regex": "--regex",
    "choice": "--choice",
    "grammar": "--grammar",
}


def add_constraint_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json-schema", metavar="FILE", help="the output is JSON that matches the schema in this file")
    group.add_argument("--json-object", action="store_true", help="the output is a JSON object")
    group.add_argument("--regex", metavar="TEXT", help="the output matches this regular expression")
    group.add_argument(
        "--choice", action="append", metavar="TEXT", help="the output is one of these texts; may be repeated"
    )
    group.add_argument("--grammar", metavar="FILE", help="the output follows the grammar in this file, Lark's or EBNF")


def constraint_of(options: Mapping[str, Any]) -> dict[str, StructuredOutputsParams]:
    """Return the constraint as an argument of `SamplingParams`, or {}; raises `UsageError` or `UserError`."""
    flags = [flag for name, flag in _FLAGS.items() if options[name] not in (None, False)]
    if len(flags) > 1:
        raise UsageError(f"{' and '.join(flags)} exclude each other: give one of them")
    if options["json_schema"] is not None:
        return {"structured_outputs": schema_of(options["json_schema"])}
    given = {name: options[name] for name in ("json_object", "regex", "choice") if options[name] not in (None, False)}
    if options["grammar"] is not None:
        given["grammar"] = _text_of(options["grammar"])
    if not given:
        return {}
    try:
        return {"structured_outputs": StructuredOutputsParams(**given)}
    except UserError as error:
        raise UsageError(f"{flags[0]}: {error}") from error


def schema_of(file: str) -> StructuredOutputsParams:
    text = _text_of(file)
    try:
        schema = json.loads(text)
        if not isinstance(schema, dict):
            raise UserError("a JSON schema is an object.")
        return StructuredOutputsParams(json=schema)
    except (ValueError, RecursionError) as error:  # UserError is a ValueError
        raise UserError(f"{file} holds no JSON schema: {error}") from error


def _text_of(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 text: {error.reason}.") from error
