"""Clients that send a byte now and then, or stop reading, are disconnected, and do not delay other clients.

Against the front ends alone, to measure only them.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.hostile.conftest import STALL_SECONDS
from tests.hostile.machine import resident_bytes
from tests.hostile.wire import Waits, address_of, ask_streams, honest_client, post, statuses_of
from tests.support.serving_process import ServingProcess

HONEST = "50 8 0.002"  # chunks, characters, seconds between
NUM_ATTACKERS = 500


@contextmanager
def unhurt(server: ServingProcess) -> Iterator[None]:
    """Fail if an honest client's delay grows by half while the block runs."""
    alone = Waits([], [])
    ask_streams(server, HONEST, 20, alone)
    with honest_client(server, HONEST) as waits:
        yield
    print(f"first chunk {1e3 * alone.median_first():.2f} ms, beside it {1e3 * waits.median_first():.2f} ms")
    print(f"p99 between {1e3 * alone.p99_between():.2f} ms, beside it {1e3 * waits.p99_between():.2f} ms")
    assert len(waits.first) >= 5
    # Plus an allowance for a busy machine.
    assert waits.median_first() < 1.5 * alone.median_first() + 0.1
    assert waits.p99_between() < 1.5 * alone.p99_between() + 0.25


# The bytes that each sends first, and the byte that it then repeats slowly.
LORISES = {
    "header": (b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: ", b"a"),
    "empty line": (b"\n", b"\n"),
    "body": (post(b'{"prompt"', "Content-Length: 1000"), b" "),
    "chunk": (post(b"", "Transfer-Encoding: chunked"), b"0"),
}


@pytest.mark.ci
def test_hundreds_of_slow_lorises_are_told_so_and_let_go(fake: ServingProcess) -> None:
    before = resident_bytes(fake.process.pid)
    with selectors.DefaultSelector() as selector, unhurt(fake):
        answers: dict[socket.socket, bytes] = {}
        began: dict[socket.socket, float] = {}
        for head, drip in [*LORISES.values()] * (NUM_ATTACKERS // len(LORISES)):
            connection = socket.create_connection(address_of(fake))
            connection.sendall(head)
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ, drip)
            answers[connection], began[connection] = b"", time.monotonic()
        while selector.get_map():
            due = time.monotonic() + 0.5
            while (left := due - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    connection: Any = key.fileobj
                    try:
                        piece = connection.recv(65536)
                    except ConnectionError:
                        piece = b""
                    answers[connection] += piece
                    if not piece:
                        selector.unregister(connection)
                        connection.close()
                        assert time.monotonic() - began[connection] < STALL_SECONDS + 5
            for key in list(selector.get_map().values()):
                try:
                    key.fileobj.send(key.data)  # type: ignore[union-attr]
                except OSError:
                    pass  # detected above
            assert time.monotonic() - max(began.values()) < STALL_SECONDS + 10
        grown = resident_bytes(fake.process.pid) - before
    told = [statuses_of(answer) for answer in answers.values()]
    # A byte in flight when the server closes makes the kernel discard the answer.
    assert set(map(tuple, told)) <= {(408,), ()} and told.count([408]) > NUM_ATTACKERS // 2
    assert grown < 20 << 20
