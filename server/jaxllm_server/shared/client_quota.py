"""Clients, distinguished by their API key or, without keys, by their address.

Each may have so many sequences under way, and each that has a key has a prefix cache of its own. Of gRPC, connections
are bounded as well. Knows no protocol.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from jaxllm.errors import OverloadedError


def client_of(key: str | None, host: str | None) -> str:
    """Name a client: by the name of its key, else by its address; "" for clients without either, as on a Unix socket.

    This machine is one client, and so is each IPv6 network of /64, which is what a host is given to choose from.
    """
    if key is not None or not host:
        return key or ""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_loopback:
        return "loopback"
    return str(address if address.version == 4 else ipaddress.ip_network((address, 64), strict=False))


def host_of_peer(peer: str) -> str | None:
    """Return the address in what gRPC calls a peer: "ipv4:127.0.0.1:1234", "ipv6:[::1]:1234" ("%5B::1%5D"), "unix:"."""
    family, _, rest = peer.partition(":")
    return rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "") if family in ("ipv4", "ipv6") else None


class Shares:
    """How many sequences each client has under way, on both front ends together, and that it is not too many."""

    def __init__(self, most: int | None) -> None:
        self._most = most  # None: as many as there is room for
        self._held: Counter[str] = Counter()

    def check(self, client: str, num_sequences: int = 1) -> None:
        """Refuse what would be more than a client's share; OverloadedError."""
        held = self._held[client]  # a Counter: to look at a name does not add it
        if self._most is not None and held + num_sequences > self._most:
            raise OverloadedError(f"This client has {held} of {self._most} sequences under way.", retry_after=1.0)

    @contextmanager
    def place(self, client: str, num_sequences: int) -> Iterator[None]:
        """Count a call's sequences as its client's while the body runs."""
        self.check(client, num_sequences)
        self._held[client] += num_sequences
        try:
            yield
        finally:
            self._held[client] -= num_sequences
            if not self._held[client]:
                del self._held[client]  # or every address that ever called would be remembered


class Places:
    """How many calls are under way, on all connections of gRPC together and on each, and that it is not too many."""

    def __init__(self, name: str, most: int, share: int) -> None:
        self._name = name  # of such calls, for the error
        self._most = most
        self._share = share  # of one connection
        self._num = 0
        self._held: Counter[str] = Counter()

    @contextmanager
    def place(self, peer: str) -> Iterator[None]:
        """Hold a place for a connection's call while the body runs; OverloadedError where there is none."""
        if self._num >= self._most:
            raise OverloadedError(f"The server is answering {self._most} {self._name} already.", retry_after=1.0)
        is_shared = peer.startswith("unix:")  # all clients of a Unix socket have one name
        if self._held[peer] >= self._share and not is_shared:
            raise OverloadedError(f"This connection has {self._share} {self._name} already.", retry_after=1.0)
        self._num += 1
        self._held[peer] += 1
        try:
            yield
        finally:
            self._num -= 1
            self._held[peer] -= 1
            if not self._held[peer]:
                del self._held[peer]
