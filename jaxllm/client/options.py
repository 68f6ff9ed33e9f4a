"""Options of client calls, and the API fields that they set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from jaxllm.client.sampling_options import SamplingOptions
from jaxllm.sampling_fields import GRPC, names_in
from jaxllm.sampling_params import SamplingParams


class GenerateOptions(SamplingOptions, total=False):
    """Options of `generate`; None, like absence, selects the model's default."""

    time_limit: float | None  # seconds, then returns the tokens so far; `timeout` fails
    return_token_ids: bool | None
    return_prompt_token_ids: bool | None
    logprob_texts: bool | None  # with log-probabilities; default True
    include_reasoning: bool | None
    # Of width n, optionally with "length_penalty" and "early_stopping" (True, False or "never").
    beam_search: Mapping[str, Any] | None
    model: str | None
    adapter: str | None
    request_id: str | None  # unique on the server, for `abort`
    priority: int | None  # lower is first
    cache_salt: str | None
    add_special_tokens: bool | None


class StreamOptions(GenerateOptions, total=False):
    """Further options of streaming calls."""

    stream_interval: int | None
    usage_every_message: bool | None  # with every message


class ChatOptions(TypedDict, total=False):
    """Further options of conversations."""

    tools: Sequence[Mapping[str, Any]] | None
    # "required": any tool; {"type": "function", "function": {"name": …}}: that tool.
    tool_choice: Literal["none", "auto", "required"] | Mapping[str, Any] | None
    chat_template_kwargs: Mapping[str, Any] | None
    mm_processor_kwargs: Mapping[str, Any] | None  # that choose frames of videos
    add_generation_prompt: bool | None
    continue_final_message: bool | None


class ChatGenerateOptions(GenerateOptions, ChatOptions, total=False):
    """The options of `chat`."""


class ChatStreamOptions(StreamOptions, ChatOptions, total=False):
    """The options of `stream_chat`."""


class _PoolOptions(TypedDict, total=False):
    model: str | None
    priority: int | None
    truncate_prompt_tokens: int | None  # leading tokens to keep; -1: the model's maximum


class StreamEmbedOptions(_PoolOptions, total=False):
    """Options of `stream_embed`, for all prompts."""

    dimensions: int | None  # leading components to keep
    normalize: bool | None
    add_special_tokens: bool | None


class EmbedOptions(StreamEmbedOptions, total=False):
    """The options of `embed`."""

    request_id: str | None


class ScoreOptions(_PoolOptions, total=False):
    """The options of `score`."""

    use_activation: bool | None  # False: logits, not probabilities
    request_id: str | None


class ClassifyOptions(ScoreOptions, total=False):
    """The options of `classify`."""

    add_special_tokens: bool | None


GENERATE_FIELDS = {
    **{name: path for path, name in names_in(SamplingParams, GRPC).items() if not path.startswith("stream.")},
    "time_limit": "stop.time_limit",
    "logprob_texts": "output.logprob_texts",
    "return_token_ids": "output.token_ids",
    "return_prompt_token_ids": "output.prompt_token_ids",
    "include_reasoning": "output.reasoning",
    "beam_search": "sampling.beam_search",
    **{name: name for name in ("model", "adapter", "request_id", "priority", "cache_salt", "add_special_tokens")},
}
STREAM_FIELDS = {"stream_interval": "stream.interval_tokens", "usage_every_message": "stream.usage_every_message"}
CHAT_FIELDS = {
    "tools": "chat.tools_json",
    "tool_choice": "chat.tool_choice",
    "chat_template_kwargs": "chat.template_kwargs",
    "mm_processor_kwargs": "chat.mm_processor_kwargs",
    "add_generation_prompt": "chat.add_generation_prompt",
    "continue_final_message": "chat.continue_final_message",
}
_KEYWORDS = {field: name for name, field in {**GENERATE_FIELDS, **STREAM_FIELDS, **CHAT_FIELDS}.items()}
_KEYWORDS["chat.required_tool"] = "tool_choice"


def keyword_of(field: str) -> str:
    """Return the option for a request field such as `stop.stop_strings`; others unchanged."""
    section, _, rest = field.partition(".")
    if section in ("sampling", "stop", "output", "stream", "chat") and rest:
        return _KEYWORDS.get(field, rest)
    return _KEYWORDS.get(section, {"text": "prompt", "token_ids": "prompt", "chat": "messages"}.get(section, field))
