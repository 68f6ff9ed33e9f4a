"""Malformed HTTP: wrong lengths, two lengths, disguised encodings, endless heads.

Each is answered only with an error, bytes after it are not parsed as another request (smuggling), and the server keeps
no more of it than its limits.
"""

from __future__ import annotations

import json
import socket
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from tests.hostile.conftest import MAX_BODY_BYTES, STALL_SECONDS
from tests.hostile.machine import bytes_read, processor_seconds, resident_bytes
from tests.hostile.wire import address_of, post, statuses_of
from tests.support.failures import SECRETS
from tests.support.fake_serving import raw_exchange
from tests.support.serving_process import ServingProcess

BODY = b'{"prompt":"a"}'
INNER = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"  # the smuggled request
H2C = ("Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABk")
ZERO = b"0\r\n\r\n"
CHUNK = b"e\r\n" + BODY + b"\r\n" + ZERO
GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"


def chunked(body: bytes, *headers: str) -> bytes:
    return post(body, "Transfer-Encoding: chunked", *headers, closes=False)


def measured(body: bytes, length: str, *headers: str) -> bytes:
    return post(body, f"Content-Length: {length}", *headers, closes=False)


# Name -> bytes. Each is answered once, with an error.
NO_HTTP: dict[str, bytes] = {
    "negative length": measured(BODY, "-14"),
    "signed length": measured(BODY, "+14"),
    "length in hexadecimal": measured(BODY, "0xe"),
    "length with an underscore": measured(BODY, "1_4"),
    "length with a comma": measured(BODY, "14, 14"),
    "length with a space inside": measured(BODY, "1 4"),
    "length with a vertical tab behind": measured(BODY, "14\x0b"),
    "length with a form feed before": measured(BODY, "\x0c14"),
    "empty length": measured(BODY, ""),
    "length with a letter": measured(BODY, "14x"),
    "length in other digits": measured(BODY, "١٤"),
    "length of 2^64 + 14": measured(BODY, "18446744073709551630"),
    "length of 10,000 digits": measured(BODY, "9" * 10_000),
    "two lengths": measured(BODY, "14", "Content-Length: 15"),
    "two equal lengths": measured(BODY, "14", "Content-Length: 14"),
    "length and chunks": measured(CHUNK, "14", "Transfer-Encoding: chunked"),
    "chunks and length": chunked(CHUNK + INNER, "Content-Length: 14"),
    "length of zero and chunks": measured(CHUNK, "0", "Transfer-Encoding: chunked"),
    "chunks, then another encoding": post(CHUNK, "Transfer-Encoding: chunked, identity", closes=False),
    "another encoding": post(CHUNK, "Transfer-Encoding: identity", closes=False),
    "an encoding with a tab": post(CHUNK, "Transfer-Encoding:\tchunked\x0b", closes=False),
    "an encoding in disguise": post(CHUNK, "Transfer-Encoding: xchunked", closes=False),
    "an encoding in quotes": post(CHUNK, 'Transfer-Encoding: "chunked"', closes=False),
    "a space before the colon": post(CHUNK, "Transfer-Encoding : chunked", closes=False),
    "a space before the colon of a length": post(BODY, "Content-Length : 14", closes=False),
    "a folded encoding": post(CHUNK, "X: y\r\n Transfer-Encoding: chunked", closes=False),
    "chunk of 2^64": chunked(b"10000000000000000\r\n" + BODY),
    "negative chunk": chunked(b"-e\r\n" + BODY + b"\r\n" + ZERO),
    "signed chunk": chunked(b"+e\r\n" + BODY + b"\r\n" + ZERO),
    "chunk in 0x": chunked(b"0xe\r\n" + BODY + b"\r\n" + ZERO),
    "chunk in other letters": chunked(b"zz\r\n" + BODY + b"\r\n" + ZERO),
    "chunk without a size": chunked(b"\r\n" + BODY + b"\r\n" + ZERO),
    "space before a chunk's size": chunked(b" e\r\n" + BODY + b"\r\n" + ZERO),
    "chunk longer than its size": chunked(b"2\r\n" + BODY + b"\r\n" + ZERO),
    "chunk that ends in a line feed": chunked(b"e\n" + BODY + b"\n0\n\n"),
    "chunk extension with a NUL": chunked(b"e;a=\0\r\n" + BODY + b"\r\n" + ZERO),
    "NUL in a name": GET + b"A\0b: c\r\n\r\n",
    "NUL in a value": GET + b"A: b\0c\r\n\r\n",
    "NUL in the target": b"GET /ver\0sion HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "other bytes in the target": b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "carriage return in a value": GET + b"A: b\rGET /v1/models HTTP/1.1\r\n\r\n",
    "lines without carriage returns": GET.replace(b"\r\n", b"\n") + b"\n",
    "header without a colon": GET + b"nothing\r\n\r\n",
    "header without a name": GET + b": b\r\n\r\n",
    "folded header": GET + b"A: b\r\n c\r\n\r\n",
    "folded first header": b"GET /version HTTP/1.1\r\n Host: localhost\r\n\r\n",
    "name of other letters": GET + b"\xc3\x84: b\r\n\r\n",
    "space in a name": GET + b"A b: c\r\n\r\n",
    "no version": b"GET /version\r\n\r\n",
    "another version": b"GET /version HTTP/9.9\r\nHost: localhost\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
    "two targets": b"GET /version /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a method that is none": b"GET\0 /version HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "CONNECT": b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n" + INNER,
    "no host": b"GET /version HTTP/1.1\r\n\r\n",
    "two hosts": GET + b"Host: localhost\r\n\r\n",
    "a host with a path": b"GET /version HTTP/1.1\r\nHost: localhost/health?\r\n\r\n",
    "a host with a user": b"GET /version HTTP/1.1\r\nHost: localhost@evil\r\n\r\n",
    "garbage": bytes(range(256)) * 4,
    "zeros": bytes(1000),
}


