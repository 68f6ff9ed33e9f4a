"""Checks of prompts to pool, and their conversion. Thread-safe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxllm.beam_search_params import BeamSearchParams
from jaxllm.engine.model_info import ModelInfo
from jaxllm.engine.prompts import Prompt, checked_ids, parts_of
from jaxllm.errors import UserError, too_long
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling.sampler import ROW_WIDTH
from jaxllm.sampling_params import RequestOutputKind, SamplingParams

# Stored for requests that sample nothing.
SAMPLING = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
ROW = np.zeros(ROW_WIDTH, np.int32)


class PooledPrompt(NamedTuple):
    """A validated prompt."""

    text: str | None
    token_ids: tuple[int, ...]
    token_types: tuple[int, ...] | None  # None: zeros
    salt: bytes


def check_kind(params: Any, model: ModelInfo, name: str) -> None:
    if model.pooler is None and isinstance(params, PoolingParams):
        raise UserError(f"{name} generates text; it has no task {params.task or 'embed'!r}.", "model")
    if model.pooler is not None and (params is None or isinstance(params, SamplingParams | BeamSearchParams)):
        raise UserError(f"{name} generates no text; it can {' and '.join(model.tasks)}.", "model")


def read(prompt: Prompt, params: PoolingParams, model: ModelInfo) -> PooledPrompt:
    """Check a prompt and its parameters; raise UserError if invalid."""
    _check_params(params, model)
    text, ids, salt = parts_of(prompt, also="token_type_ids")
    longest, kept = model.max_model_len, params.truncate_prompt_tokens
    if kept is not None and kept > longest:
        message = f"truncate_prompt_tokens value ({kept}) is greater than max_model_len ({longest})."
        raise UserError(f"{message} Please select a smaller truncation size.", "truncate_prompt_tokens", kept)
    most = longest if kept == -1 else kept
    if ids is None:
        assert text is not None
        if most is None:
            model.tokenizer.check_length(text, longest)
            ids = model.tokenizer.encode(text)
        else:
            ids = model.tokenizer.encode_first(text, most)
    ids = ids[:most]
    if not len(ids):
        raise UserError("A prompt cannot be empty.", "prompt")
    if len(ids) > longest:
        raise too_long(longest, len(ids), None)
    checked = checked_ids(ids, model.vocab_size)
    types = prompt.get("token_type_ids") if isinstance(prompt, Mapping) else None
    return PooledPrompt(text, tuple(checked), None if types is None else _types(types, most, len(ids), model), salt)


def _check_params(params: PoolingParams, model: ModelInfo) -> None:
    pooler = model.pooler
    assert pooler is not None
    if params.task is not None and params.task not in model.tasks:
        raise UserError(f"This model has no task {params.task!r}; it can {' and '.join(model.tasks)}.", "task")
    dimensions = params.dimensions
    if dimensions is None:
        return
    if pooler.labels or pooler.dimensions is None:
        raise UserError("This model's embeddings cannot be cut: leave dimensions out.", "dimensions", dimensions)
    if pooler.dimensions and dimensions not in pooler.dimensions:
        known = ", ".join(map(str, pooler.dimensions))
        raise UserError(f"dimensions must be one of {known}, got {dimensions}.", "dimensions", dimensions)
    if dimensions > model.pooled_size:
        message = f"dimensions must be at most {model.pooled_size}, got {dimensions}."
        raise UserError(message, "dimensions", dimensions)


def _types(types: Any, most: int | None, count: int, model: ModelInfo) -> tuple[int, ...]:
    if not isinstance(types, Sequence) or isinstance(types, str | bytes):
        raise UserError(f"token_type_ids must be a list of integers, not {type(types).__name__}.", "token_type_ids")
    kept = tuple(types[:most])
    if len(kept) != count:
        raise UserError(f"token_type_ids must be as many as the tokens, {count}, not {len(kept)}.", "token_type_ids")
    if not model.num_token_types:
        raise UserError("This model has no token types; leave token_type_ids out.", "token_type_ids")
    if any(type(each) is not int or not 0 <= each < model.num_token_types for each in kept):
        message = f"token_type_ids must be integers from 0 to {model.num_token_types - 1}."
        raise UserError(message, "token_type_ids")
    return kept
