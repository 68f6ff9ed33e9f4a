"""Admission of HTTP requests: keys, hosts, origins, sizes and times, mostly as raw bytes on a socket."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from types import SimpleNamespace
from unittest.mock import Mock

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from jaxllm.errors import UserError
from jaxllm_server.access.auth import Keys
from jaxllm_server.http.protocol import MAX_PIPELINED, protocol_of
from jaxllm_server.shared.error_table import AdminRequiredError, AuthError
from jaxllm_server.shared.options import ServerOptions
from tests.support.failures import over_http
from tests.support.fake_serving import FakeServing, http_server, raw_exchange

KEY = "sk-geheim-ü"
AUTH = {"authorization": f"Bearer {KEY}".encode()}
OPEN = ("/health", "/live", "/ready", "/ping")


@pytest.fixture(scope="module")
def guarded():
    with http_server(FakeServing(), ServerOptions(api_key=(KEY, "second"), admin_api_key=("boss",))) as port:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
            yield SimpleNamespace(port=port, http=http)


@pytest.fixture(scope="module")
def bounded():
    options = ServerOptions(max_body_bytes=10_000, max_header_bytes=2000, max_headers=20, stall_timeout=0.5)
    with http_server(FakeServing(), options) as port:
        yield port


def status(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 "), answer[:100]
    return int(answer[9:12])


def error_of(answer: bytes) -> dict:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


def get(path="/version", *headers, host="localhost"):
    return "\r\n".join([f"GET {path} HTTP/1.1", f"Host: {host}", *headers, "Connection: close", "", ""]).encode()


# Keys.


def test_keys_open_what_they_should():
    keys = Keys(("a", "b"), ("boss",))
    for header in ("Bearer a", "bearer b", "Bearer  boss", "BEARER a "):
        keys.check(header)
    assert [keys.check(f"Bearer {key}") for key in ("a", "b", "boss")] == ["key-0", "key-1", "admin-0"]
    assert Keys(("a",), ("a",)).check("Bearer a", admin=True) == "admin-0"
    keys.check("Bearer boss", admin=True)
    for header in ("Bearer", "Bearer c", "a", "Basic a", "", "Bearer a b", "Bearer \udcff", "Bearer " + "a" * 10_000):
        with pytest.raises(AuthError) as caught:
            keys.check(header)
        assert not caught.value.is_missing
    with pytest.raises(AuthError) as caught:
        keys.check(None)
    assert caught.value.is_missing
    with pytest.raises(AdminRequiredError):
        keys.check("Bearer a", admin=True)
    with pytest.raises(AuthError):
        keys.check("Bearer c", admin=True)


def test_keys_that_are_not_configured():
    Keys().check(None)
    Keys().check(None, admin=True)
    Keys(("a",)).check("Bearer a", admin=True)  # without admin keys, the API key is enough
    with pytest.raises(AdminRequiredError):
        Keys(("a", "b")).check("Bearer a", admin=True)  # not one of several keys: its client would see data of others
    Keys((), ("boss",)).check(None)  # only the control service is closed
    with pytest.raises(AuthError):
        Keys((), ("boss",)).check(None, admin=True)


def test_probes_and_keys_that_fit(guarded):
    for path in OPEN:
        assert guarded.http.get(path).status_code == 200
    for key in (KEY.encode(), b"second", b"boss"):
        assert guarded.http.get("/v1/models", headers={"authorization": b"Bearer " + key}).status_code == 200
    answer = guarded.http.get("/v1/models")
    assert answer.headers["www-authenticate"] == "Bearer" and "x-request-id" in answer.headers
    assert over_http(answer) == (401, "invalid_api_key", "authentication_error")
    answer = guarded.http.get("/load", headers={"authorization": "Bearer second"})
    assert over_http(answer) == (403, "admin_required", "permission_denied")


# Hosts and origins.


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:1"])
def test_own_names_on_loopback(bounded, host):
    assert status(raw_exchange(bounded, get(host=host))) == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "10.0.0.1", "localhost."])
def test_other_names_on_loopback(bounded, host):
    answer = raw_exchange(bounded, get(host=host))
    assert status(answer) == 421 and host.encode() not in answer.partition(b"\r\n\r\n")[2]
    assert "--allowed-hosts" in error_of(answer)["message"] and error_of(answer)["code"] == "misdirected_request"
    for path in OPEN:
        assert status(raw_exchange(bounded, get(path, host=host))) == 200
        assert status(raw_exchange(bounded, get(f"{path}/", host=host))) == 421


@pytest.mark.parametrize("host", ["", "a b", "a/v1?", "user@localhost", "[::1", "localhost:99999999", "é"])
def test_hosts_that_are_none(bounded, host):
    assert status(raw_exchange(bounded, get(host=host))) == 400


def test_one_host_exactly(bounded):
    assert status(raw_exchange(bounded, get("/version", "Host: localhost"))) == 400
    assert status(raw_exchange(bounded, b"GET /version HTTP/1.1\r\nConnection: close\r\n\r\n")) == 400
    assert status(raw_exchange(bounded, b"GET /version HTTP/1.0\r\n\r\n")) == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1", "http://[", "file://"])
def test_other_origins_are_refused(bounded, origin):
    for method in ("POST", "GET", "DELETE", "OPTIONS"):
        raw = get("/v1/models", f"Origin: {origin}", "Access-Control-Request-Method: POST").replace(
            b"GET", method.encode(), 1
        )
        answer = raw_exchange(bounded, raw)
        assert status(answer) == 403 and b"access-control-allow" not in answer


def test_a_page_of_the_same_host(bounded):
    assert status(raw_exchange(bounded, get("/version", "Origin: http://localhost:81", host="localhost:81"))) == 200


def test_allowed_hosts_and_origins():
    options = ServerOptions(allowed_hosts=("my.host",), allowed_origins=("https://app.example",), api_key=("k",))
    with http_server(FakeServing(), options) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        key = {"authorization": "Bearer k"}
        assert http.get("/version", headers={"host": "My.Host:8000", **key}).status_code == 200
        page = {"origin": "https://app.example"}
        answer = http.get("/version", headers={**page, **key})
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert answer.headers["vary"] == "origin"
        answer = http.get("/version", headers=page)  # the page may read the error too
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, "https://app.example")
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        answer = http.options("/v1/completions", headers={**page, **asked})
        assert (answer.status_code, answer.headers["access-control-allow-headers"]) == (204, "authorization")
        for other in ("https://app.example.evil", "http://app.example", "null"):
            answer = http.options("/v1/completions", headers={**asked, "origin": other})
            assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
        assert http.options("/v1/completions").status_code == 401


def test_bodies_together_may_hold_at_least_one():
    with pytest.raises(UserError, match="max_receiving_bytes must be at least max_body_bytes"):
        ServerOptions(max_body_bytes=1000, max_receiving_bytes=999)


def test_root_path_is_optional_for_the_proxy():
    with http_server(FakeServing(), ServerOptions(root_path="/llm", api_key=("k",))) as port:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
            for prefix in ("", "/llm"):
                assert http.get(f"{prefix}/health").status_code == 200
                assert http.get(f"{prefix}/v1/models").status_code == 401
                assert http.get(f"{prefix}/v1/models", headers={"authorization": "Bearer k"}).status_code == 200
            assert http.get("/llmx/health").status_code == 401


# Sizes.


def test_large_heads(bounded):
    small = "GET /version HTTP/1.1\r\nHost: localhost\r\n"
    for raw in (
        f"{small}X: {'a' * 3000}\r\n\r\n",
        f"{small}{'A: b' * 1}\r\n" + "".join(f"X{i}: y\r\n" for i in range(30)) + "\r\n",
        f"{small}X: {'a' * 1_000_000}\r\n\r\n",
        f"{small}" + "".join(f"X{i}: y\r\n" for i in range(100_000)) + "\r\n",
        f"GET /{'a' * 3000} HTTP/1.1\r\nHost: localhost\r\n\r\n",
        f"{small}X: {'a' * 5000}",  # no more bytes follow, and the server must not wait for them
    ):
        answer = raw_exchange(bounded, raw.encode(), timeout=2)
        # If the server closes with unread input, the reset may arrive before its answer.
        assert not answer or (status(answer), error_of(answer)["code"]) == (431, "head_too_large")


def post(*headers, body=b""):
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def test_a_declared_length_is_refused_before_anything_is_read(bounded):
    for length in ("10001", "1000000000", "9" * 18):
        answer = raw_exchange(bounded, post(f"Content-Length: {length}"))
        assert status(answer) == 413 and b"connection: close" in answer
    answer = raw_exchange(bounded, post("Content-Length: 20000", "Expect: 100-continue"))
    assert status(answer) == 413


def test_chunked_body_over_the_limit_has_its_status(bounded):
    body = b"".join(b"fff\r\n" + b" " * 4095 + b"\r\n" for _ in range(3)) + b"0\r\n\r\n"
    assert status(raw_exchange(bounded, post("Transfer-Encoding: chunked", body=body))) == 413


# Times.


def test_answers_that_nobody_reads_do_not_hold_the_connection():
    observer = SimpleNamespace(render=lambda: b"x" * 2_000_000, content_type="text/plain", request_handled=print)
    with http_server(FakeServing(), ServerOptions(stall_timeout=0.3), observer) as port:
        with socket.create_connection(("127.0.0.1", port), timeout=3) as connection:
            connection.sendall(get("/metrics").replace(b"Connection: close\r\n", b"") * 16)
            time.sleep(1)
            num_bytes = 0
            while piece := connection.recv(1 << 20):
                num_bytes += len(piece)
    assert 0 < num_bytes < 31_000_000


@pytest.mark.parametrize("error", [None, ConnectionResetError()])
def test_no_timer_outlives_its_connection(error):
    """A leaked timer would hold the connection's transport for as long as a client may stall."""
    timers = []

    class Loop(asyncio.SelectorEventLoop):
        def call_later(self, delay, callback, *arguments, **options):
            timers.append(super().call_later(delay, callback, *arguments, **options))
            return timers[-1]

    loop, transport = Loop(), Mock(asyncio.Transport)
    transport.is_closing.return_value = False
    transport.get_extra_info.return_value = None
    config = uvicorn.Config(lambda *_: None, log_config=None, lifespan="off", ws="none")
    config.load()
    connection = protocol_of(ServerOptions(stall_timeout=30))(config, ServerState(), {}, loop).connection
    connection.connection_made(transport)
    assert len(timers) == 1  # for the head
    connection.pause_writing()
    connection.send_400_response("")
    assert len(timers) == 3 and not all(timer.cancelled() for timer in timers)
    connection.connection_lost(error)
    assert [timer.cancelled() for timer in timers] == [True] * 3
    loop.close()


