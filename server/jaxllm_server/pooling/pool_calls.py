"""What both protocols share of embedding, classifying and scoring: a `PoolCall` is asked, `PoolResult`s come.

Plain data, so that the mapping of messages stays pure. Knows no engine and no protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxllm.pooling_params import PoolingTask


@dataclass(frozen=True, kw_only=True)
class PoolCall:
    """What a client asks for, as its protocol said it; unchecked. There is a result for each of `inputs`."""

    client: str = ""  # its name by `client_quota.client_of`
    model: str = ""  # "" is the served one
    task: PoolingTask | None = None  # None: the first that the model can do
    inputs: Sequence[str | Sequence[int]]  # texts, or token ids
    pairs: Sequence[str] | None = None  # of "score": a second text for each of `inputs`, which are texts then
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "right"  # where that cuts; "left" keeps the last ones, of texts that are not compared
    add_special_tokens: bool = True
    request_id: str | None = None  # unique among living requests, of each client if keys distinguish them
    client_id: str | None = None  # X-Request-Id, which may come twice; it goes into logs and recordings
    priority: int = 0
    cache_salt: str | None = None


@dataclass(slots=True)
class PoolResult:
    """What became of one input, or of one pair."""

    index: int  # of the input
    values: np.ndarray  # float32[W]: an embedding, a number for each label, or one score
    prompt_tokens: int
