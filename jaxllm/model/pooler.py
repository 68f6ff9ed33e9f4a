"""What stands behind the layers of a model that embeds or classifies: which hidden states, and products after them.

Pure; knows no family of models and no batch.

Letters: R rows, D width, W numbers of a result.
"""

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
    """A product behind the pooled vector, then perhaps an activation, then perhaps a layer norm.

    `stem` and `norm_stem` are what the names of their tensors begin with, in a folder of their own before a "/".
    """

    size: int  # numbers that come out
    bias: bool = True
    activation: Activation | None = None
    norm: bool = False
    norm_eps: float = 1e-5
    stem: str = ""
    norm_stem: str = ""


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


def declare(pooler: Pooler, width: int) -> dict[str, Weight]:
    """List the weights of the products; float32 and whole on every device, whatever the model's are."""
    weights: dict[str, Weight] = {}
    for number, dense in enumerate(pooler.layers):
        name = f"pool_{number}"

        def vector(name: str, initial: Literal["zeros", "ones"], size: int = dense.size) -> dict[str, Weight]:
            return {name: Weight((size,), (None,), (Part(name, size),), initial, is_wide=True)}

        weights[name] = Weight((dense.size, width), (None, None), (Part(name, dense.size),), is_wide=True)
        weights |= vector(f"{name}_bias", "zeros") if dense.bias else {}
        weights |= vector(f"{name}_norm", "ones") if dense.norm else {}
        width = dense.size
    return weights


def tensors(pooler: Pooler) -> dict[str, str]:
    """Name the tensor of each weight."""
    names: dict[str, str] = {}
    for number, dense in enumerate(pooler.layers):
        stems = {"": f"{dense.stem}.weight", "_bias": f"{dense.stem}.bias", "_norm": f"{dense.norm_stem}.weight"}
        names |= {f"pool_{number}{part}": tensor for part, tensor in stems.items()}
    return names


def apply(pooler: Pooler, top: Mapping[str, Any], pooled: Float[Array, "R D"]) -> Float[Array, "R W"]:
    """Compute the results of pooled hidden states [R, D] with the weights `top`: [R, W] float32."""
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
