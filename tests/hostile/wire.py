"""Raw requests of attackers, and an honest client whose delays are measured."""

from __future__ import annotations

import http.client
import json
import re
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

from tests.support.serving_process import ServingProcess


def address_of(server: ServingProcess) -> tuple[str, int]:
    """Return the HTTP address."""
    parts = urlsplit(server.http)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port


def post(body: bytes, *headers: str, path: str = "/v1/completions", closes: bool = True) -> bytes:
    """Return a POST request with only the given headers, without a computed length."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    lines += ["Connection: close"] * closes
    return "\r\n".join([*lines, "", ""]).encode() + body


def statuses_of(answer: bytes) -> list[int]:
    """Return the statuses of all answers in a connection's bytes."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) [A-Z]", answer)]


class Waits(NamedTuple):
    """An honest client's delays, in seconds."""

    first: list[float]  # until the first chunk of each answer
    between: list[float]  # until each further chunk

    def median_first(self) -> float:
        return statistics.median(self.first)

    def p99_between(self) -> float:
        return sorted(self.between)[int(0.99 * len(self.between))]


def ask_streams(server: ServingProcess, prompt: str, until: threading.Event | int, waits: Waits) -> None:
    """Read streams in sequence, a number of them or until an event is set; record the delays."""
    connection = http.client.HTTPConnection(*address_of(server), timeout=30)
    body = json.dumps({"prompt": prompt, "stream": True})
    number = 0
    while not until.is_set() if isinstance(until, threading.Event) else number < until:
        number += 1
        last = time.monotonic()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200
        is_first = True
        while line := answer.readline():
            if line.startswith(b"data: "):
                now = time.monotonic()
                (waits.first if is_first else waits.between).append(now - last)
                last, is_first = now, False
    connection.close()


@contextmanager
def honest_client(server: ServingProcess, prompt: str) -> Iterator[Waits]:
    """Run an honest client in a thread; its delays are complete when the block ends."""
    waits, end = Waits([], []), threading.Event()
    thread = threading.Thread(target=ask_streams, args=(server, prompt, end, waits))
    thread.start()
    try:
        yield waits
    finally:
        end.set()
        thread.join(30)
