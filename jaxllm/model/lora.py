"""LoRA adapters of the decoder, declared and sharded like its weights.

Adds B·A·x to W·x (Hu et al. 2021). A concatenates the rows for all parts of W; B is separate per part and includes the
scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

import jax
from jax.typing import DTypeLike

from jaxllm import combinations
from jaxllm.model import decoder, quantized, stages
from jaxllm.model.parameters import Weight
from jaxllm.model.sharding import Layout
from jaxllm.model.spec import Spec

Leaf = TypeVar("Leaf")

PRODUCTS = ("qkv", "out", "up", "down")


class Pair(NamedTuple, Generic[Leaf]):
    """The factors for one product, padded to rank r."""

    a: Leaf  # [parts · r, in]
    b: tuple[Leaf, ...]  # per part [rows with copies, r]


Adapter = tuple[Mapping[str, Pair[Leaf]], ...]


def check_supported(spec: Spec) -> None:
    if spec.latent is not None:
        raise combinations.refusal("enable_lora", combinations.LATENT)


def declare(spec: Spec, layout: Layout, rank: int) -> Adapter[Weight]:
    return tuple(
        {name: _pair(layer[name], rank) for name in PRODUCTS if name in layer}
        for layer in decoder.declare(spec, layout).layers
    )


def _pair(weight: Weight, rank: int) -> Pair[Weight]:
    columns, (rows_axis, columns_axis) = weight.shape[1], weight.axes
    return Pair(
        Weight((len(weight.parts) * rank, columns), (None, columns_axis), (), "zeros"),
        tuple(Weight((part.rows * part.copies, rank), (rows_axis, None), (part,), "zeros") for part in weight.parts),
    )


def abstract(spec: Spec, layout: Layout, dtype: DTypeLike, rank: int) -> Adapter[jax.ShapeDtypeStruct]:
    layers = jax.tree.map(lambda weight: quantized.describe(weight, layout, dtype), declare(spec, layout, rank))
    return stages.describe(layers, layout)
