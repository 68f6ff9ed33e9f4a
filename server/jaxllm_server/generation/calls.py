"""Requests and results of any protocol, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from jaxllm.outputs import Logprob
from jaxllm_server.access.ledger import Entry
from jaxllm_server.generation.answer_size import AnswerSize
from jaxllm_server.parsers.tool_parsers import ToolCallDelta

LARGE_REQUEST = 1 << 16  # bytes; parsing more may take 5 ms, in a thread
Finish = Literal["stop", "length", "repetition", "context", "time_limit", "abort", "tool_calls"]


@dataclass(frozen=True)
class NamedTool:
    """A tool that must be called once."""

    name: str


# None: auto if the call has tools.
ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool | None


def is_forced(choice: ToolChoice) -> bool:
    return choice == "required" or isinstance(choice, NamedTool)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A client's request, not validated."""

    client: str = ""
    num_bytes: int = 0
    entry: Entry | None = field(default=None, compare=False, repr=False)
    model: str = ""
    prompt: str | Sequence[int] | None = None  # exclusive with messages
    suffix: str | None = None  # after the completion, for fill-in-the-middle
    messages: Sequence[Mapping[str, Any]] | None = None
    written_ids: Sequence[int] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: ToolChoice = None
    takes_one_call: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)  # that choose frames of videos
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    truncation_side: str = "left"  # side that `truncate_prompt_tokens` removes
    add_special_tokens: bool | None = None  # None: as the model expects for text, none for chats
    sampling: Mapping[str, Any] = field(default_factory=dict)
    beams: Mapping[str, Any] | None = None
    default_max_tokens: int | None = None  # if neither client nor model set one
    may_fill_context: bool = False  # reduce max_tokens to the space left
    stream: bool = False
    request_id: str | None = None  # unique among running requests, per client if keys distinguish them
    client_id: str | None = None  # X-Request-Id, for logs; not unique
    priority: int = 0
    cache_salt: str | None = None
    adapter: str = ""
    time_limit: float | None = None  # seconds, then the answer is partial
    kv_transfer_params: Mapping[str, Any] | None = None
    include_reasoning: bool = True
    answer_size: AnswerSize = field(default_factory=AnswerSize, compare=False)
    scores_prompt: bool = False  # hide the one generated token


@dataclass(slots=True)
class Part:
    """An output's new part."""

    index: int
    text: str
    reasoning: str
    tool_calls: list[ToolCallDelta]
    token_ids: Sequence[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: Finish | None
    stop_reason: int | str | None
    seed: int | None
    num_reasoning: int = 0
    weight_versions: Sequence[tuple[str, int]] | None = None


@dataclass(slots=True)
class PromptInfo:
    """The processed prompt."""

    token_ids: Sequence[int]
    num_cached: int
    logprobs: list[dict[int, Logprob] | None] | None = None
    first_text: str = ""  # the first token's
    first_bytes: bytes | None = None


@dataclass(slots=True)
class TokenUsage:
    """A request's token counts, over all outputs."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_prompt_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(slots=True)
class Timing:
    """Durations of a request's phases in seconds.

    `queue` lasts until scheduling, `prefill` from there to the first token; the others count from arrival.
    """

    queue: float
    prefill: float
    first_token: float
    total: float


@dataclass(slots=True)
class Chunk:
    """A request's new results."""

    request_id: str
    outputs: list[Part]
    prompt: PromptInfo | None
    usage: TokenUsage
    timing: Timing | None
    is_last: bool
    kv_transfer_params: Mapping[str, Any] | None = None  # the place of the prompt's KV blocks
