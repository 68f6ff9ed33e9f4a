"""What became of one request, as its client saw it: times, tokens, text, error. Computes nothing but differences."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """One request. Times are seconds of a clock that all processes of a machine share (`time.perf_counter`).

    A message is whatever arrives at once with new tokens: one of gRPC, one event of HTTP. `output_tokens` and
    `seen_prompt_tokens` are the server's count, None if it reports none.
    """

    number: int  # of the job
    prompt_tokens: int
    max_tokens: int
    due_at: float = 0.0  # when it should have been sent
    sent_at: float = 0.0  # when it was: later where the client's concurrency is capped
    ended_at: float = 0.0
    message_times: list[float] = field(default_factory=list)
    output_tokens: int | None = None
    seen_prompt_tokens: int | None = None
    text: str = ""
    num_vectors: int = 0  # embeddings that came
    error: str = ""  # one line; empty if all went well

    @property
    def ttft(self) -> float:
        """Seconds to the first token; 0 if none came."""
        return self.message_times[0] - self.sent_at if self.message_times else 0.0

    @property
    def itls(self) -> list[float]:
        """Seconds between messages."""
        return [later - earlier for earlier, later in zip(self.message_times, self.message_times[1:], strict=False)]

    @property
    def latency(self) -> float:
        """Seconds to the last token; 0 if none came."""
        return self.message_times[-1] - self.sent_at if self.message_times else 0.0
