"""The device mesh (one axis, "tp") and where each logical axis of an array lies on it.

Knows neither weights nor models: they name their axes, this file says which of those are split.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.errors import UserError

AXIS = "tp"

# Megatron's division (Shoeybi et al. 2019): heads, the feed-forward's inner axis and the vocabulary are split, the
# residual stream is whole on every device. Two all-reduces a layer.
SPLIT_AXES = frozenset({"heads", "kv_heads", "ffn", "vocab"})
WHOLE_AXES = frozenset({"width", "head", "position", "expert", None})


def make_mesh(devices: Sequence[jax.Device], tensor_parallel_size: int) -> Mesh:  # pyright: ignore[reportInvalidTypeForm]
    """Lay the first `tensor_parallel_size` devices along the axis "tp"; fewer devices than that is a UserError."""
    if tensor_parallel_size > len(devices):
        more = f", or set XLA_FLAGS=--xla_force_host_platform_device_count={tensor_parallel_size} to split the CPU"
        raise UserError(
            f"tensor_parallel_size is {tensor_parallel_size} but JAX sees {len(devices)} device(s); "
            f"use at most {len(devices)}{more if devices[0].platform == 'cpu' else ''}.",
            "tensor_parallel_size",
        )
    return Mesh(np.asarray(devices[:tensor_parallel_size]), (AXIS,))


def partition(axes: tuple[str | None, ...]) -> PartitionSpec:
    """Translate logical axis names, one per dimension, into mesh axes; an unknown name is a KeyError."""
    for name in axes:
        if name not in SPLIT_AXES and name not in WHOLE_AXES:
            raise KeyError(f"{name!r} is not a logical axis")
    return PartitionSpec(*(AXIS if name in SPLIT_AXES else None for name in axes))


@functools.cache
def named(mesh: Mesh, axes: tuple[str | None, ...]) -> NamedSharding:
    """Build the sharding of an array whose dimensions are the logical `axes`; built once per mesh and axes."""
    return NamedSharding(mesh, partition(axes))


def replicated(mesh: Mesh) -> NamedSharding:
    """Build the sharding of an array that is whole on every device."""
    return named(mesh, ())
