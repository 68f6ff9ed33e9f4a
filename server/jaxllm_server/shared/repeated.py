"""Lists that an answer contains several times, kept in memory once and encoded once. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Repeated(list[Any]):
    """A list that never changes, with its JSON after the first encoding."""

    json: bytes | None = None


class Continued(list[Any]):
    """A repeated list followed by more items."""

    def __init__(self, beginning: Repeated, rest: Iterable[Any]) -> None:
        self.beginning, self.rest = beginning, list(rest)
        super().__init__((*beginning, *self.rest))
