"""`Accepted`: a request while it is checked, and until its sequences are made."""

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
    """A request. `InputProcessor.accept` and features fill it in; nothing changes it afterwards."""

    request_id: str  # the caller's
    internal_id: str  # the engine's, unique among all that run
    name: str  # for logs and recordings
    given: Prompt  # as the caller gave it
    asked: RequestParams | None  # the parameters that the caller gave
    options: Mapping[str, Any]  # further arguments, by the names in `Feature.options`
    priority: int
    language: Language
    params: SamplingParams  # of each of its sequences
    packed: SamplingParams | None = None  # as the device gets them, where that differs
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] = ()
    salt: bytes = b""
    content: bytes = b""  # a digest of whatever else the cached blocks of its prompt depend on
    limit: int = 0  # the most tokens that prompt and output can have together
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences
    num_sequences: int = 1
    sequence_type: type[Sequence] = Sequence
    states: dict[str, Any] = field(default_factory=dict)  # prepared by features, by their names
