"""Chooses the replica for a request. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxllm.fleet.prefix_index import PrefixIndex
from jaxllm.scheduler import block_pool

# Overloaded: the load exceeds OVERLOAD times the mean (then large loads stay below 1.2 times, docs/benchmarks.md) and
# the mean by more than WORTH times the request's cached tokens: recomputing a token costs more than one more token of
# load. With WORTH = 4, one of 64 replicas reached 1.22 times the mean.
OVERLOAD = 1.1
WORTH = 3


def digests_of(token_ids: Sequence[int], salt: bytes, block_size: int, *, adapter: bytes = b"") -> list[bytes]:
    """Return the digests of a prompt's full blocks, as engines compute them; `adapter` is an adapter's."""
    tokens = np.asarray(token_ids, "<i4").tobytes()
    return block_pool.chained(block_pool.content_root(salt=salt, content=adapter), tokens, block_size)


def choose(digests: Sequence[bytes], loads: Mapping[int, int], index: PrefixIndex) -> int:
    """Return the replica with the longest cached prefix among those not overloaded.

    Ties select the lowest load, then the lowest number. `loads`: tokens of live requests per available replica.
    """
    if not loads:
        raise ValueError("no replica is available")
    mean = sum(loads.values()) / len(loads)
    matches = index.matches(digests)

    def is_able(replica: int) -> bool:
        worth = WORTH * index.block_size * matches.get(replica, 0)
        return loads[replica] <= max(OVERLOAD * mean, mean + worth)

    return min(filter(is_able, loads), key=lambda replica: (-matches.get(replica, 0), loads[replica], replica))
