"""Host names that resolve to chosen addresses."""

from __future__ import annotations

import socket
from typing import Any

import pytest


def has_ipv6() -> bool:
    """Whether this machine can listen on ::1."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


with_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")


def resolve(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    """Make every host name resolve to these addresses."""

    def getaddrinfo(host: Any, port: int, **_: Any) -> list[Any]:
        kinds = {True: (socket.AF_INET6, (0, 0)), False: (socket.AF_INET, ())}
        found = [(address, *kinds[":" in address]) for address in addresses]
        return [(family, socket.SOCK_STREAM, 6, "", (address, port, *scope)) for address, family, scope in found]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
