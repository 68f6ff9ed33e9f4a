"""Requests and results of embedding, classifying and scoring, for both protocols. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxllm.pooling_params import PoolingTask


@dataclass(frozen=True, kw_only=True)
class PoolCall:
    """A client's request, not validated; each of `inputs` gets a result."""

    client: str = ""  # its name by `client_quota.client_of`
    model: str = ""  # "": the served model
    task: PoolingTask | None = None  # None: the model's first task
    inputs: Sequence[str | Sequence[int]]  # texts, or token ids
    pairs: Sequence[str] | None = None  # for "score": the second text of each input, a text
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "right"  # side that truncation removes; "left" keeps the last tokens, except in pairs
    add_special_tokens: bool = True
    request_id: str | None = None  # unique among running requests, per client if keys distinguish them
    client_id: str | None = None  # X-Request-Id, for logs and recordings; not unique
    priority: int = 0
    cache_salt: str | None = None


@dataclass(slots=True)
class PoolResult:
    """The result of an input or pair."""

    index: int  # of the input
    values: np.ndarray  # float32[W]: embedding, value per label, or one score
    prompt_tokens: int
