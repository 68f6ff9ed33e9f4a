"""Which replica a request goes to, and what that depends on. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxllm.fleet.prefix_index import PrefixIndex
from jaxllm.scheduler import block_pool

# A replica gets requests for its prefixes while its load is at most so many times the mean: the most loaded then stays
# below 1.2 times the mean where loads are large (docs/benchmarks.md) …
OVERLOAD = 1.1
# … or, where they are small, no more above the mean than so many times what the request finds there: a token of a live
# request delays others less than one that is computed again. With 4, 64 replicas were at 1.22 times the mean.
WORTH = 3


def digests_of(token_ids: Sequence[int], salt: bytes, block_size: int, *, adapter: bytes = b"") -> list[bytes]:
    """Return the digests of a prompt's full blocks, as every engine computes them; `adapter` is an adapter's digest."""
    tokens = np.asarray(token_ids, "<i4").tobytes()
    return block_pool.chained(block_pool.content_root(salt=salt, content=adapter), tokens, block_size)


def choose(digests: Sequence[bytes], loads: Mapping[int, int], index: PrefixIndex) -> int:
    """Return the replica for a request: of those that are not over-loaded, the one with most of its prefix's blocks;
    of several, and where none has any, the least loaded; of equals, the lowest number.

    `digests` are those of its prompt, see `digests_of`; `loads` are the tokens of live requests, prompts and what was
    generated, of each replica that takes work now. Over-loaded is who has both more than `OVERLOAD` times the mean of
    `loads`, and more than the mean and `WORTH` times the tokens that it has of the prompt; never the least loaded.

    Raises:
        ValueError: if no replica takes work.
    """
    if not loads:
        raise ValueError("no replica takes work: there is none to choose")
    mean = sum(loads.values()) / len(loads)
    matches = index.matches(digests)

    def is_able(replica: int) -> bool:
        worth = WORTH * index.block_size * matches.get(replica, 0)
        return loads[replica] <= max(OVERLOAD * mean, mean + worth)

    return min(filter(is_able, loads), key=lambda replica: (-matches.get(replica, 0), loads[replica], replica))
