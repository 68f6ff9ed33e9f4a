"""What every implementation of attention gets beside its queries: the cache, its block tables, the scores' settings."""

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
    """See `pallas_kernels.paged_decode` for what each means. The last six are static."""

    k_cache: Array  # [N, K, P, C]
    v_cache: Array | None  # [N, K, P, V]; None: values are the first `value_size` coordinates of keys
    tables: Array  # i32[B or Y, M]
    sinks: Array | None = None  # [H]
    k_scales: Array | None = None  # [N, K, P], of a cache with scales
    v_scales: Array | None = None
    scale: float = static()
    window: int | None = static(default=None)
    softcap: float | None = static(default=None)
    value_size: int | None = static(default=None)
    float8: str | None = static(default=None)
    batch_invariant: bool = static(default=False)

    @property
    def kv_heads(self) -> int:
        """Heads of keys, K."""
        return self.k_cache.shape[1]

    @property
    def value_width(self) -> int:
        """Coordinates of a value, V."""
        width = self.value_size if self.v_cache is None else self.v_cache.shape[3]
        assert width is not None
        return width


class Tiles(NamedTuple):
    """Runs of consecutive queries, each of one sequence: int32[Y] three times."""

    start: Array  # of the first query among all
    length: Array
    position: Array  # of the first query in its sequence
