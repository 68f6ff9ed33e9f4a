"""provisional"""
from __future__ import annotations
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar
import jax
from jaxllm.errors import UserError
from jaxllm.model.decoder import declare as declare_decoder
from jaxllm.model.sharding import named

Leaf = TypeVar("Leaf")
PRODUCTS = ("qkv", "out", "up", "down")


class Pair(NamedTuple, Generic[Leaf]):
    a: Leaf
    b: Leaf


Adapter = tuple[Mapping[str, Pair[Leaf]], ...]


def check_supported(spec):
    if spec.latent is not None:
        raise UserError("enable_lora is not supported for models with latent attention; leave it out.", "enable_lora")


def abstract(spec, mesh, dtype, rank):
    out = []
    for weights in declare_decoder(spec, mesh.devices.size).layers:
        own = {}
        for name in PRODUCTS:
            if name in weights:
                w = weights[name]
                own[name] = Pair(
                    jax.ShapeDtypeStruct((len(w.parts) * rank, w.shape[1]), dtype, sharding=named(mesh, (None, w.axes[1]))),
                    jax.ShapeDtypeStruct((w.shape[0], rank), dtype, sharding=named(mesh, (w.axes[0], None))),
                )
        out.append(own)
    return tuple(out)
