"""The options of the client's calls, and the fields of the API that they fill.

Names of options are those of `SamplingParams` where the thing is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from jaxllm.client.sampling_options import SamplingOptions
from jaxllm.sampling_fields import GRPC, names_in
from jaxllm.sampling_params import SamplingParams


class GenerateOptions(SamplingOptions, total=False):
    """The options of a call besides its prompt; None, like absence, leaves it to the model's defaults."""

    time_limit: float | None  # seconds after which what there is is returned; `timeout` instead fails the call
    return_token_ids: bool | None  # False saves their bytes
    return_prompt_token_ids: bool | None
    logprob_texts: bool | None  # with the text of each; on unless False where there are any log-probabilities
    include_reasoning: bool | None
    # A beam search of width n, with "length_penalty" and "early_stopping" (True, False or "never"); {}: as they are.
    beam_search: Mapping[str, Any] | None
    model: str | None
    adapter: str | None
    request_id: str | None  # unique among the server's requests; what `abort` takes
    priority: int | None  # lower goes first
    cache_salt: str | None
    add_special_tokens: bool | None  # of a text prompt


class StreamOptions(GenerateOptions, total=False):
    """What only a stream may say."""

    stream_interval: int | None  # tokens that the server gathers for one delta
    usage_every_message: bool | None  # keep the stream's `usage` up to date on the way


class ChatOptions(TypedDict, total=False):
    """What only a conversation may say."""

    tools: Sequence[Mapping[str, Any]] | None  # in OpenAI's form
    # "required": at least one call of any tool; or {"type": "function", "function": {"name": …}}: one of that tool.
    tool_choice: Literal["none", "auto", "required"] | Mapping[str, Any] | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


class ChatGenerateOptions(GenerateOptions, ChatOptions, total=False):
    """The options of `chat`."""


class ChatStreamOptions(StreamOptions, ChatOptions, total=False):
    """The options of `stream_chat`."""


class _PoolOptions(TypedDict, total=False):
    model: str | None
    priority: int | None  # lower goes first
    truncate_prompt_tokens: int | None  # keep this many, the first ones; -1: as many as the model holds


class StreamEmbedOptions(_PoolOptions, total=False):
    """What holds for all prompts of `stream_embed`; None, like absence, leaves it to the model. Names are fields."""

    dimensions: int | None  # leading numbers to keep, where the model allows it
    normalize: bool | None  # scale to length 1
    add_special_tokens: bool | None  # of text prompts


class EmbedOptions(StreamEmbedOptions, total=False):
    """The options of `embed`."""

    request_id: str | None  # unique among the server's requests; what `abort` takes


class ScoreOptions(_PoolOptions, total=False):
    """The options of `score`."""

    use_activation: bool | None  # False: a classifier's own numbers, not probabilities
    request_id: str | None


class ClassifyOptions(ScoreOptions, total=False):
    """The options of `classify`."""

    add_special_tokens: bool | None


# Keyword to field of GenerateRequest: those of SamplingParams without those of streams, then others.
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
    "add_generation_prompt": "chat.add_generation_prompt",
    "continue_final_message": "chat.continue_final_message",
}
_KEYWORDS = {field: name for name, field in {**GENERATE_FIELDS, **STREAM_FIELDS, **CHAT_FIELDS}.items()}
_KEYWORDS["chat.required_tool"] = "tool_choice"


def keyword_of(field: str) -> str:
    """Name the option that fills `field` of a request, as in `stop.stop_strings`; other fields by themselves."""
    section, _, rest = field.partition(".")
    if section in ("sampling", "stop", "output", "stream", "chat") and rest:
        return _KEYWORDS.get(field, rest)
    return _KEYWORDS.get(section, {"text": "prompt", "token_ids": "prompt", "chat": "messages"}.get(section, field))
