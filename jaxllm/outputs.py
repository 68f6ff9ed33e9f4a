"""What comes out of a request: `RequestOutput` with its completions, `PoolingRequestOutput` with its vector.

Names are vLLM's. Standard library only, so that a client can import it in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

FinishReason = Literal["stop", "length", "repetition", "abort", "time_limit", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability under the model, before temperature, penalties and filters."""

    logprob: float
    rank: int | None = None  # 1 is the likeliest; None for a token that only logprob_token_ids names
    decoded_token: str | None = None
    raw_bytes: bytes | None = None  # of a token that is a part of a character; None: those of `decoded_token`

    @property
    def decoded_bytes(self) -> bytes:
        """The UTF-8 bytes of the token in the text."""
        return (self.decoded_token or "").encode() if self.raw_bytes is None else self.raw_bytes


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
    pooled: Any = None  # of a prompt that was pooled: its vector, float32[W]
    score: float | None = None  # of a beam search's: its log-probability, divided as `length_penalty` says

    def finished(self) -> bool:
        """Whether no token will be added."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """What happened to a request, and when.

    Times are seconds of the engine's monotonic clock, None for what has not happened.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0  # how often one of its sequences lost its place


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


@dataclass(slots=True)
class BeamSearchSequence:
    """One output of a beam search."""

    tokens: list[int]  # of prompt and output; the end-of-sequence token only with `include_stop_str_in_output`
    text: str  # of all of them
    cum_logprob: float  # of the output's tokens, the end-of-sequence token's too
    score: float  # by which outputs are ranked
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The outputs of a beam search, the best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class PoolingOutput:
    """What became of a prompt that was pooled, float32[W]: an embedding, or a number for each label."""

    data: Any  # a numpy array; None where the prompt failed or was aborted
    finish_reason: FinishReason | None = "stop"
    stop_reason: str | None = None  # why it failed


@dataclass(slots=True)
class PoolingRequestOutput:
    """A prompt and its result."""

    request_id: str
    prompt_token_ids: Sequence[int]
    outputs: PoolingOutput
    finished: bool = True
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = None
    internal_id: str = field(default="", repr=False, compare=False)  # the engine's own id of the request


def pooled_output(output: RequestOutput) -> PoolingRequestOutput:
    """Return the output of a prompt that was pooled."""
    own = output.outputs[0]
    return PoolingRequestOutput(
        request_id=output.request_id,
        prompt_token_ids=output.prompt_token_ids,
        outputs=PoolingOutput(own.pooled, own.finish_reason, None if own.stop_reason is None else str(own.stop_reason)),
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
        """How many numbers it has."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """A number for each label: probabilities, unless `use_activation` is False."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts belong together."""

    score: float


Pooled = TypeVar("Pooled", EmbeddingOutput, ClassificationOutput, ScoringOutput)


@dataclass(slots=True)
class PooledRequestOutput(Generic[Pooled]):
    """A prompt, or a pair of them, and what its task made of it."""

    request_id: str
    prompt_token_ids: Sequence[int]
    outputs: Pooled
    finished: bool = True
    num_cached_tokens: int | None = None


def pooled_as(output: PoolingRequestOutput, made: Pooled) -> PooledRequestOutput[Pooled]:
    """Return a prompt with what its task made of its vector."""
    return PooledRequestOutput(
        output.request_id, output.prompt_token_ids, made, output.finished, output.num_cached_tokens
    )


EmbeddingRequestOutput = PooledRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PooledRequestOutput[ClassificationOutput]
ScoringRequestOutput = PooledRequestOutput[ScoringOutput]