@pytest.mark.parametrize("name", NO_HTTP)
def test_what_is_no_http_is_answered_once_and_with_an_error(fake: ServingProcess, name: str) -> None:
    answer = raw_exchange(address_of(fake)[1], NO_HTTP[name] + INNER, timeout=STALL_SECONDS + 3)
    if not answer and len(NO_HTTP[name]) > 8192:
        return  # a reset may overtake the answer to a partly read request
    assert statuses_of(answer) == [400], answer[:300]
    assert SECRETS.search(answer.decode("latin-1")) is None
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["message"] and error["type"] == "invalid_request_error"


# Unusual but valid: one answer per request.
@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        (measured(BODY, "14") + INNER, [200, 200]),
        (measured(BODY, "0014"), [200]),
        (measured(BODY, " \t 14 \t ") + INNER, [200, 200]),
        (chunked(CHUNK) + INNER, [200, 200]),
        (chunked(b"e;name=value\r\n" + BODY + b"\r\n0;last\r\nX-Trailer: y\r\n\r\n") + INNER, [200, 200]),
        (chunked(b"000000000e\r\n" + BODY + b"\r\n" + ZERO), [200]),
        (chunked(b"1\r\n{\r\nD\r\n" + BODY[1:] + b"\r\n" + ZERO), [200]),
        (post(CHUNK, "transfer-encoding: CHUNKED", closes=False), [200]),
        (measured(b"", "0") + INNER, [400, 200]),
        (post(b"", closes=False) + INNER, [400, 200]),  # without a length the body is empty
        (measured(BODY + INNER, str(len(BODY + INNER))), [400]),  # the inner request is part of the body
        (measured(b"G", "1", "Content-Encoding: gzip"), [415]),
        (GET + b"Content-Length: 44\r\n\r\n" + INNER.ljust(44), [200]),
        (GET.replace(b"GET", b"HEAD") + b"\r\n" + INNER, [200, 200]),
        (GET + b"X-HTTP-Method-Override: DELETE\r\n\r\n", [200]),
        (post(CHUNK, "Transfer-Encoding: gzip, chunked", closes=False) + INNER, [400]),
        (post(CHUNK, "Transfer-Encoding: gzip", "Transfer-Encoding: chunked", closes=False) + INNER, [400]),
        (measured(BODY, "14", *H2C) + INNER, [200, 200]),  # the protocol is not upgraded: Java's client sends this
        (measured(INNER.ljust(44), "44", *H2C) + INNER, [400, 200]),
        (chunked(CHUNK, *H2C) + chunked(CHUNK, *H2C) + INNER, [200, 200, 200]),
        (GET + b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk\r\n\r\n", [200]),
        (GET + b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: eA==\r\n\r\n", [200]),
        (b"GET http://localhost/version HTTP/1.1\r\nHost: localhost\r\n\r\n", [200]),
        (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", [404]),
        (b"TRACE /version HTTP/1.1\r\nHost: localhost\r\nCookie: secret\r\n\r\n", [405]),
        (b"\r\n\r\n" + GET + b"\r\n", [200]),
        (INNER * 5, [200] * 5),
    ],
)
def test_what_is_odd_but_right_is_answered_as_often_as_it_asks(
    fake: ServingProcess, sent: bytes, statuses: list[int]
) -> None:
    with socket.create_connection(address_of(fake), timeout=STALL_SECONDS + 8) as connection:
        connection.sendall(sent)
        answer = b""
        while piece := connection.recv(65536):  # the server closes an idle connection
            answer += piece
            if len(statuses_of(answer)) == len(statuses) and answer.endswith((b"}", b"}\n")):
                break
    assert statuses_of(answer) == statuses and b"secret" not in answer


@pytest.mark.ci
def test_a_length_that_is_not_kept(fake: ServingProcess) -> None:
    began = time.monotonic()
    late = [measured(BODY, "20"), *(chunked(size + b"\r\n" + BODY) for size in (b"ffffffffffffffff", b"8" + b"0" * 15))]
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda raw: raw_exchange(address_of(fake)[1], raw, STALL_SECONDS + 8), late))
    assert [statuses_of(answer) for answer in answers] == [[408]] * 3
    assert all(b'"type":"timeout"' in answer.replace(b" ", b"") for answer in answers)
    assert time.monotonic() - began < STALL_SECONDS + 5
    # Half-closed: no more bytes can arrive, so the server does not wait.
    with socket.create_connection(address_of(fake), timeout=STALL_SECONDS + 8) as connection:
        connection.sendall(measured(BODY, "20"))
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(65536) == b""


