"""`Accepted`: a validated request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxllm.engine.language import Language
from jaxllm.engine.prompts import Prompt
from jaxllm.engine.sequence import Sequence
from jaxllm.request_params import RequestParams
from jaxllm.sampling_params import SamplingParams


@dataclass(slots=True, kw_only=True)
class Accepted:
    """Filled in by `InputProcessor.accept` and features, then constant."""

    request_id: str
    internal_id: str  # unique among running requests
    name: str
    given: Prompt
    asked: RequestParams | None
    options: Mapping[str, Any]  # named in `Feature.options`
    priority: int
    language: Language
    params: SamplingParams
    packed: SamplingParams | None = None  # for the device, if different
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] = ()
    salt: bytes = b""
    content: bytes = b""  # digest of further inputs of its blocks
    limit: int = 0  # most tokens with the prompt
    bad_words: tuple[tuple[int, ...], ...] = ()
    num_sequences: int = 1
    sequence_type: type[Sequence] = Sequence
    states: dict[str, Any] = field(default_factory=dict)  # of features, by name
