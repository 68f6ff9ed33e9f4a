"""Policy after a failed step: retry, end the largest request, or give up."""

from __future__ import annotations

from typing import Literal

MAX_FAILURES = 3  # consecutive failed steps per escalation
MAX_EXHAUSTED = 3  # the last out-of-memory escalation ends the engine, others the largest request

Action = Literal["retry", "end_largest", "give_up"]


class FailedSteps:
    """Count of consecutive failed steps."""

    def __init__(self) -> None:
        self.count = 0

    def reset(self) -> None:
        self.count = 0

    def add(self, error: Exception) -> Action:
        self.count += 1
        if self.count % MAX_FAILURES:
            return "retry"
        if is_out_of_memory(error) and self.count < MAX_EXHAUSTED * MAX_FAILURES:
            return "end_largest"
        return "give_up"


def is_out_of_memory(error: Exception) -> bool:
    """Return whether memory is exhausted; XLA reports it only in the message."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
