"""A field of a settings dataclass whose description is also the help of its command line flag."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def setting(default: Any, text: str, metavar: str | None = None, *, takes_several: bool = False, **options: Any) -> Any:
    """Make a dataclass field; `text` says what it is, `metavar` names its value in `--help` (None: by its type).

    The flag of a list is repeated for each of its values, or, with `takes_several`, followed by all of them. `options`
    are those of `dataclasses.field`.
    """
    metadata = {"help": text, "metavar": metavar, "takes_several": takes_several}
    return field(default=default, metadata=metadata, **options)
