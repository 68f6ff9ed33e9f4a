"""The data that all programs of an engine share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import jax

import pallas_kernels
from jaxllm.model.decoder import Params, RowWeights
from jaxllm.model.head import Head
from jaxllm.model.sharding import Layout
from jaxllm.model.spec import Spec
from jaxllm.sampling.sampler import Extras, Processor
from jaxllm.setup.draft_setup import Drafting
from jaxllm.setup.kv_cache import Geometry
from pallas_kernels import Choice

Leaves = tuple[jax.Array, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """The data that programs share."""

    spec: Spec
    geometry: Geometry
    num_logprobs: int  # top tokens that a step returns
    extras: Extras
    processors: Sequence[Processor]
    layout: Layout
    params: Params[jax.ShapeDtypeStruct]
    state: Any  # describes a DeviceState or PoolState
    kernels: Mapping[str, Choice]
    head: Head | None = None
    adapters: RowWeights | None = None
    drafting: Drafting | None = None  # of an engine that verifies drafts
    encoder: Spec | None = None  # of an encoder-decoder model; programs are kept by these fields
    first_timestamp: int | None = None  # of a speech model, see timestamps.py
    num_ticks: int = 1  # of a step, see ticks.py


@contextmanager
def products_of(model: StepModel) -> Iterator[None]:
    """Trace products with the chosen kernels."""
    ways = {
        "linear": pallas_kernels.linear_by,
        "fused_topk": pallas_kernels.fused_topk_by,
        "fused_experts": pallas_kernels.fused_experts_by,
    }
    with ExitStack() as entered:
        for operation, by in ways.items():
            if model.kernels[operation].name != "xla":
                entered.enter_context(by(model.kernels[operation]))
        yield
