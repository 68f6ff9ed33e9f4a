"""Settings fields with a description, the help of their flags."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def setting(default: Any, text: str, metavar: str | None = None, *, takes_several: bool = False, **options: Any) -> Any:
    """Return a dataclass field; `text` describes it, `metavar` names its value in `--help`.

    A list's flag is repeated per value, or with `takes_several` followed by all.
    """
    metadata = {"help": text, "metavar": metavar, "takes_several": takes_several}
    return field(default=default, metadata=metadata, **options)
