"""The client's options that are fields of `SamplingParams`. Made by proto/generate.py of declarations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from jaxllm.sampling_params import RepetitionDetectionParams
from jaxllm.structured_outputs_params import StructuredOutputsParams


class SamplingOptions(TypedDict, total=False):
    """Fields of `SamplingParams`, which has their meaning; None, like absence, leaves one to the model's defaults."""

    n: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    max_tokens: int | None
    min_tokens: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    logprob_token_ids: Sequence[int] | None
    skip_special_tokens: bool | None
    spaces_between_special_tokens: bool | None
    include_stop_str_in_output: bool | None
    detokenize: bool | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    extra_args: Mapping[str, Sequence[float] | float] | None
    repetition_detection: RepetitionDetectionParams | Mapping[str, int] | None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | type | None
    truncate_prompt_tokens: int | None
    skip_reading_prefix_cache: bool | None
