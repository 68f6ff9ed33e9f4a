"""Arguments common to attention implementations."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
from jax import Array

static = partial(field, metadata={"static": True})


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True, kw_only=True)
class AttentionArgs:
    """See `pallas_kernels.paged_decode`. The last six are static."""

    k_cache: Array  # [N, K, P, C]
    v_cache: Array | None  # [N, K, P, V]; None: values are prefixes of keys
    tables: Array  # i32[B or Y, M]
    sinks: Array | None = None  # [H]
    k_scales: Array | None = None  # [N, K, P]
    v_scales: Array | None = None
    bias: Array | None = None  # [H, L], by distance
    last_seen: Array | None = None  # i32[T], see `paged_prefill`; only that operation has it
    scale: float = static()
    window: int | None = static(default=None)
    softcap: float | None = static(default=None)
    value_size: int | None = static(default=None)
    float8: str | None = static(default=None)
    batch_invariant: bool = static(default=False)

    @property
    def kv_heads(self) -> int:
        return self.k_cache.shape[1]

    @property
    def value_width(self) -> int:
        width = self.value_size if self.v_cache is None else self.v_cache.shape[3]
        assert width is not None
        return width


class Tiles(NamedTuple):
    """Runs of consecutive queries of one sequence, int32[Y]."""

    start: Array  # in all
    length: Array
    position: Array  # in its sequence
