"""How a client wants to be answered, and the protocol that every reply of a generating route implements. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxllm.errors import UserError
from jaxllm_server.generation.calls import Call, Chunk
from jaxllm_server.requests.fields import SHOWN_NAME, Body, flag, mapping
from jaxllm_server.shared.options import ServerOptions


@dataclass(frozen=True, kw_only=True)
class Form:
    """What of an answer the client wants to see, and how."""

    stream: bool
    include_usage: bool  # at the end of a stream
    continuous_usage: bool  # in each event of a stream
    return_token_ids: bool
    tokens_as_ids: bool  # "token_id:N" in place of a token's text in log-probabilities
    num_logprobs: int | None  # alternatives to each token; None: no log-probabilities, -1: the vocabulary
    shows_prompt_logprobs: bool
    shows_cached: bool
    shows_reasoning: bool
    logprob_ids: Sequence[int] | None = None  # these tokens in place of the likeliest ones


class Reply(Protocol):
    """One request's calls, and how their chunks are written. It remembers how far it has written, and nothing else."""

    calls: Sequence[Call]
    form: Form
    is_stream: bool
    request_id: str
    id_prefix: str
    object: str  # of the whole answer
    chunk_object: str  # of an event of a stream
    names: Mapping[str, str]  # parameter that an error names -> field of the request, where they differ

    @property
    def ignored(self) -> Sequence[str]:
        """The fields of the request that it is answered without."""
        ...

    def response(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """Return what follows the head of the whole answer; one chunk for each call."""
        ...

    def events(self, number: int, chunk: Chunk) -> list[dict[str, Any]]:
        """Return what follows the head of each event that a chunk of call `number` becomes."""
        ...

    def last_event(self) -> dict[str, Any] | None:
        """Return what follows the head of the event after all others: the usage, where it was asked for."""
        ...


def form_of(fields: Body, options: ServerOptions, num_logprobs: Any) -> Form:
    """Return how a request wants to be answered."""
    stream = bool(flag(fields, "stream", False))
    wanted = mapping(fields, "stream_options") or {}
    if not stream and any(value not in (None, False) for value in wanted.values()):
        raise UserError("stream_options needs stream=true.", "stream_options")
    for name in wanted:
        # Obfuscation pads events against observers of an encrypted line; OpenAI's client may ask for none.
        if name not in ("include_usage", "continuous_usage_stats", "include_obfuscation"):
            raise UserError(f"{name[:SHOWN_NAME]!r} is not a field of stream_options.", "stream_options")
    include_usage = bool(flag(wanted, "include_usage", False)) or options.enable_force_include_usage
    return Form(
        stream=stream,
        include_usage=include_usage,
        continuous_usage=options.enable_force_include_usage
        or (include_usage and bool(flag(wanted, "continuous_usage_stats", False))),
        return_token_ids=bool(flag(fields, "return_token_ids", False)),
        tokens_as_ids=bool(flag(fields, "return_tokens_as_token_ids", options.return_tokens_as_token_ids)),
        num_logprobs=num_logprobs if isinstance(num_logprobs, int) else None,
        logprob_ids=fields.get("logprob_token_ids"),
        shows_prompt_logprobs="prompt_logprobs" in fields,
        shows_cached=options.enable_prompt_tokens_details,
        shows_reasoning=options.reasoning_parser is not None,
    )
