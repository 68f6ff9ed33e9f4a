"""Listening sockets of a host name with several addresses."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from jaxllm.errors import UserError
from jaxllm_server.access.sockets import listen
from tests.support.host_names import resolve, with_ipv6

NAMES = ("gRPC", "grpc_port", "grpc_uds")
FOREIGN = "192.0.2.1"  # an address of no machine (RFC 5737)


@with_ipv6
def test_all_addresses_of_a_name_have_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, "::1", "127.0.0.1", "127.0.0.1", FOREIGN)
    listening = listen("a.name", 0, None, NAMES)
    assert [own.getsockname()[0] for own in listening] == ["::1", "127.0.0.1"]
    (port,) = {own.getsockname()[1] for own in listening}
    monkeypatch.undo()
    for own, address in zip(listening, ("::1", "127.0.0.1"), strict=True):
        with closing(own), socket.create_connection((address, port)), closing(own.accept()[0]) as taken:
            assert taken.getsockname()[:2] == (address, port)


@with_ipv6
def test_a_port_that_is_taken_at_one_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as other:
        port = other.getsockname()[1]
        resolve(monkeypatch, "127.0.0.1", "::1")
        with pytest.raises(UserError, match=rf"gRPC cannot listen on a\.name:{port}: .* --grpc-port\."):
            listen("a.name", port, None, NAMES)
        monkeypatch.undo()
        with socket.create_server(("127.0.0.1", port)):  # the port is still free after the refusal
            pass


def test_a_name_without_an_address_of_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve(monkeypatch, FOREIGN)
    with pytest.raises(UserError, match=r"gRPC cannot listen on a\.name:0: "):
        listen("a.name", 0, None, NAMES)
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"gRPC cannot listen on no\.such\.host\.invalid:0: "):
        listen("no.such.host.invalid", 0, None, NAMES)
