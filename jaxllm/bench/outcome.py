"""The outcome of a request as its client observed it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """One request. Times are of `time.perf_counter`.

    Messages are gRPC messages or HTTP events with new tokens. `output_tokens` and `seen_prompt_tokens` are the
    server's, or None.
    """

    number: int  # of the job
    prompt_tokens: int
    max_tokens: int
    due_at: float = 0.0  # scheduled
    sent_at: float = 0.0  # later than `due_at` if concurrency is limited
    ended_at: float = 0.0
    message_times: list[float] = field(default_factory=list)
    output_tokens: int | None = None
    seen_prompt_tokens: int | None = None
    text: str = ""
    num_vectors: int = 0
    error: str = ""  # one line

    @property
    def ttft(self) -> float:
        return self.message_times[0] - self.sent_at if self.message_times else 0.0

    @property
    def itls(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.message_times, self.message_times[1:], strict=False)]

    @property
    def latency(self) -> float:
        return self.message_times[-1] - self.sent_at if self.message_times else 0.0
