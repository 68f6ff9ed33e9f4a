"""Poolers of embedding and classification models: selected hidden states, then dense layers of W outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from jaxllm.model import layers
from jaxllm.model.parameters import Part, Weight
from jaxllm.model.spec import Activation as Elementwise
from jaxllm.pooling_params import PoolingParams
from pallas_kernels.activations import activate

Pooling = Literal["cls", "last", "mean"]
Activation = Elementwise | Literal["tanh"]


@dataclass(frozen=True)
class Dense:
    """A dense layer, optionally with activation and layer norm. Stems are tensor name prefixes."""

    size: int
    bias: bool = True
    activation: Activation | None = None
    norm: bool = False
    norm_eps: float = 1e-5
    stem: str = ""
    norm_stem: str = ""


@dataclass(frozen=True)
class Pooler:
    """Pools a prompt's hidden states: "cls" takes the first token's, "last" the last's, "mean" averages all.

    "cls" takes the first token's, "last" the last's, "mean" averages all. Models without `labels` embed.
    """

    pooling: Pooling
    layers: tuple[Dense, ...] = ()
    labels: tuple[str, ...] = ()
    activation: Literal["softmax", "sigmoid", "none"] = "none"  # of a classifier, on the host
    normalize: bool = True  # default for requests
    dimensions: tuple[int, ...] | None = None  # see `Head.dimensions`

    def size(self, width: int) -> int:
        return self.layers[-1].size if self.layers else width

    @property
    def reads_last(self) -> bool:
        return self.pooling == "last"

    def declare(self, width: int) -> dict[str, Weight]:
        weights: dict[str, Weight] = {}
        for number, dense in enumerate(self.layers):
            name = f"pool_{number}"

            def vector(name: str, initial: Literal["zeros", "ones"], size: int = dense.size) -> dict[str, Weight]:
                return {name: Weight((size,), (None,), (Part(name, size),), initial, is_wide=True)}

            weights[name] = Weight((dense.size, width), (None, None), (Part(name, dense.size),), is_wide=True)
            weights |= vector(f"{name}_bias", "zeros") if dense.bias else {}
            weights |= vector(f"{name}_norm", "ones") if dense.norm else {}
            width = dense.size
        return weights

    def tensors(self) -> dict[str, str]:
        names: dict[str, str] = {}
        for number, dense in enumerate(self.layers):
            stems = {"": f"{dense.stem}.weight", "_bias": f"{dense.stem}.bias", "_norm": f"{dense.norm_stem}.weight"}
            names |= {f"pool_{number}{part}": tensor for part, tensor in stems.items()}
        return names


def apply(pooler: Pooler, top: Mapping[str, Any], pooled: Float[Array, "R D"]) -> Float[Array, "R W"]:
    x = pooled.astype(jnp.float32)
    for number, dense in enumerate(pooler.layers):
        name = f"pool_{number}"
        x = layers.linear(x, top[name], top.get(f"{name}_bias"))
        if dense.activation is not None:
            x = jnp.tanh(x) if dense.activation == "tanh" else activate(x, dense.activation)
        if dense.norm:
            x = layers.norm(x, top[f"{name}_norm"], None, "layer", dense.norm_eps)
    return x


def finish(pooler: Pooler, row: np.ndarray, params: PoolingParams) -> np.ndarray:
    """Return a prompt's result, float32[W]: cut and normalized, or probabilities."""
    if not pooler.labels:
        vector = row[: params.dimensions]
        if pooler.normalize if params.normalize is None else params.normalize:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)  # as in torch, zeros are preserved
        return vector.astype(np.float32)
    if params.use_activation is False or pooler.activation == "none":
        return row.astype(np.float32)
    wide = row.astype(np.float64)
    powers = np.exp(-wide) if pooler.activation == "sigmoid" else np.exp(wide - wide.max())
    return (1 / (1 + powers) if pooler.activation == "sigmoid" else powers / powers.sum()).astype(np.float32)
