"""What stands behind the layers of a model that embeds or classifies: which hidden states, and products after them.

Pure; knows no family of models and no batch.

Letters: R rows, D width, W numbers of a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxllm.pooling_params import PoolingParams

Pooling = Literal["cls", "last", "mean"]
Activation = Literal["tanh", "relu", "gelu", "silu"]


@dataclass(frozen=True)
class Dense:
    """A product behind the pooled vector, then perhaps an activation, then perhaps a layer norm."""

    size: int  # numbers that come out
    bias: bool = True
    activation: Activation | None = None
    norm: bool = False
    norm_eps: float = 1e-5


@dataclass(frozen=True)
class Pooler:
    """How a prompt's hidden states become one vector.

    "cls" is the first token's, "last" the last one's, "mean" that of all. `labels` are a classifier's, in the order of
    its numbers; a model without labels embeds.
    """

    pooling: Pooling
    layers: tuple[Dense, ...] = ()
    labels: tuple[str, ...] = ()
    activation: Literal["softmax", "sigmoid", "none"] = "none"  # of a classifier's numbers, on the host
    normalize: bool = True  # embeddings have length 1 unless a request says otherwise, on the host
    dimensions: tuple[int, ...] | None = None  # lengths an embedding may be cut to; (): any; None: it may not be cut

    def size(self, width: int) -> int:
        """Return how many numbers a result has, W, where the hidden states have `width`."""
        return self.layers[-1].size if self.layers else width


def finish(pooler: Pooler, row: np.ndarray, params: PoolingParams) -> np.ndarray:
    """Make a prompt's result of what the device gave, float32[W]: cut and scaled to length 1, or probabilities."""
    if not pooler.labels:
        vector = row[: params.dimensions]
        if pooler.normalize if params.normalize is None else params.normalize:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)  # as torch's, which leaves zeros
        return vector.astype(np.float32)
    if params.use_activation is False or pooler.activation == "none":
        return row.astype(np.float32)
    wide = row.astype(np.float64)
    powers = np.exp(-wide) if pooler.activation == "sigmoid" else np.exp(wide - wide.max())
    return (1 / (1 + powers) if pooler.activation == "sigmoid" else powers / powers.sum()).astype(np.float32)
