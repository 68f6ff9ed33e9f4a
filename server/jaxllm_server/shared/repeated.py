"""Lists that repeat in an answer, stored and encoded once. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Repeated(list[Any]):
    """An immutable list that caches its JSON."""

    json: bytes | None = None


class Continued(list[Any]):
    """A repeated list followed by further items."""

    def __init__(self, beginning: Repeated, rest: Iterable[Any]) -> None:
        self.beginning, self.rest = beginning, list(rest)
        super().__init__((*beginning, *self.rest))
