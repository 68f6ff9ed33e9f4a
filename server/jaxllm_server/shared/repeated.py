"""Lists that several parts of one answer repeat: each stands once in memory, and its JSON is written once. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Repeated(list[Any]):
    """A list that never changes; its JSON is kept here once it has been written."""

    json: bytes | None = None


class Continued(list[Any]):
    """A repeated list with more items behind it."""

    def __init__(self, beginning: Repeated, rest: Iterable[Any]) -> None:
        self.beginning, self.rest = beginning, list(rest)
        super().__init__((*beginning, *self.rest))
