"""Determines a request's client from X-Forwarded-For. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from jaxllm.errors import UserError

_MOST_PROXIES = 8
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Proxies:
    """The trusted proxies: addresses, networks, or "*" for every peer; UserError for other values."""

    def __init__(self, trusted: Sequence[str]) -> None:
        self._trusts_all = "*" in trusted
        self._networks = [_network(each) for each in trusted if each != "*"]

    def client_of(self, peer: str, forwarded: Sequence[str]) -> str:
        """Return the client's address: the peer's, unless that is a trusted proxy.

        Each proxy appends its peer's address; entries left of the last untrusted one are unreliable (RFC 7239, section
        8.1).

        >>> Proxies(["10.0.0.0/8"]).client_of("10.0.0.1", ["1.1.1.1, 8.8.8.8, 10.0.0.2"])
        '8.8.8.8'
        """
        client, trusted = peer, self._trusts_all or self._trusts(peer)
        for _, written in zip(range(_MOST_PROXIES), reversed(",".join(forwarded).split(",")), strict=False):
            address = _address(written.strip())
            if not trusted or address is None:
                break
            client, trusted = str(address), self._trusts(written.strip())
        return client

    def _trusts(self, written: str) -> bool:
        address = _address(written)
        return address is not None and any(address in network for network in self._networks)


def _address(written: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    if written.startswith("["):
        written = written[1:].partition("]")[0]
    elif written.count(":") == 1:
        written = written.partition(":")[0]
    try:
        found = ipaddress.ip_address(written)
    except ValueError:
        return None
    return getattr(found, "ipv4_mapped", None) or found


def _network(text: str) -> _Network:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError as error:
        message = f"forwarded_allow_ips must hold addresses, networks as 10.0.0.0/8, or *; got {text!r}."
        raise UserError(message, "forwarded_allow_ips") from error
