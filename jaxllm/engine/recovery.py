"""What to do after a step that failed: compute it again, end the largest request, or give up. Pure counting."""

from __future__ import annotations

from typing import Literal

MAX_FAILURES = 3  # steps in a row that may fail before something is given up
MAX_EXHAUSTED = 3  # as often in a row the largest request of a step that has no memory ends instead of the engine

Action = Literal["retry", "end_largest", "give_up"]


class FailedSteps:
    """Counts the steps that failed in a row."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self) -> None:
        """Forget them: a step has succeeded."""
        self.count = 0

    def add(self, error: Exception) -> Action:
        """Count a failure. If there is no memory time and again, the requests but the largest may well fit."""
        self.count += 1
        if self.count % MAX_FAILURES:
            return "retry"
        if is_out_of_memory(error) and self.count < MAX_EXHAUSTED * MAX_FAILURES:
            return "end_largest"
        return "give_up"


def is_out_of_memory(error: Exception) -> bool:
    """Whether the device, or the host, had no memory for a step. XLA says so only in the text of its exception."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
