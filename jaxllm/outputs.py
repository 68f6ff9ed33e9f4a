"""What comes out of a request: `RequestOutput`, its completions and their log-probabilities.

Names are vLLM's. Standard library only, so that a client can import it in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "repetition", "abort", "time_limit", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability under the model, before temperature, penalties and filters."""

    logprob: float
    rank: int | None = None  # 1 is the likeliest; None for a token that only logprob_token_ids names
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` outputs so far."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    # Per token, token id to log-probability: the sampled token, the likeliest ones, then those of logprob_token_ids.
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop string or stop token id that ended it; None for end-of-sequence
    seed: int | None = None  # that gives the same tokens again; None where nothing is drawn

    def finished(self) -> bool:
        """Whether no token will be added."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request: seconds of the engine's monotonic clock, None for what has not happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request and all of its outputs so far."""

    request_id: str
    prompt: str | None  # None when token ids were given
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None  # of the prompt, found in the prefix cache
    # Per token of the prompt: the token, then the likeliest ones; None for the first, which nothing predicts. A delta
    # has them once, as soon as there are all.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    internal_id: str = field(default="", repr=False, compare=False)  # the engine's own id of the request
