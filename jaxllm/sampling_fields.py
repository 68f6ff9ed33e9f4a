"""The declaration of one field of `SamplingParams`: its type, range, flag, and its name in each protocol.

Everything that has a list of sampling fields (the command line, HTTP, gRPC, the clients, load tests) makes it from
these declarations. Standard library only.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, NamedTuple

from jaxllm import checks
from jaxllm.checks import INT32_MAX
from jaxllm.errors import UserError

OPENAI, ANTHROPIC, OLLAMA = "openai", "anthropic", "ollama"  # bodies of HTTP
GRPC = "grpc"  # names are paths in GenerateRequest, as "sampling.top_p"
MODEL = "model"  # a model's generation_config.json, which may set the field's default
MAX_IDS = 2**20  # of a list of token ids, repetitions counted: several times the largest vocabularies, 0.1 s to read

Reader = Callable[[str, Any], Any]  # of a name and a value: the value in its one type, or a UserError


class Rule(NamedTuple):
    """A range: `holds` is a function of the value and of all values."""

    holds: Callable[[Any, Mapping[str, Any]], bool]
    text: str  # of an error; {max_tokens} and other fields are put in


class Declaration(NamedTuple):
    """The metadata of a field besides its help."""

    read: Reader
    rules: tuple[Rule, ...]
    names: Mapping[str, str]  # by protocol; a protocol without a name does not have the field
    shapes_distribution: bool  # a number that changes how tokens are chosen
    given: str | None  # the type that callers may give, where it is wider than the field's own


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
    """Make a field of `SamplingParams`.

    Args:
        default: Of the field. If it is None, a request may give None, which `read` does not see.
        text: The help of its flag and its description in OpenAPI; None: the command line has no flag for it.
        metavar: The name of its value in `--help`; None: by its type.
        read: Checks the type.
        rules: Ranges, checked after the types of all fields.
        shapes_distribution: Whether it is a number that changes how tokens are chosen: `bench serve` has these flags.
        given: The type that callers may give, where it is wider than the annotation.
        openai: Its name in OpenAI's bodies; "": the field's name, None: it is not read from them like the others.
        options: Its names in other protocols ("": the field's name; for gRPC a section, as "stop.", means the
            field's name in it), and options of `dataclasses.field`.
    """
    names = {protocol: options.pop(protocol) for protocol in (ANTHROPIC, OLLAMA, GRPC, MODEL) if protocol in options}
    if openai is not None:
        names[OPENAI] = openai
    declaration = Declaration(read, rules, names, shapes_distribution, given)
    metadata = {"help": text, "metavar": metavar, "takes_several": False, "declaration": declaration}
    return field(default=default, metadata=metadata, **options)


def declared_number(default: float, text: str, *, read: Reader = checks.number, **options: Any) -> Any:
    """Make a field that is a number and changes how tokens are chosen; options as of `declared`."""
    own: dict[str, Any] = {OLLAMA: "", GRPC: "sampling.", MODEL: ""}
    return declared(default, text, read=read, shapes_distribution=True, **own | options)


def declaration_of(own: Any) -> Declaration:
    """Return the declaration of a dataclass field that `declared` made."""
    return own.metadata["declaration"]


@functools.cache
def names_in(cls: type, protocol: str) -> Mapping[str, str]:
    """Return the fields that a protocol has, those that are not built included: its names, each with our name."""
    found = {}
    for own in cls.__dataclass_fields__.values():
        name = declaration_of(own).names.get(protocol) if own.metadata else None
        if name is not None:
            found[name + own.name if not name or name.endswith(".") else name] = own.name
    return found


def at_least(low: float, text: str | None = None) -> Rule:
    """Require `low` or more; None passes."""
    return Rule(lambda value, _: value is None or value >= low, text or f"must be at least {low}")


def at_most(high: float) -> Rule:
    """Require `high` or less."""
    return Rule(lambda value, _: value <= high, f"must be at most {high}")


def within(low: float, high: float) -> Rule:
    """Require a number between two bounds, both included."""
    return Rule(lambda value, _: low <= value <= high, f"must be in [{low}, {high}]")


def texts(name: str, value: object, most: int | None = None) -> tuple[str, ...]:
    """Return a list of texts; None is an empty one."""
    found = () if value is None else checks.sequence(name, value, "strings", most)
    if any(not isinstance(text, str) for text in found):
        raise UserError(f"{name} must contain only strings, got {checks.shown(list(found))}.", name, value)
    try:
        "".join(map(str, found)).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name} must be text; half of a surrogate pair is none.", name, value) from error
    return found  # pyright: ignore[reportReturnType] - looked at above


def text_or_texts(name: str, value: object) -> tuple[str, ...]:
    """Return a list of texts; a text is a list of one."""
    return texts(name, (value,) if isinstance(value, str) else value)


def ids(name: str, value: object, most: int = MAX_IDS) -> tuple[int, ...]:
    """Return a list of token ids, each once, in the order given; None is an empty one."""
    found = () if value is None else checks.sequence(name, value, "integers", most)
    kinds = set(map(type, found))  # a check of each id against an abstract class takes 2 µs
    if any(kind is bool or not issubclass(kind, numbers.Integral) for kind in kinds):
        raise UserError(f"{name} must contain only integers, got {checks.shown(list(found))}.", name, value)
    unique: dict[int, None] = dict.fromkeys(found if kinds <= {int} else map(int, found))  # pyright: ignore
    if unique and not -INT32_MAX - 1 <= min(unique) <= max(unique) <= INT32_MAX:
        for token in unique:
            checks.integer(name, token)
    return tuple(unique)


def count(name: str, value: object) -> int:
    """Return a number of log-probabilities; True is 1."""
    return 1 if value is True else checks.integer(name, value)


def seed(name: str, value: object) -> int | None:
    """Return a seed of 64 bits; None for -1."""
    found = checks.integer(name, value, -(2**63), 2**63 - 1)
    return None if found == -1 else found
