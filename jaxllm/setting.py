"""A field of a settings dataclass whose description is also the help of its command line flag."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def setting(default: Any, text: str, metavar: str | None = None, **options: Any) -> Any:
    """Make a dataclass field; `text` says what it is, `metavar` names its value in `--help` (None: by its type).

    `options` are those of `dataclasses.field`.
    """
    return field(default=default, metadata={"help": text, "metavar": metavar}, **options)
