"""`@grpc/grpc-js`: JavaScript stubs of proto/."""

from __future__ import annotations

import pytest

from tests.clients.common import Site, node


@pytest.fixture(scope="module")
def told(site: Site) -> dict[str, object]:
    return node("grpc.js", site.grpc, "Once upon a time")


def test_chat(told: dict[str, object]) -> None:
    """`Generate`; invalid requests are INVALID_ARGUMENT."""
    assert told["unary"] and told["error"] == 3


def test_stream(told: dict[str, object]) -> None:
    """`StreamGenerate`, read to its end and cancelled."""
    assert told["stream"] == told["unary"] and told["cancelled"] == 1
