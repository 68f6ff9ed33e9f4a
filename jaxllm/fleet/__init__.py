"""A fleet: engines that serve one model, and which of them a request goes to. Pure: knows no clock and no connection.

What a front end uses, be it of one machine, of Ray Serve or of its own; the rest of jaxllm does not know it.
"""

from jaxllm.fleet.choose import choose, digests_of
from jaxllm.fleet.prefix_index import PrefixIndex

__all__ = ["PrefixIndex", "choose", "digests_of"]
