"""What a LoRA adapter of a decoder is: of each layer and product two thin matrices, declared as the weights are.

An adapter adds B·A·x to a product W·x (Hu et al. 2021). Where W is made of several parts, A has the rows of each
part's own A one behind the other, and each part has a B of its own. Both are split among devices as W is, so that no
collective is added. B is stored with the adapter's scale in it. Pure; knows no file and no request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

import jax
from jax.typing import DTypeLike

from jaxllm import combinations
from jaxllm.model import decoder, quantized
from jaxllm.model.parameters import Weight
from jaxllm.model.sharding import Layout
from jaxllm.model.spec import Spec

Leaf = TypeVar("Leaf")

PRODUCTS = ("qkv", "out", "up", "down")  # those of a layer that can be adapted, where the layer has them


class Pair(NamedTuple, Generic[Leaf]):
    """The two factors that are added to one product; r is the rank that they are padded to."""

    a: Leaf  # [parts · r, in]: r rows for each part of the weight
    b: tuple[Leaf, ...]  # of each part [its rows, r], copies of rows included


# A pair for each adapted product of each layer.
Adapter = tuple[Mapping[str, Pair[Leaf]], ...]


def check_supported(spec: Spec) -> None:
    """Refuse a decoder whose layers cannot have adapters."""
    if spec.latent is not None:
        raise combinations.refusal("enable_lora", combinations.LATENT)


def declare(spec: Spec, layout: Layout, rank: int) -> Adapter[Weight]:
    """List the matrices of an adapter of so high a rank."""
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
    """Describe the arrays of an adapter, shapes, type and shardings, with nothing allocated."""
    return jax.tree.map(lambda weight: quantized.describe(weight, layout, dtype), declare(spec, layout, rank))
