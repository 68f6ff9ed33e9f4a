"""What both protocols share: a `Call` is what a client asks for, `Chunk`s are what it gets.

Plain data, so that the mapping of messages stays pure. Knows no engine and no protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from jaxllm.outputs import Logprob
from jaxllm_server.access.ledger import Entry
from jaxllm_server.generation.answer_size import AnswerSize
from jaxllm_server.parsers.tool_parsers import ToolCallDelta

LARGE_REQUEST = 1 << 16  # bytes; a larger request may take 5 ms to read, and is read in a thread
Finish = Literal["stop", "length", "repetition", "context", "time_limit", "abort", "tool_calls"]


@dataclass(frozen=True)
class NamedTool:
    """The tool that an answer has to call, once."""

    name: str


# None: auto where there are tools. "required": one of the tools at least once.
ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool | None


def is_forced(choice: ToolChoice) -> bool:
    """Whether the whole answer is tool calls."""
    return choice == "required" or isinstance(choice, NamedTool)


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a client asks for, as its protocol said it; unchecked."""

    client: str = ""  # its name by `client_quota.client_of`
    num_bytes: int = 0  # of its request
    entry: Entry | None = field(default=None, compare=False, repr=False)  # its request's, in the ledger
    model: str = ""  # "" is the served one
    prompt: str | Sequence[int] | None = None  # this or messages
    suffix: str | None = None  # text behind the prompt, where the answer belongs between the two
    messages: Sequence[Mapping[str, Any]] | None = None
    written_ids: Sequence[int] | None = None  # the messages as their client has written and tokenized them
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: ToolChoice = None
    takes_one_call: bool = False  # of tools; what else the model would call is not forced on it
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    truncation_side: str = "left"  # where `truncate_prompt_tokens` cuts; "right" keeps the first ones
    add_special_tokens: bool | None = None  # None: as the model expects it around a text, nothing around a chat
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplingParams that the client gave
    beams: Mapping[str, Any] | None = None  # of a beam search: fields of BeamSearchParams that the client gave
    default_max_tokens: int | None = None  # of the protocol, where neither client nor model say one
    may_fill_context: bool = False  # max_tokens may be more than the context has room for: the answer ends there
    stream: bool = False
    request_id: str | None = None  # unique among living requests, of each client if keys distinguish them
    client_id: str | None = None  # X-Request-Id, which may come twice; it goes into logs and recordings
    priority: int = 0
    cache_salt: str | None = None
    adapter: str = ""
    time_limit: float | None = None  # seconds after which the answer ends with what there is
    include_reasoning: bool = True
    answer_size: AnswerSize = field(default_factory=AnswerSize, compare=False)  # one for all calls of a request
    scores_prompt: bool = False  # no output is wanted; the one token that an engine samples at least is not shown


@dataclass(slots=True)
class Part:
    """What is new of one of a request's outputs."""

    index: int
    text: str
    reasoning: str
    tool_calls: list[ToolCallDelta]
    token_ids: Sequence[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: Finish | None
    stop_reason: int | str | None
    seed: int | None
    num_reasoning: int = 0  # of the tokens


@dataclass(slots=True)
class PromptInfo:
    """What became of the prompt."""

    token_ids: Sequence[int]
    num_cached: int
    logprobs: list[dict[int, Logprob] | None] | None = None  # where they were asked for, None for the first token
    first_text: str = ""  # of that token, with the log-probabilities
    first_bytes: bytes | None = None  # as of `Logprob.raw_bytes`


@dataclass(slots=True)
class Usage:
    """Tokens of a request so far, all outputs together."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_prompt_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(slots=True)
class Timing:
    """Seconds of a request's life."""

    queue: float
    prefill: float
    first_token: float
    total: float


@dataclass(slots=True)
class Chunk:
    """What is new of a request."""

    request_id: str
    outputs: list[Part]
    prompt: PromptInfo | None  # in the first one only
    usage: Usage
    timing: Timing | None  # in the last one only
    is_last: bool
