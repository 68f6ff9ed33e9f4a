"""`StructuredOutputsParams`: the constraint in `SamplingParams`, with vLLM's names, defaults and messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from jaxllm import checks
from jaxllm.errors import UnsupportedError, UserError

MAX_CHARS = 2**18
MAX_DEPTH = 64
SERVERS = ("begin_after", "may_open_with", "or_grammar", "or_grammar_after")  # not for clients
KINDS = ("json", "regex", "choice", "grammar", "json_object")
_NAME = "structured_outputs"


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """One constraint of an output, and JSON formatting options.

    Raises `UserError` unless exactly one valid constraint is given; `UnsupportedError` for structural_tag.
    """

    json: Any = None  # schema: mapping, text, or pydantic class; stored as text
    regex: str | None = None  # of the whole output
    choice: tuple[str, ...] | None = None  # of whole outputs
    grammar: str | None = None  # Lark notation, or llama.cpp's EBNF; the first rule is the start
    json_object: bool | None = None
    disable_any_whitespace: bool = False  # compact JSON
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None  # expression, between JSON's parts; None: 1 to 8
    structural_tag: str | None = None
    # The constraint begins after this text (or the first of several), e.g. "</think>"; None: at the first token.
    begin_after: str | tuple[str, ...] | None = None
    # Requires `begin_after`: prefixes of an unconstrained part; others are constrained at once.
    may_open_with: tuple[str, ...] = ()
    # Alternatives in Lark notation, e.g. tool calls; the second kind begin after a text.
    or_grammar: str | None = None
    or_grammar_after: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.structural_tag is not None:
            raise UnsupportedError("structural_tag is not supported by jaxllm yet.", _NAME)
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            _checked(checks.flag, name, getattr(self, name))
        if self.json_object is not None and not _checked(checks.flag, "json_object", self.json_object):
            object.__setattr__(self, "json_object", None)
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choice(self.choice))
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) > 1:
            raise UserError(
                "You can only use one kind of structured outputs constraint but multiple are specified: "
                f"{', '.join(given)}.",
                _NAME,
            )
        if not given:
            raise UserError("You must use one kind of structured outputs constraint but none are specified.", _NAME)
        for name in ("json", "regex", "grammar", "whitespace_pattern", "or_grammar"):
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        for text in self.marks:
            _check_text("begin_after", text)
        self._check_pairs()

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the texts of `begin_after`."""
        texts = () if self.begin_after is None else self.begin_after
        return texts if isinstance(texts, tuple) else (texts,)

    def alone(self) -> StructuredOutputsParams:
        """Return the constraint without alternatives, in force from the first token."""
        return replace(self, begin_after=None, may_open_with=(), or_grammar=None, or_grammar_after=())

    def _check_pairs(self) -> None:
        for name, width in (("may_open_with", 0), ("or_grammar_after", 2)):
            value: Any = getattr(self, name)
            parts = (value,) if isinstance(value, tuple) and not width else value
            if not isinstance(value, tuple) or not all(
                isinstance(part, tuple) and len(part) in (width or len(part),) for part in parts
            ):
                raise UserError(f"{name} must be a tuple of texts, got {checks.shown(value)}.", _NAME, value)
            for part in parts:
                for text in part:
                    _check_text(name, text)

    @property
    def kind(self) -> str:
        """One of KINDS."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)


def read_structured_outputs(value: object) -> StructuredOutputsParams | None:
    if isinstance(value, Mapping):
        known = [own.name for own in fields(StructuredOutputsParams)]
        for name in value:
            if name not in known:
                raise UserError(
                    f"structured_outputs has no {checks.shown(name)}; it has {', '.join(known)}.", _NAME, value
                )
        return StructuredOutputsParams(**value)
    if value is not None and not isinstance(value, StructuredOutputsParams):
        message = f"structured_outputs must be a StructuredOutputsParams, got {checks.shown(value)}."
        raise UserError(message, _NAME, value)
    return value


def _checked(check: Callable[..., Any], name: str, *value: Any) -> Any:
    try:
        return check(name, *value)
    except UserError as error:
        raise UserError(str(error), _NAME, error.value) from error


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise UserError(f"{name} must be a text that is not empty, got {checks.shown(value)}.", _NAME, value)
    if len(value) > MAX_CHARS:
        raise UserError(f"{name} may have at most {MAX_CHARS} characters, got {len(value)}.", _NAME)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name} must be valid Unicode, without half of a surrogate pair.", _NAME) from error


def _schema_text(schema: object) -> str:
    make_schema = getattr(schema, "model_json_schema", None) or getattr(schema, "json_schema", None)
    if callable(make_schema):  # pydantic class or TypeAdapter
        schema = make_schema()
    try:
        if isinstance(schema, str):
            _check_text("json", schema)
            schema = json.loads(schema)
        if not isinstance(schema, Mapping | bool):
            raise UserError(f"json must be a JSON schema, got {checks.shown(schema)}.", _NAME)
        check_size(schema)
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"json must be a JSON schema: {error}", _NAME) from error
    except RecursionError as error:
        raise UserError(f"json may be nested at most {MAX_DEPTH} levels deep.", _NAME) from error


def check_size(schema: object) -> None:
    """Refuse a schema that is too deep or too long, without serializing it."""
    level, left = [schema], MAX_CHARS
    for _ in range(MAX_DEPTH + 1):
        parents = [value for value in level if isinstance(value, Mapping | list | tuple)]
        if not parents:
            return
        if left < (count := sum(map(len, parents))):
            raise UserError(f"json may have at most {MAX_CHARS} characters.", _NAME)
        names = [str(name) for parent in parents if isinstance(parent, Mapping) for name in parent]
        level = [child for parent in parents for child in (parent.values() if isinstance(parent, Mapping) else parent)]
        left -= count + sum(map(len, names)) + sum(len(value) for value in level if isinstance(value, str))
        if left < 0:
            raise UserError(f"json may have at most {MAX_CHARS} characters.", _NAME)
    raise UserError(f"json may be nested at most {MAX_DEPTH} levels deep.", _NAME)


def _choice(value: object) -> tuple[str, ...]:
    texts = _checked(checks.sequence, "choice", value, "strings", MAX_CHARS)
    if not texts or any(not isinstance(text, str) or not text for text in texts):
        raise UserError("choice must hold texts that are not empty.", _NAME, value)
    joined = "".join(map(str, texts))
    if joined:
        _check_text("choice", joined)
    return tuple(dict.fromkeys(map(str, texts)))
