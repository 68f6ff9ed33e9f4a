"""What the commands' arguments share: the model, the engine's settings, and how a wrong one is reported.

Knows argparse and the dataclasses that flags are made of; loads nothing.
"""

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

WITH_SAMPLING = ("generate", "chat")  # commands that have the flags of a request, too
Subparsers: TypeAlias = "argparse._SubParsersAction[Any]"


class Usage(Exception):
    """What was typed is wrong; the message says how to do it."""


def new_command(
    commands: Subparsers, name: str, run: Callable[[dict[str, Any]], int], summary: str
) -> argparse.ArgumentParser:
    """Begin to describe a command that `run` does: with its line in the list of commands, and `--debug`."""
    parser = commands.add_parser(name, help=summary, allow_abbrev=False)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)
    return parser


def add_model(parser: argparse.ArgumentParser, default: str = "the small model within jaxllm") -> None:
    """Add `--model`."""
    parser.add_argument("-m", "--model", help=f"folder or hub id (default: {default})")


def add_profile(parser: argparse.ArgumentParser, what: str = "the first steps") -> None:
    """Add `--profile` and `--profile-steps`, for `profiling.profiled`."""
    parser.add_argument("--profile", metavar="DIR", help=f"write a trace of {what}, for ui.perfetto.dev")
    parser.add_argument("--profile-steps", type=int, default=64, metavar="N", help="steps of it (default: 64)")


def build(cls: type, options: Mapping[str, Any], **others: Any) -> Any:
    """Make a dataclass of the flags that were given for it and of `others`; Usage where a value is refused."""
    with errors_by_flags(cls, has_sampling=options.get("command") in WITH_SAMPLING):
        return cls(**{**others, **given(options, cls)})


@contextmanager
def errors_by_flags(*classes: type, has_sampling: bool = False) -> Iterator[None]:
    """Turn a UserError into Usage that speaks of flags where it speaks of the fields of `classes`."""
    try:
        yield
    except UserError as error:
        message = str(error)
        for cls in classes:
            message = by_flags(message, cls, has_sampling)
        raise Usage(message) from error


def by_flags(message: str, cls: type, has_sampling: bool = False) -> str:
    """Put flags into a message where it speaks of the fields of `cls`."""
    for field in fields(cls):
        # A field of one word is a word like others, but at the beginning of what is said of it.
        pattern = rf"(?<![\w'-]){field.name}\b" if "_" in field.name else rf"^{field.name}(?= (must|cannot|is)\b|:)"
        message = re.sub(pattern, flag_of(field.name, cls, has_sampling), message)
    return message


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """Make the engine's settings of the flags, with the embedded model where none is named."""
    from jaxllm.embedded import MODEL_DIR

    return build(EngineConfig, options, model=options["model"] or str(MODEL_DIR))
