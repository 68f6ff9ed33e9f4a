"""Parameters of requests."""

from __future__ import annotations

from typing import ClassVar


class RequestParams:
    """A request's parameters. Immutable."""

    generates: ClassVar[bool] = True  # continues its prompt

    @property
    def num_sequences(self) -> int:
        return 1
