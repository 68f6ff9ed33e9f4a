"""Declarations of `SamplingParams` fields: type, range, flag, and name in each protocol. Standard library only."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, NamedTuple

from jaxllm import checks
from jaxllm.checks import INT32_MAX
from jaxllm.errors import UserError

OPENAI, ANTHROPIC, OLLAMA = "openai", "anthropic", "ollama"  # HTTP bodies
GRPC = "grpc"  # paths in GenerateRequest, as "sampling.top_p"
MODEL = "model"  # generation_config.json, which may set defaults
MAX_IDS = 2**20  # per list: several vocabularies, 0.1 s to read

Reader = Callable[[str, Any], Any]  # (name, value) -> normalized value, or UserError


class Rule(NamedTuple):
    """A range check of a value, given all values."""

    holds: Callable[[Any, Mapping[str, Any]], bool]
    text: str  # of the error; {max_tokens} etc. are substituted


class Declaration(NamedTuple):
    """A field's metadata, except help."""

    read: Reader
    rules: tuple[Rule, ...]
    names: Mapping[str, str]  # by protocol, where supported
    shapes_distribution: bool
    given: str | None  # accepted type, if wider


def declared(
    default: Any,
    text: str | None = None,
    metavar: str | None = None,
    *,
    read: Reader,
    rules: tuple[Rule, ...] = (),
    shapes_distribution: bool = False,
    given: str | None = None,
    openai: str | None = "",
    **options: Any,
) -> Any:
    """Return a field of `SamplingParams`.

    Args:
        default: If None, requests may give None, which bypasses `read`.
        text: Help of its flag and description in OpenAPI; None: no flag.
        metavar: Value's name in `--help`; None: by type.
        read: Validates the type.
        rules: Ranges, checked after all types.
        shapes_distribution: Whether a number affects token choice.
        given: Accepted type, if wider than the annotation.
        openai: Name in OpenAI bodies; "": the field's, None: not read generically.
        options: Names in other protocols ("": the field's; a gRPC section such as "stop." is prefixed), and
            options of `dataclasses.field`.
    """
    names = {protocol: options.pop(protocol) for protocol in (ANTHROPIC, OLLAMA, GRPC, MODEL) if protocol in options}
    if openai is not None:
        names[OPENAI] = openai
    declaration = Declaration(read, rules, names, shapes_distribution, given)
    metadata = {"help": text, "metavar": metavar, "takes_several": False, "declaration": declaration}
    return field(default=default, metadata=metadata, **options)


def declared_number(default: float, text: str, *, read: Reader = checks.number, **options: Any) -> Any:
    own: dict[str, Any] = {OLLAMA: "", GRPC: "sampling.", MODEL: ""}
    return declared(default, text, read=read, shapes_distribution=True, **own | options)


def declaration_of(own: Any) -> Declaration:
    return own.metadata["declaration"]


@functools.cache
def names_in(cls: type, protocol: str) -> Mapping[str, str]:
    """Map a protocol's names to field names, including unsupported fields."""
    found = {}
    for own in cls.__dataclass_fields__.values():
        name = declaration_of(own).names.get(protocol) if own.metadata else None
        if name is not None:
            found[name + own.name if not name or name.endswith(".") else name] = own.name
    return found


def at_least(low: float, text: str | None = None) -> Rule:
    return Rule(lambda value, _: value is None or value >= low, text or f"must be at least {low}")


def at_most(high: float) -> Rule:
    return Rule(lambda value, _: value <= high, f"must be at most {high}")


def within(low: float, high: float) -> Rule:
    return Rule(lambda value, _: low <= value <= high, f"must be in [{low}, {high}]")


def texts(name: str, value: object, most: int | None = None) -> tuple[str, ...]:
    found = () if value is None else checks.sequence(name, value, "strings", most)
    if any(not isinstance(text, str) for text in found):
        raise UserError(f"{name} must contain only strings, got {checks.shown(list(found))}.", name, value)
    try:
        "".join(map(str, found)).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name} must be valid Unicode, without half of a surrogate pair.", name, value) from error
    return found  # pyright: ignore[reportReturnType] - looked at above


def text_or_texts(name: str, value: object) -> tuple[str, ...]:
    return texts(name, (value,) if isinstance(value, str) else value)


def ids(name: str, value: object, most: int = MAX_IDS) -> tuple[int, ...]:
    """Return unique token ids, in order; None becomes empty."""
    found = () if value is None else checks.sequence(name, value, "integers", most)
    kinds = set(map(type, found))  # an abstract class per id takes 2 µs
    if any(kind is bool or not issubclass(kind, numbers.Integral) for kind in kinds):
        raise UserError(f"{name} must contain only integers, got {checks.shown(list(found))}.", name, value)
    unique: dict[int, None] = dict.fromkeys(found if kinds <= {int} else map(int, found))  # pyright: ignore
    if unique and not -INT32_MAX - 1 <= min(unique) <= max(unique) <= INT32_MAX:
        for token in unique:
            checks.integer(name, token)
    return tuple(unique)


def count(name: str, value: object) -> int:
    """Check an integer; True counts as 1."""
    return 1 if value is True else checks.integer(name, value)


def seed(name: str, value: object) -> int | None:
    """Check a seed of 64 bits; -1 counts as None."""
    found = checks.integer(name, value, -(2**63), 2**63 - 1)
    return None if found == -1 else found
