"""`RequestParams`: the base class of request parameters."""

from __future__ import annotations

from typing import ClassVar


class RequestParams:
    """The parameters of one request. Immutable."""

    generates: ClassVar[bool] = True  # continues its prompt

    @property
    def num_sequences(self) -> int:
        """The number of its sequences."""
        return 1
