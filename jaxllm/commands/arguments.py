"""What the commands' arguments share: the model, the engine's settings, and how a wrong one is told.

Knows argparse and the dataclasses that flags are made of; loads nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, TypeAlias

from jaxllm.config import EngineConfig
from jaxllm.errors import UserError
from jaxllm.flags import given

Subparsers: TypeAlias = "argparse._SubParsersAction[Any]"


class Usage(Exception):
    """What was typed is wrong; the message says how to do it."""


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add what every command takes: `--model` and `--debug`."""
    parser.add_argument("-m", "--model", help="folder or hub id (default: the small model within jaxllm)")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def build(cls: type, options: Mapping[str, Any], **others: Any) -> Any:
    """Make a dataclass of the flags that were given for it and of `others`; Usage where a value is refused."""
    try:
        return cls(**{**others, **given(options, cls)})
    except UserError as error:
        raise Usage(str(error)) from error


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """Make the engine's settings of the flags, with the embedded model where none is named."""
    from jaxllm.embedded import MODEL_DIR

    return build(EngineConfig, options, model=options["model"] or str(MODEL_DIR))
