"""Responses over a WebSocket: the same events as POST, continuation within a connection, limits and closing."""

from __future__ import annotations

import json
import random
import re
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import takewhile
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from jaxllm.errors import EngineDeadError
from jaxllm_server.http import response_sockets
from jaxllm_server.http.response_sockets import ROUTE
from jaxllm_server.shared.options import ServerOptions
from tests.support.failures import eventually
from tests.support.fake_serving import FakeServing, http_server

ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


@contextmanager
def serving(observer: Any = None, **options: Any) -> Iterator[tuple[FakeServing, int]]:
    own = ServerOptions(**options)
    fake = FakeServing(options=own)
    with http_server(fake, own, observer) as port:
        yield fake, port


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[FakeServing, int]]:
    with serving() as own:
        yield own


def opened(port: int, **options: Any) -> AbstractContextManager[ClientConnection]:
    return connect(f"ws://127.0.0.1:{port}/v1/responses", compression=None, **options)


def asked(own: ClientConnection, **body: Any) -> list[dict[str, Any]]:
    """Send a request; return its events."""
    own.send(json.dumps({"type": "response.create", **body}))
    events = [json.loads(own.recv(timeout=5))]
    while events[-1]["type"] not in ENDS:
        events.append(json.loads(own.recv(timeout=5)))
    return events