def answer_of(connection: socket.socket) -> bytes:
    """Read one answer, whose body is JSON."""
    answer = b""
    while not answer.endswith(b"}"):
        piece = connection.recv(65536)
        assert piece, answer
        answer += piece
    return answer


@pytest.mark.ci
def test_the_rest_of_a_body_that_nobody_wants_has_its_time_too(fake: ServingProcess) -> None:
    """Each of its bytes once postponed the end of an idle connection indefinitely."""
    head = GET + b"Content-Length: 1000\r\n\r\n"
    began = time.monotonic()
    with socket.create_connection(address_of(fake), timeout=10) as silent, suppress(ConnectionError):
        silent.sendall(head)
        assert answer_of(silent).startswith(b"HTTP/1.1 200")
        silent.sendall(b"a")
        assert silent.recv(65536) == b""
    assert time.monotonic() - began < STALL_SECONDS + 5
    with socket.create_connection(address_of(fake), timeout=10) as drip:
        drip.sendall(head)
        assert answer_of(drip).startswith(b"HTTP/1.1 200")
        began = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() - began < STALL_SECONDS + 5:
                drip.sendall(b"a")
                time.sleep(0.05)
    assert time.monotonic() - began < STALL_SECONDS + 5


def test_tls_where_none_is_spoken(fake: ServingProcess) -> None:
    context = ssl.create_default_context()
    with socket.create_connection(address_of(fake), timeout=5) as connection, pytest.raises(OSError):
        context.wrap_socket(connection, server_hostname="localhost")


# Sizes. Kernel buffers add to the bytes sent, so the server's memory is measured.


def flood(server: ServingProcess, head: bytes, piece: bytes, total: int, seconds: float = 20.0) -> tuple[int, bytes]:
    """Send until the server closes the connection; return the bytes sent, and its answer."""
    sent, answer = 0, b""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
        connection.settimeout(seconds)
        connection.connect(address_of(server))
        with suppress(OSError):
            connection.sendall(head)
            while sent < total:
                connection.sendall(piece)
                sent += len(piece)
        with suppress(OSError):
            while read := connection.recv(65536):
                answer += read
    return sent, answer


