"""Flags, checks and errors of several commands."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeAlias

from jaxllm.commands.flags import flag_of, given
from jaxllm.config import EngineConfig
from jaxllm.errors import UserError

WITH_SAMPLING = ("generate", "chat")
Subparsers: TypeAlias = "argparse._SubParsersAction[Any]"


class UsageError(Exception):
    """Invalid command line arguments; the message includes the fix."""


def new_command(
    commands: Subparsers, name: str, run: Callable[[dict[str, Any]], int], summary: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, allow_abbrev=False)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)
    return parser


def add_model(parser: argparse.ArgumentParser, default: str = "the small model in jaxllm") -> None:
    parser.add_argument("-m", "--model", help=f"folder or hub id (default: {default})")


def add_profile(parser: argparse.ArgumentParser, what: str = "the first steps") -> None:
    parser.add_argument("--profile", metavar="DIR", help=f"write a trace of {what}, for ui.perfetto.dev")
    parser.add_argument("--profile-steps", type=int, default=64, metavar="N", help="steps of the trace (default: 64)")


def build(cls: type, options: Mapping[str, Any], **others: Any) -> Any:
    """Construct a settings class from its flags; `others` apply to fields without a flag.

    Raises `UsageError`, naming the flag.
    """
    with errors_by_flags(cls, has_sampling=options.get("command") in WITH_SAMPLING):
        return cls(**{**others, **given(options, cls)})


@contextmanager
def errors_by_flags(*classes: type, has_sampling: bool = False) -> Iterator[None]:
    """Convert a `UserError` into `UsageError`, naming flags instead of fields."""
    try:
        yield
    except UserError as error:
        message = str(error)
        for cls in classes:
            message = by_flags(message, cls, has_sampling)
        raise UsageError(message) from error


def by_flags(message: str, cls: type, has_sampling: bool = False) -> str:
    for field in fields(cls):
        # Without "_" it may be an ordinary word.
        pattern = rf"(?<![\w'-]){field.name}\b" if "_" in field.name else rf"^{field.name}(?= (must|cannot|is)\b|:)"
        message = re.sub(pattern, flag_of(field.name, cls, has_sampling), message)
    return message


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    from jaxllm.embedded import MODEL_DIR

    return build(EngineConfig, options, model=options["model"] or str(MODEL_DIR))
