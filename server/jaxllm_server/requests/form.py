"""The client's options for an answer, and protocols of replies. Pure."""

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
    """Options for an answer's form and content."""

    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    tokens_as_ids: bool
    num_logprobs: int | None  # alternatives per token; -1: the vocabulary
    shows_prompt_logprobs: bool
    shows_cached: bool
    shows_reasoning: bool
    logprob_ids: Sequence[int] | None = None  # reported instead of the likeliest


class CallsReply(Protocol):
    """A request's calls, for text or pooling."""

    calls: Sequence[Any]
    request_id: str
    id_prefix: str
    names: Mapping[str, str]  # parameter in errors -> different field


class Reply(CallsReply, Protocol):
    """A request's calls and the conversion of their chunks; keeps only the output's progress."""

    calls: Sequence[Call]
    form: Form
    is_stream: bool
    object: str
    chunk_object: str

    @property
    def ignored(self) -> Sequence[str]:
        """Fields without effect."""
        ...

    def response(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """Return the answer without its header, from one chunk per call."""
        ...

    def events(self, number: int, chunk: Chunk) -> list[dict[str, Any]]:
        """Return the events of call `number`'s chunk."""
        ...

    def last_event(self) -> dict[str, Any] | None:
        """Return the usage, if requested."""
        ...


def form_of(fields: Body, options: ServerOptions, num_logprobs: Any) -> Form:
    stream = bool(flag(fields, "stream", False))
    wanted = mapping(fields, "stream_options") or {}
    if not stream and any(value not in (None, False) for value in wanted.values()):
        raise UserError("stream_options needs stream=true.", "stream_options")
    for name in wanted:
        # Obfuscation, against traffic analysis, is not built.
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
