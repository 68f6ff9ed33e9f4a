"""Typed reads of a JSON body's fields. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.checks import INT32_MAX
from jaxllm.errors import UserError
from jaxllm.value_types import types_of

Body = Mapping[str, Any]
SHOWN_NAME = 64  # characters


def flag(fields: Body, name: str, default: bool | None) -> bool | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{name} must be true or false.", name)
    return default if value is None else value


def text(fields: Body, name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{name} must be a string.", name)
    return value


def one_of(fields: Body, name: str, choices: Sequence[str]) -> str | None:
    value = text(fields, name)
    if value is not None and value not in choices:
        raise UserError(f"{name} must be one of {', '.join(choices)}, got {value[:SHOWN_NAME]!r}.", name)
    return value


def integer(fields: Body, name: str, default: int) -> int:
    """Return a field's value, or the default; raise UserError unless it is a 32-bit integer."""
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not -INT32_MAX - 1 <= value <= INT32_MAX:
        raise UserError(f"{name} must be an integer of 32 bits.", name)
    return value


def mapping(fields: Body, name: str) -> dict[str, Any] | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{name} must be an object.", name)
    return value


def prompts_of(fields: Body, name: str, most: int) -> list[str | list[int]]:
    """Return a field's prompts: a text, a list of texts, of token ids, or of such lists."""
    value = fields.get(name)
    if value is None:
        raise UserError(f"{name} is missing: give a string, a list of strings, or token ids.", name)
    if isinstance(value, str):
        return [value]
    kinds = types_of(value) if isinstance(value, list) else set()
    if kinds == {int}:
        return [value]
    if kinds not in ({str}, {list}):
        message = f"{name} must be a string, a list of strings, a list of token ids or a list of those."
        raise UserError(message, name)
    if len(value) > most:
        raise UserError(f"{name} may hold at most {most} prompts, got {len(value)}.", name)
    if kinds == {list} and any(types_of(ids) - {int} for ids in value):
        raise UserError(f"{name} must hold token ids only, or strings only.", name)
    return value


def is_same(value: Any, accepted: Any) -> bool:
    """Return whether two values are equal; True differs from 1."""
    return value == accepted and isinstance(value, bool) == isinstance(accepted, bool)
