"""What the client's methods return. Knows neither messages nor a network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability under the model, before temperature, penalties and filters."""

    token_id: int
    logprob: float
    rank: int  # 1 is the likeliest
    text: str | None = None
    top: tuple[TokenLogprob, ...] = ()  # the likeliest tokens at this position, likeliest first
    asked: tuple[float, ...] = ()  # log-probabilities of `logprob_token_ids`, in their order


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made."""

    id: str
    name: str
    arguments: str  # as the model wrote them: meant to be a JSON object

    def parsed(self) -> Any:
        """Read the arguments as JSON; ValueError if the model did not write any."""
        return json.loads(self.arguments)


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What is new of a tool call: the first delta of a call holds id and name, `arguments` are a piece."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a call used."""

    prompt_tokens: int
    completion_tokens: int  # of all sequences
    cached_prompt_tokens: int  # of the prompt's, found in the prefix cache
    reasoning_tokens: int  # of the completion's


@dataclass(frozen=True, slots=True)
class Timing:
    """Where a request's time went, in seconds; None for what the server did not report."""

    queue: float | None  # until its first step
    prefill: float | None  # from there until the first token
    first_token: float | None  # from arrival
    total: float | None


@dataclass(slots=True)
class Output:
    """One generated sequence, so far or in full."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None  # one per token id
    finish_reason: str | None = (
        None  # stop, length, context, time_limit, repetition, abort or tool_calls; None: not finished
    )
    stop_reason: int | str | None = None  # the stop string or stop token that ended it
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    seed: int | None = None  # that it was sampled with


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one sequence; fields as in `Output`."""

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
    """What a call generated. `text` and the like are those of the first sequence; `outputs` holds all `n`."""

    request_id: str = ""
    model: str = ""
    outputs: list[Output] = field(default_factory=list)
    usage: Usage | None = None
    timing: Timing | None = None
    prompt_token_ids: list[int] | None = None  # with return_prompt_token_ids or prompt_logprobs
    prompt_logprobs: list[TokenLogprob | None] | None = None  # one per token of the prompt; nothing predicts the first

    @property
    def text(self) -> str:
        """The text, without reasoning and tool calls."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        """The generated token ids."""
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """One per token id, with the option `logprobs`."""
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        """Why the sequence ended: stop, length, context, time_limit, repetition, abort or tool_calls."""
        return self.outputs[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string or stop token that ended it; None for the model's own end of sequence."""
        return self.outputs[0].stop_reason

    @property
    def reasoning(self) -> str:
        """What the model wrote before its answer, where the server splits it off."""
        return self.outputs[0].reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls that the model made."""
        return self.outputs[0].tool_calls

    @property
    def seed(self) -> int | None:
        """What to pass as `seed` to get the same tokens again."""
        return self.outputs[0].seed

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to append to a conversation."""
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
    """A text's vector."""

    values: list[float]
    prompt_tokens: int
    index: int = 0  # of `stream_embed`: the place of its prompt
    request_id: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification:
    """What a classifier makes of a text."""

    label: str  # of the largest number
    values: list[float]  # one for each of the model's labels, `ModelInfo.labels`
    prompt_tokens: int
    request_id: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How well texts belong together."""

    values: list[float]  # one for each of the second texts
    prompt_tokens: int
    request_id: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that a server offers."""

    name: str
    aliases: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    defaults: Mapping[str, Any]  # options that a call leaves open
    has_chat: bool
    has_tool_calls: bool
    has_reasoning: bool
    tasks: tuple[str, ...]  # "generate"; or some of "embed", "classify" and "score"
    pooled_size: int  # numbers of an embedding, or one for each label; 0: it generates
    dimensions: tuple[int, ...] | None  # that an embedding may be cut to; (): any up to its size; None: it may not
    labels: tuple[str, ...]  # of a classifier
    parent: str = ""  # of an adapter: the model that it changes


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that a server has loaded."""

    name: str
    source: str  # where the server has it from
    rank: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server is."""

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
