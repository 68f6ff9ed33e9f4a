"""Clients that send a byte now and then, and clients that stop reading: they are let go, and others notice nothing.

Against the front ends alone, so that what is measured is theirs.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import h2.events
import httpx
import pytest

from tests.hostile.conftest import STALL_SECONDS
from tests.hostile.frames import Frames
from tests.hostile.machine import growth, num_descriptors, resident_bytes
from tests.hostile.wire import Waits, address_of, ask_streams, honest_client, post, statuses_of
from tests.support.serving_process import ServingProcess

HONEST = "50 8 0.002"  # chunks, characters, seconds between
NUM_ATTACKERS = 500
NUM_READERS = 200


@contextmanager
def unhurt(server: ServingProcess) -> Iterator[None]:
    """Fail if an honest client waits half as long again while the block runs."""
    alone = Waits([], [])
    ask_streams(server, HONEST, 20, alone)
    with honest_client(server, HONEST) as waits:
        yield
    print(f"first chunk {1e3 * alone.median_first():.2f} ms, beside it {1e3 * waits.median_first():.2f} ms")
    print(f"p99 between {1e3 * alone.p99_between():.2f} ms, beside it {1e3 * waits.p99_between():.2f} ms")
    assert len(waits.first) >= 5
    # What comes on top is what a busy machine takes at any moment.
    assert waits.median_first() < 1.5 * alone.median_first() + 0.1
    assert waits.p99_between() < 1.5 * alone.p99_between() + 0.25


# What each has sent before it sends a byte now and then, and that byte.
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
                    pass  # noticed above
            assert time.monotonic() - max(began.values()) < STALL_SECONDS + 10
        grown = resident_bytes(fake.process.pid) - before
    told = [statuses_of(answer) for answer in answers.values()]
    # A byte that was under way when the server closed makes the kernel throw the answer away.
    assert set(map(tuple, told)) <= {(408,), ()} and told.count([408]) > NUM_ATTACKERS // 2
    assert grown < 20 << 20


@contextmanager
def stopped_over_http(server: ServingProcess) -> Iterator[Callable[[], int]]:
    """Open streams that are not read; give what counts those that the server still serves."""
    body = json.dumps({"prompt": "100000 65536 0.01", "stream": True}).encode()
    before = num_descriptors(server.process.pid)
    with ExitStack() as readers:
        for _ in range(NUM_READERS // 2):
            reader = readers.enter_context(socket.socket())
            # On loopback a segment is 64 KiB, and the kernel would take megabytes before the server felt anything.
            reader.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(address_of(server))
            reader.sendall(post(body, f"Content-Length: {len(body)}"))
            assert reader.recv(100)
        # One connection may be the honest client's, two are gRPC's.
        yield lambda: max(0, num_descriptors(server.process.pid) - before - 3)


@contextmanager
def stopped_over_grpc(server: ServingProcess) -> Iterator[Callable[[], int]]:
    before = num_slow_consumers(server)
    with ExitStack() as connections:
        for _ in range(2):
            frames = connections.enter_context(Frames(server.grpc))
            for _ in range(NUM_READERS // 4):
                stream = frames.ask(text="100000 65536 0.01")
                assert frames.read(
                    lambda events, stream=stream: any(
                        isinstance(event, h2.events.DataReceived) and event.stream_id == stream for event in events
                    )
                )
        yield lambda: NUM_READERS // 2 - (num_slow_consumers(server) - before)


def num_slow_consumers(server: ServingProcess) -> int:
    metrics = httpx.get(f"{server.http}/metrics").text
    counted = re.findall(r'requests_handled_total{code="RESOURCE_EXHAUSTED",[^}]*protocol="grpc"[^}]*} (.+)', metrics)
    return int(sum(map(float, counted)))


@pytest.mark.slow
def test_hundreds_of_readers_that_stop_cost_little_and_are_let_go(fake: ServingProcess) -> None:
    with growth(fake.process.pid) as most, unhurt(fake):
        with stopped_over_http(fake) as num_http, stopped_over_grpc(fake) as num_grpc:
            limit = time.monotonic() + STALL_SECONDS + 15
            while num_http() or num_grpc():
                assert time.monotonic() < limit, (num_http(), num_grpc())
                time.sleep(0.1)
    print(f"memory of {NUM_READERS} readers that have stopped: {most() / 2**20:.1f} MiB")
    assert most() < 200 << 20