def posted(http: httpx.Client, body: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    answer = http.post("/v1/responses", json=body | {"stream": True})
    if answer.status_code != 200:
        return answer.status_code, [answer.json()["error"]]
    return 200, [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]


def plain(value: Any) -> str:
    """Serialize a value without ids and times, which differ between answers."""
    return re.sub(r'_[0-9a-f]{32}|_at": \d+', "", json.dumps(value))


class Known:
    """The responses that may be continued: a naive model of Open Responses' rules."""

    def __init__(self) -> None:
        self.parents: dict[str, str | None] = {}
        self.kept: set[str] = set()
        self.local: set[str] = set()

    def chain(self, response_id: str | None) -> list[str]:
        chain = []
        while response_id is not None:
            chain.append(response_id)
            response_id = self.parents.get(response_id)
        return chain

    def of_connection(self, response_id: str | None) -> list[str]:
        """Return the part of a conversation after the last stored response, which contains all before it."""
        return list(takewhile(lambda each: each not in self.kept, self.chain(response_id)))

    def is_found(self, response_id: str | None) -> bool:
        return self.local.issuperset(self.of_connection(response_id))

    def add(self, response_id: str, previous: str | None, is_kept: bool) -> None:
        self.parents[response_id] = previous
        if is_kept:
            self.kept.add(response_id)
        else:
            self.local = {each for each in (*self.local, response_id) if each in self.of_connection(response_id)}


def test_the_answers_are_those_of_post_and_a_connection_has_responses_of_its_own(
    server: tuple[FakeServing, int],
) -> None:
    fake, port = server
    draws, known, open_now = random.Random(9), Known(), ExitStack()
    http = httpx.Client(base_url=f"http://127.0.0.1:{port}")
    own = open_now.enter_context(opened(port))
    seen = {True: 0, False: 0}
    for _ in range(100):
        if draws.random() < 0.05:
            open_now.close()
            own, known.local = open_now.enter_context(opened(port)), set()
        recent, ours = list(known.parents)[-4:], [each for each in known.parents if each in known.local]
        previous = draws.choice([None, "resp_unknown", *recent, *recent, *recent, *ours * 4])
        body: dict[str, Any] = {"input": draws.choice(["Hi", [{"role": "user", "content": "é"}]])}
        body |= {"store": draws.random() < 0.3, "temperature": draws.choice([*[0, 0.5] * 4, "warm"])}
        body |= {} if previous is None else {"previous_response_id": previous}
        if draws.random() < 0.1:
            body["input"] = [{"type": "function_call_output", "call_id": "c", "output": "not asked"}]
        fake.failure = EngineDeadError("dead") if draws.random() < 0.1 else None
        fake.fails_at = draws.choice([0, 2])
        is_local = bool(known.of_connection(previous))
        status, others = posted(http, body) if known.is_found(previous) and not is_local else (404, [])
        events = asked(own, **body)
        last = events[-1]
        seen[known.is_found(previous) and is_local] += 1
        if not known.is_found(previous):
            assert (last["status"], last["error"]["code"]) == (404, "previous_response_not_found")
            assert "id 'resp_" in last["error"]["message"]
        elif not is_local:
            if status == 200:
                assert plain(events) == plain([each for each in others if each["type"] != "error"])
            else:
                assert last == {"type": "error", "status": status, "error": others[0]}
        if last["type"] == "response.completed":
            messages = [message["content"] for message in fake.calls[-1].messages]
            assert len(messages) == 2 * len(known.chain(previous)) + 1, "it has all that was said"
            known.add(last["response"]["id"], previous, body["store"])
        elif previous in known.local:
            known.local.remove(previous)
    open_now.close()
    http.close()
    assert min(seen.values()) > 10


def test_a_stored_response_outlasts_those_of_its_connection(server: tuple[FakeServing, int]) -> None:
    fake, port = server
    fake.failure = None
    with httpx.Client(base_url=f"http://127.0.0.1:{port}/v1") as http:
        previous = http.post("/responses", json={"input": "0"}).json()["id"]
        with opened(port) as own:
            for number, is_kept in ((1, False), (2, False), (3, True)):
                body = {"input": str(number), "store": is_kept, "previous_response_id": previous}
                previous = asked(own, **body)[-1]["response"]["id"]
        listed = http.get(f"/responses/{previous}/input_items", params={"order": "asc"}).json()["data"]
        said = [message["content"] for message in fake.calls[-1].messages]
        assert [item["content"][0]["text"] for item in listed] == said and len(said) == 7
        answer = http.post("/responses", json={"input": "4", "previous_response_id": previous}).json()
        assert answer["status"] == "completed"
        again = [message["content"] for message in fake.calls[-1].messages]
        assert again[:7] == said and again[8:] == ["4"]


def test_what_follows_an_offer_at_once_is_refused_and_not_lost(server: tuple[FakeServing, int]) -> None:
    head = (
        b"GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    )
    for rest, status in (
        (b"\r\n", b"101"),
        (b"\r\n\x81\x82\0\0\0\0{}", b"400"),
        (b"\r\n\x81", b"400"),
        (b"Content-Length: 2\r\n\r\n", b"400"),
    ):
        with socket.create_connection(("127.0.0.1", server[1]), timeout=5) as own:
            own.sendall(head + rest)
            assert own.recv(100).split()[1] == status
            if status == b"400":
                own.shutdown(socket.SHUT_WR)
                while own.recv(4096):
                    pass


def test_a_failure_in_the_middle_ends_one_response_alone(server: tuple[FakeServing, int]) -> None:
    fake, port = server
    with opened(port) as own:
        fake.failure, fake.fails_at = EngineDeadError("dead"), 2
        events = asked(own, input="Hi")
        fake.failure = None
        assert [each["type"] for each in events if "error" in each["type"]] == []
        assert events[-1]["type"] == "response.failed" and events[-1]["response"]["error"]["code"] == "server_error"
        assert asked(own, input="Hi")[-1]["type"] == "response.completed"


def test_what_is_no_request_is_told_so(server: tuple[FakeServing, int]) -> None:
    fake, port = server
    fake.failure = None
    with opened(port) as own:
        for text, name in (
            ("{", None),
            ("[]", None),
            ("{}", "type"),
            ('{"type": "response.cancel"}', "type"),
            ('{"type": "response.create", "input": "Hi", "background": true}', "background"),
            ('{"type": "response.create", "input": "Hi", "stream": false}', "stream"),
            ('{"type": "response.create", "input": "Hi", "generate": false}', "generate"),
            ('{"type": "response.create", "input": "Hi", "sotp": "."}', "sotp"),
            ('{"type": "response.create", "model": "other", "input": "Hi"}', "model"),
            ('{"type": "response.create"}', "input"),
        ):
            own.send(text)
            event = json.loads(own.recv(timeout=5))
            assert event["type"] == "error" and event["status"] in (400, 404) and event["error"]["param"] == name
        assert asked(own, input="Hi", stream=True, background=False)[-1]["type"] == "response.completed"


def test_messages_are_answered_one_after_the_other(server: tuple[FakeServing, int]) -> None:
    fake, port = server
    fake.failure = None
    with opened(port) as own:
        for number in range(20):
            own.send(json.dumps({"type": "response.create", "input": "Hi", "metadata": {"number": str(number)}}))
        ends, num_created = [], 0
        while len(ends) < 20:
            event = json.loads(own.recv(timeout=5))
            num_created += event["type"] == "response.created"
            assert num_created <= len(ends) + 1
            if event["type"] in ENDS:
                ends.append(event["response"]["metadata"]["number"])
        assert ends == [str(number) for number in range(20)]


@pytest.mark.parametrize("is_polite", [True, False])
def test_a_client_that_goes_ends_its_response(server: tuple[FakeServing, int], is_polite: bool) -> None:
    fake, port = server
    fake.failure, fake.delay = None, 0.05
    early = fake.num_closed_early
    try:
        with opened(port) as own:
            own.send(json.dumps({"type": "response.create", "input": "Hi"}))
            own.recv(timeout=5)
            assert fake.num_live == 1
            if not is_polite:
                own.socket.shutdown(socket.SHUT_RDWR)
        eventually(lambda: (fake.num_live, fake.num_closed_early) == (0, early + 1))
    finally:
        fake.delay = 0.0


def test_a_client_that_reads_nothing_is_cut_off() -> None:
    with serving(stall_timeout=0.3) as (fake, port):
        fake.script = ["x" * 500_000] * 60
        with opened(port, max_queue=1, close_timeout=0.1) as own:
            own.send(json.dumps({"type": "response.create", "input": "Hi"}))
            eventually(lambda: fake.num_closed_early == 1)
            assert fake.num_live == 0


class Observer:
    def __init__(self) -> None:
        self.handled: list[tuple[str, int]] = []

    def request_handled(self, protocol: str, route: str, code: int, seconds: float) -> None:
        self.handled.append((route, code))


def test_who_may_open_one_and_how_many() -> None:
    observer = Observer()
    with serving(observer, api_key=("a", "b"), max_rpcs=2) as (fake, port):
        keys = [{"Authorization": f"Bearer {key}"} for key in "ab"]
        for status, options in (
            (401, {}),
            (401, {"additional_headers": {"Authorization": "Bearer c"}}),
            (403, {"additional_headers": keys[0], "origin": "http://evil.example"}),
        ):
            with pytest.raises(InvalidStatus) as caught, opened(port, **options):
                pass
            assert caught.value.response.status_code == status
        assert httpx.get(f"http://127.0.0.1:{port}/v1/responses", headers=keys[0]).status_code == 405
        with opened(port, additional_headers=keys[0] | {"X-Request-Id": "mine"}) as own:
            assert own.response is not None and own.response.headers["x-request-id"] == "mine"
            with pytest.raises(InvalidStatus, match="429"), opened(port, additional_headers=keys[0]):
                pass
            with opened(port, additional_headers=keys[1]) as other:
                first = asked(own, input="Hi")[-1]["response"]["id"]
                assert fake.calls[-1].client_id == "mine"
                assert asked(own, input="Hi", previous_response_id=first)[-1]["type"] == "response.completed"
                for store in (True, False):
                    events = asked(other, input="Hi", previous_response_id=first, store=store)
                    assert events[-1]["status"] == 404, "another key's"
                fake.is_full = True
                assert asked(own, input="Hi")[-1]["status"] == 429
                fake.is_full = False
        eventually(lambda: observer.handled.count((ROUTE, 101)) == 2)
        counts = [observer.handled.count(("/v1/responses", code)) for code in (200, 404, 429)]
        assert counts == [2, 2, 1], "each message is a request"
        with opened(port, additional_headers=keys[0]):
            pass


def test_a_large_message_has_the_bounds_of_bodies() -> None:
    text = "x" * 600_000
    with serving(max_body_bytes=1 << 20, max_receiving_bytes=2 << 20) as (_, port):
        with opened(port, max_size=None) as own, opened(port) as other:
            for _ in range(3):
                asked(own, input="Hi", instructions=text)
            other.send("y" * ((1 << 20) + 1))
            with pytest.raises(ConnectionClosed) as caught:
                other.recv(timeout=5)
            assert caught.value.rcvd is not None and caught.value.rcvd.code == 1009
            assert asked(own, input="Hi")[-1]["type"] == "response.completed"


def test_what_a_connection_kept_takes_no_room_after_it() -> None:
    with serving(max_stored_response_bytes=30_000) as (_, port):
        url = f"http://127.0.0.1:{port}/v1/responses"
        kept = httpx.post(url, json={"input": "Hi"}).json()["id"]
        for _ in range(20):
            with opened(port) as own:
                for _ in range(2):
                    assert asked(own, input="Hi", store=False)[-1]["type"] == "response.completed"
        assert httpx.get(f"{url}/{kept}").status_code == 200
        with opened(port) as own:
            for _ in range(20):
                asked(own, input="Hi", store=False)
            assert httpx.get(f"{url}/{kept}").status_code == 200, "it keeps its last response alone"


def test_a_connection_ends_after_an_hour_and_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as open_now:
        with serving() as (_, port):
            lasting = open_now.enter_context(opened(port))
            assert asked(lasting, input="Hi")[-1]["type"] == "response.completed", "so its hour has begun"
            monkeypatch.setattr(response_sockets, "MOST_SECONDS", 0.1)
            short = open_now.enter_context(opened(port))
            event = json.loads(short.recv(timeout=5))
            assert (event["status"], event["error"]["code"]) == (400, "websocket_connection_limit_reached")
            assert asked(lasting, input="Hi")[-1]["type"] == "response.completed"
        for own, code in ((short, 1000), (lasting, 1001)):
            with pytest.raises(ConnectionClosed) as caught:
                own.recv(timeout=5)
            assert caught.value.rcvd is not None and caught.value.rcvd.code == code
