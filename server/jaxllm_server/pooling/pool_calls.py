"""Requests and results of pooling, for all protocols."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxllm.pooling_params import PoolingTask


@dataclass(frozen=True, kw_only=True)
class PoolCall:
    """A client's pooling request, unchecked; each input gets one result."""

    client: str = ""
    model: str = ""  # "": the served model
    task: PoolingTask | None = None  # None: the model's first
    inputs: Sequence[str | Sequence[int]]
    pairs: Sequence[str] | None = None  # for "score": the second texts
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "right"  # "left" keeps the last tokens; not for pairs
    add_special_tokens: bool = True
    request_id: str | None = None  # unique among unfinished requests
    client_id: str | None = None  # X-Request-Id; may repeat
    priority: int = 0
    cache_salt: str | None = None


@dataclass(slots=True)
class PoolResult:
    """An input's or pair's result."""

    index: int
    values: np.ndarray  # float32[W]: an embedding, a number per label, or a score
    prompt_tokens: int