def test_a_flood_of_pipelined_requests_is_cut_off(bounded):
    question = get("/version").replace(b"Connection: close\r\n", b"")
    assert raw_exchange(bounded, question * 3 + get("/version")).count(b"HTTP/1.1 200") == 4
    with socket.create_connection(("127.0.0.1", bounded), timeout=3) as connection:
        with pytest.raises(ConnectionError):
            for _ in range(10_000):
                connection.sendall(question * 100)


@pytest.mark.parametrize("ending", ["", "garbage", "too many"])
def test_pipelined_requests_are_answered_in_order(bounded, ending):
    """Even if later bytes are invalid and end the connection: a client can count the answers."""
    answers = {"/version": b'"version"', "/health": b"", "/v1/models": b'"list"', "/nothing": b"Unknown path"}
    paths = [list(answers)[number % 4] for number in range(100 if ending == "too many" else 20)]
    sent = b"".join(get(path).replace(b"Connection: close\r\n", b"") for path in paths)
    sent += {"": get("/version"), "garbage": b"garbage\r\n\r\n", "too many": b""}[ending]
    whole = raw_exchange(bounded, sent, timeout=5)
    found = whole.split(b"HTTP/1.1 ")[1:]
    count = MAX_PIPELINED + 1 if ending == "too many" else 20 + (not ending)
    assert len(found) == count and b"connection: close" in found[-1].lower()
    assert not any(b"connection: close" in answer.lower() for answer in found[:-1])
    for path, answer in zip(paths, found, strict=False):
        assert answer.startswith(b"404" if path == "/nothing" else b"200") and answers[path] in answer


def test_options_say_what_is_wrong():
    with pytest.raises(UserError):
        ServerOptions(api_key=("",))
