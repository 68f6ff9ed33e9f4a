"""The results of the client's methods."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability before temperature, penalties and filters."""

    token_id: int
    logprob: float
    rank: int  # 1 is the likeliest
    text: str | None = None
    top: tuple[TokenLogprob, ...] = ()
    asked: tuple[float, ...] = ()  # of `logprob_token_ids`, in their order


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the model."""

    id: str
    name: str
    arguments: str  # possibly invalid JSON

    def parsed(self) -> Any:
        """Parse the arguments as JSON; raises `ValueError` if invalid."""
        return json.loads(self.arguments)


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call; only the first has id and name. Append `arguments`."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a call."""

    prompt_tokens: int
    completion_tokens: int  # of all sequences
    cached_prompt_tokens: int  # found in the prefix cache
    reasoning_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Durations of a request's phases in seconds, None if unknown."""

    queue: float | None  # to first step
    prefill: float | None  # from first step to first token
    first_token: float | None  # from arrival
    total: float | None


@dataclass(slots=True)
class Output:
    """A generated sequence, partial or complete."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None  # one per token id
    finish_reason: str | None = (
        None  # stop, length, context, time_limit, repetition, abort or tool_calls; None: unfinished
    )
    stop_reason: int | str | None = None
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """The new part of a sequence; fields as in `Output`."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None
    finish_reason: str | None
    stop_reason: int | str | None
    reasoning: str
    tool_calls: list[ToolCallDelta]
    seed: int | None


@dataclass(slots=True)
class Completion:
    """The results of a call; `text` etc. are of the first of `outputs`."""

    request_id: str = ""
    model: str = ""
    outputs: list[Output] = field(default_factory=list)
    usage: Usage | None = None
    timing: Timing | None = None
    prompt_token_ids: list[int] | None = None  # with return_prompt_token_ids or prompt_logprobs
    prompt_logprobs: list[TokenLogprob | None] | None = None  # per prompt token, None for the first

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """One per token id, if requested."""
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        """Why the sequence ended, as in `Output`."""
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """The matched stop string or token id."""
        return self.outputs[0].stop_reason

    @property
    def reasoning(self) -> str:
        """The reasoning before the answer, if the server separates it."""
        return self.outputs[0].reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        return self.outputs[0].tool_calls

    @property
    def seed(self) -> int | None:
        """Reproduces these tokens."""
        return self.outputs[0].seed

    @property
    def message(self) -> dict[str, Any]:
        """The answer as an assistant message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """An embedding vector."""

    values: list[float]
    prompt_tokens: int
    index: int = 0  # of the prompt, in `stream_embed`
    request_id: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification:
    """The classes' scores for a text."""

    label: str  # of the largest value
    values: list[float]  # per label of `ModelInfo.labels`
    prompt_tokens: int
    request_id: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Relevance scores of text pairs."""

    values: list[float]
    prompt_tokens: int
    request_id: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model."""

    name: str
    aliases: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    defaults: Mapping[str, Any]
    has_chat: bool
    has_tool_calls: bool
    has_reasoning: bool
    tasks: tuple[str, ...]
    pooled_size: int  # embedding size or number of labels; 0: generates
    dimensions: tuple[int, ...] | None  # of a shortened embedding; (): any smaller; None: not allowed
    labels: tuple[str, ...]
    parent: str = ""  # an adapter's base model


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded LoRA adapter."""

    name: str
    source: str  # on the server
    rank: int


@dataclass(frozen=True, slots=True)
class WeightInfo:
    """The state of a server's weights."""

    version: str  # "0" at first
    is_sleeping: bool  # weights or cache
    is_paused: bool  # requests are refused


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server's version, state and limits."""

    version: str
    api_revision: int
    instance_id: str
    start_time: datetime
    state: str  # loading, compiling, serving, paused, draining, hung or dead
    model_names: tuple[str, ...]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_blocks_total: int
    dtype: str
    device_kind: str
    mesh: Mapping[str, int]
