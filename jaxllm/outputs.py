"""Results of requests, with vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

FinishReason = Literal["stop", "length", "repetition", "abort", "time_limit", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability before temperature, penalties and filters."""

    logprob: float
    rank: int | None = None  # 1 is the likeliest; None for tokens of logprob_token_ids
    decoded_token: str | None = None
    raw_bytes: bytes | None = None  # of a partial character; None: those of `decoded_token`

    @property
    def decoded_bytes(self) -> bytes:
        """Return the token's UTF-8 bytes."""
        return (self.decoded_token or "").encode() if self.raw_bytes is None else self.raw_bytes


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` outputs so far."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    # Per token: the sampled one, the likeliest, then those of logprob_token_ids.
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # matched stop string or token id; None: end-of-sequence
    seed: int | None = None  # reproduces the output; None if deterministic
    pooled: Any = None  # float32[W] of a pooled prompt
    score: float | None = None  # of a beam, with length penalty
    # Versions of the weights, with numbers of tokens; None without `enable_sleep_mode`.
    weight_versions: list[tuple[str, int]] | None = None

    def finished(self) -> bool:
        """Return whether the output is complete."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Events of a request, in seconds of a monotonic clock; None if pending."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A request and its outputs so far."""

    request_id: str
    prompt: str | None  # None if given as token ids
    prompt_token_ids: Sequence[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None  # from the prefix cache
    # Per prompt token: the token, then the likeliest; None for the first. In one delta.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    # The place of the prompt's KV blocks; last, with do_remote_decode.
    kv_transfer_params: dict[str, Any] | None = None
    internal_id: str = field(default="", repr=False, compare=False)  # the engine's
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: Sequence[int] | None = None


@dataclass(slots=True)
class BeamSearchSequence:
    """One output of a beam search."""

    tokens: list[int]  # prompt and output; end-of-sequence with `include_stop_str_in_output`
    text: str
    cum_logprob: float  # of output tokens, with end-of-sequence
    score: float
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The outputs of a beam search, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class PoolingOutput:
    """A pooled prompt's result, float32[W]: an embedding, or a number per label."""

    data: Any  # numpy array; None if failed or aborted
    finish_reason: FinishReason | None = "stop"
    stop_reason: str | None = None  # error


@dataclass(slots=True)
class PoolingRequestOutput:
    """A prompt and its result."""

    request_id: str
    prompt_token_ids: Sequence[int]
    outputs: PoolingOutput
    finished: bool = True
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = None
    internal_id: str = field(default="", repr=False, compare=False)


def pooled_output(output: RequestOutput) -> PoolingRequestOutput:
    first = output.outputs[0]
    return PoolingRequestOutput(
        request_id=output.request_id,
        prompt_token_ids=output.prompt_token_ids,
        outputs=PoolingOutput(
            first.pooled, first.finish_reason, None if first.stop_reason is None else str(first.stop_reason)
        ),
        finished=output.finished,
        num_cached_tokens=output.num_cached_tokens,
        metrics=output.metrics,
        internal_id=output.internal_id,
    )


@dataclass(slots=True)
class EmbeddingOutput:
    """An embedding."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """A number per label: probabilities, unless `use_activation` is False."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """The similarity or relevance of two texts."""

    score: float


Pooled = TypeVar("Pooled", EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass(slots=True)
class PooledRequestOutput(Generic[Pooled]):
    """A prompt or pair of prompts, and its result."""

    request_id: str
    prompt_token_ids: Sequence[int]
    outputs: Pooled
    finished: bool = True
    num_cached_tokens: int | None = None


def pooled_as(output: PoolingRequestOutput, made: Pooled) -> PooledRequestOutput[Pooled]:
    return PooledRequestOutput(
        output.request_id, output.prompt_token_ids, made, output.finished, output.num_cached_tokens
    )


EmbeddingRequestOutput = PooledRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PooledRequestOutput[ClassificationOutput]
ScoringRequestOutput = PooledRequestOutput[ScoringOutput]