GIGABYTE = 1 << 30


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/tokenize", "/version", "/nothing"], ids=["read", "tokenized", "not taken", "no route"]
)
@pytest.mark.parametrize("size", [65536, 16, 1])
def test_a_gigabyte_in_chunks_is_cut_off_at_the_limit(fake: ServingProcess, path: str, size: int) -> None:
    """For routes with a body and without."""
    pid = fake.process.pid
    before, busy, read = resident_bytes(pid), processor_seconds(pid), bytes_read(pid)
    piece = (b"%x\r\n" % size + b" " * size + b"\r\n") * (65536 // size)
    sent, answer = flood(fake, post(b"", "Transfer-Encoding: chunked", path=path, closes=False), piece, GIGABYTE)
    assert sent < 40 * MAX_BODY_BYTES, "what the kernels' buffers took is among it"
    body = min(MAX_BODY_BYTES * len(piece) // 65536, 2 * MAX_BODY_BYTES)  # with its framing, which is bounded
    assert bytes_read(pid) - read < body + 65536
    assert statuses_of(answer) in ([], [413], [405], [404])  # a reset may overtake the answer
    assert resident_bytes(pid) - before < 3 * MAX_BODY_BYTES + (10 << 20)
    assert processor_seconds(pid) - busy < 3.0


def test_a_gigabyte_that_is_announced_is_not_read(fake: ServingProcess) -> None:
    for length in (MAX_BODY_BYTES + 1, GIGABYTE, 2**63 - 1):
        sent, answer = flood(fake, measured(b"", str(length)), b" " * 65536, GIGABYTE)
        assert sent < 10 * MAX_BODY_BYTES and statuses_of(answer) in ([], [413])
    # Requests with Expect: 100-continue are refused before the body.
    answer = raw_exchange(address_of(fake)[1], measured(b"", str(GIGABYTE), "Expect: 100-continue"))
    assert statuses_of(answer) == [413]


def test_compressed_bodies_are_not_unpacked(fake: ServingProcess) -> None:
    import gzip

    bomb = gzip.compress(b'{"prompt":"' + b" " * (100 << 20) + b'"}', 9)
    before = resident_bytes(fake.process.pid)
    for encoding in ("gzip", "deflate", "br", "zstd", "x-gzip", "identity, gzip", "GZIP"):
        raw = post(bomb, f"Content-Encoding: {encoding}", f"Content-Length: {len(bomb)}")
        assert statuses_of(raw_exchange(address_of(fake)[1], raw)) in ([], [415])
    assert resident_bytes(fake.process.pid) - before < 10 << 20


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (GET + b"A: ", b"a" * 65536),
        (GET, b"A: b\r\n" * 10_000),
        (GET, b"Content-Length: 0\r\n" * 4000),
        (GET + b"Cookie: ", b"a=b; " * 10_000),
        (b"GET /", b"a" * 65536),
        (b"GET /version?", b"a=b&" * 16_384),
        (b"", b"\r\n" * 32_768),
        (b"", b"A" * 65536),
        (chunked(b""), b"1;" + b"a" * 65536),
        (chunked(b"e\r\n" + BODY + b"\r\n0\r\n"), b"X-Trailer: y\r\n" * 4000),
    ],
    ids=["value", "lines", "lengths", "cookie", "target", "query", "empty lines", "method", "extension", "trailers"],
)
def test_a_head_without_end_costs_nothing(fake: ServingProcess, head: bytes, piece: bytes) -> None:
    pid = fake.process.pid
    before, busy = resident_bytes(pid), processor_seconds(pid)
    for _ in range(4):
        sent, answer = flood(fake, head, piece, 100 << 20)
        assert sent < 20 << 20 and statuses_of(answer) in ([], [400], [408], [413], [431]), answer[:200]
    assert resident_bytes(pid) - before < 10 << 20
    assert processor_seconds(pid) - busy < 4.0
