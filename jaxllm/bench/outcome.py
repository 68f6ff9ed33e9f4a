"""The outcome of a request as its client observed it: times, tokens, text, error."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """One request. Times are of `time.perf_counter`.

    A message is a gRPC message or HTTP event with new tokens. `output_tokens` and `seen_prompt_tokens` are reported by
    the server; None if not.
    """

    number: int  # index of the job
    prompt_tokens: int
    max_tokens: int
    due_at: float = 0.0  # scheduled time
    sent_at: float = 0.0  # actual time, later if concurrency is limited
    ended_at: float = 0.0
    message_times: list[float] = field(default_factory=list)
    output_tokens: int | None = None
    seen_prompt_tokens: int | None = None
    text: str = ""
    num_vectors: int = 0
    error: str = ""  # one line, or ""

    @property
    def ttft(self) -> float:
        """Return the time to first token in seconds, 0 without tokens."""
        return self.message_times[0] - self.sent_at if self.message_times else 0.0

    @property
    def itls(self) -> list[float]:
        """Return the seconds between messages."""
        return [later - earlier for earlier, later in zip(self.message_times, self.message_times[1:], strict=False)]

    @property
    def latency(self) -> float:
        """Return the seconds to the last token, 0 without tokens."""
        return self.message_times[-1] - self.sent_at if self.message_times else 0.0
