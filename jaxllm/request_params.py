"""`RequestParams`: the base of all parameters that a request may have. Standard library only."""

from __future__ import annotations

from typing import ClassVar


class RequestParams:
    """The parameters of one request: plain data that never changes."""

    generates: ClassVar[bool] = True  # whether it continues its prompt with tokens

    @property
    def num_sequences(self) -> int:
        """The number of sequences that run for it."""
        return 1
