"""A fleet of engines that serve one model, with prefix-aware routing."""

from jaxllm.fleet.choose import choose, digests_of
from jaxllm.fleet.prefix_index import PrefixIndex

__all__ = ["PrefixIndex", "choose", "digests_of"]
