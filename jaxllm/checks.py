"""Validators: return the normalized value, or raise a `UserError` that names the parameter."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator

from jaxllm.errors import UserError

INT32_MAX = 2**31 - 1
_MOST_SHOWN = 100  # characters


def shown(value: object) -> str:
    """Return a value's repr for a message: one line of at most 100 characters."""
    text = ""
    try:
        for piece in _pieces(value):
            text += piece
            if len(text) > 2 * _MOST_SHOWN:
                break
    except ValueError:  # an integer of more than 4,300 digits
        return f"{type(value).__name__} too long to print"
    text = " ".join(text.split())
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def _pieces(value: object) -> Iterator[str]:
    """Yield pieces of a repr, so that a reader can stop."""
    if isinstance(value, str | bytes):
        yield repr(value[: 2 * _MOST_SHOWN])
    elif type(value) is list or type(value) is dict:
        yield "[" if type(value) is list else "{"
        for number, item in enumerate(value):
            yield ", " if number else ""
            yield from _pieces(item)
            if type(value) is dict:
                yield ": "
                yield from _pieces(value[item])
        yield "]" if type(value) is list else "}"
    else:
        yield repr(value)


def integer(name: str, value: object, low: int = -INT32_MAX - 1, high: int = INT32_MAX) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):  # numpy's too
        raise UserError(f"{name} must be an integer, got {shown(value)}.", name, value)
    result = int(value)
    if not low <= result <= high:
        raise UserError(f"{name} must be an integer from {low} to {high}, got {shown(result)}.", name, value)
    return result


def number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise UserError(f"{name} must be a number, got {shown(value)}.", name, value)
    try:
        result = float(value)
    except OverflowError:  # beyond the largest float
        result = math.inf
    if not math.isfinite(result):
        raise UserError(f"{name} must be a finite number, got {result}.", name, value)
    return result


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"{name} must be True or False, got {shown(value)}.", name, value)
    return value


def sequence(name: str, value: object, of: str, most: int | None) -> tuple[object, ...]:
    """Return a list as a tuple; `of` names its items in errors."""
    if not isinstance(value, list | tuple):
        raise UserError(f"{name} must be a list of {of}, got {shown(value)}.", name, value)
    if most is not None and len(value) > most:
        raise UserError(f"{name} must hold at most {most} {of}, got {len(value)}.", name, len(value))
    return tuple(value)
