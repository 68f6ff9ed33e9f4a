"""Stored responses: limits, owners, and responses computed in the background."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from jaxllm.errors import EngineDeadError, OverloadedError
from jaxllm_server.responses.store import LostError, ResponseStore, StoredResponse, ordered, page_of
from jaxllm_server.shared.options import ServerOptions
from tests.support.fake_serving import SCRIPT, FakeServing, http_server

TEXT = "".join(SCRIPT)


def stored(num_bytes: int, previous: str | None = None) -> StoredResponse:
    return StoredResponse(b"r" * num_bytes, b"", previous)


def test_the_store_is_bounded_and_who_holds_the_most_loses_the_oldest() -> None:
    rng = random.Random(0)
    store, most = ResponseStore(20_000), 20_000
    kept: dict[tuple[str, str], StoredResponse] = {}  # least recently used first
    for step in range(3000):
        client, response_id = rng.choice("abc"), f"resp_{rng.randrange(12)}"
        if rng.random() < 0.2:
            assert store.delete(client, response_id) == (kept.pop((client, response_id), None) is not None)
        elif rng.random() < 0.3 and (client, response_id) in kept:
            assert list(store.chain(client, response_id)) == [response_id]
            kept[client, response_id] = kept.pop((client, response_id))
        else:
            one = stored(rng.randrange(25_000 if step % 50 == 0 else 2000))
            kept.pop((client, response_id), None)
            store.put(client, response_id, one)
            if one.size <= most:
                kept[client, response_id] = one
            while sum(each.size for each in kept.values()) > most:
                held = {own: sum(each.size for key, each in kept.items() if key[0] == own) for own, _ in kept}
                del kept[next(key for key in kept if held[key[0]] == max(held.values()))]
        assert store.num_bytes == sum(each.size for each in kept.values()) <= most
        for key in [(own, f"resp_{number}") for own in "abc" for number in range(12)]:
            if key in kept:
                assert store.get(*key) is kept[key]
            else:
                with pytest.raises(LostError):
                    store.get(*key)
    for key in kept:
        store.delete(*key)
    assert store.num_bytes == 0 and not store.kept and not store.held, "no client is remembered"


def test_a_chain_ends_where_one_is_lost_or_leads_to_itself() -> None:
    store = ResponseStore(10_000)
    for number, previous in ((0, None), (1, "resp_0"), (2, "resp_1")):
        store.put("a", f"resp_{number}", stored(1, previous))
    assert list(store.chain("a", "resp_2")) == ["resp_0", "resp_1", "resp_2"]
    store.put("a", "resp_0", stored(1, "resp_2"))
    assert list(store.chain("a", "resp_2")) == ["resp_0", "resp_1", "resp_2"]
    store.delete("a", "resp_1")
    with pytest.raises(LostError, match="resp_1"):
        store.chain("a", "resp_2")


@contextmanager
def serving(**options: Any) -> Iterator[tuple[FakeServing, httpx.Client]]:
    own = ServerOptions(**options)
    fake = FakeServing(options=own)
    with http_server(fake, own) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}/v1") as client:
        yield fake, client


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[FakeServing, httpx.Client]]:
    with serving() as own:
        yield own


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest) -> None:
    if "server" in request.fixturenames:
        fake, _ = request.getfixturevalue("server")
        fake.failure, fake.fails_at, fake.delay = None, 0, 0.0


def ended(client: httpx.Client, response_id: str) -> dict[str, Any]:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        response = client.get(f"/responses/{response_id}").json()
        if response["status"] not in ("queued", "in_progress"):
            return response
        time.sleep(0.01)
    raise AssertionError("a response did not end")


def test_in_the_background(server: tuple[FakeServing, httpx.Client]) -> None:
    fake, client = server
    fake.delay = 0.05
    first = client.post("/responses", json={"input": "Hi", "background": True, "metadata": {"a": "b"}}).json()
    assert (first["status"], first["output"], first["usage"]) == ("queued", [], None)
    answer = client.post("/responses", json={"input": "Hi", "previous_response_id": first["id"]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "previous_response_id")
    same = client.post("/responses", json={"input": "Hi", "request_id": first["id"].removeprefix("resp_")})
    assert (same.status_code, same.json()["error"]["code"]) == (409, "request_id_in_use")
    while (now := client.get(f"/responses/{first['id']}").json())["status"] != "in_progress" or not now["output"]:
        time.sleep(0.01)
    assert TEXT.startswith(now["output"][0]["content"][0]["text"]) and now["output"][0]["status"] == "in_progress"
    (item,) = client.get(f"/responses/{first['id']}/input_items").json()["data"]
    assert item["content"][0]["text"] == "Hi"
    done = ended(client, first["id"])
    assert (done["status"], done["output"][0]["content"][0]["text"]) == ("completed", TEXT)
    assert done["metadata"] == {"a": "b"} and done["usage"]["total_tokens"] == 12
    assert client.post(f"/responses/{first['id']}/cancel").json() == done, "it has ended: it is returned"


def test_cancelled_and_deleted(server: tuple[FakeServing, httpx.Client]) -> None:
    fake, client = server
    fake.delay = 0.05
    ids = [client.post("/responses", json={"input": "Hi", "background": True}).json()["id"] for _ in range(3)]
    at_once = client.post(f"/responses/{ids[0]}/cancel").json()
    while not client.get(f"/responses/{ids[1]}").json()["output"]:
        time.sleep(0.01)
    later = client.post(f"/responses/{ids[1]}/cancel").json()
    assert at_once["status"] == later["status"] == "cancelled" and later["output"][0]["status"] == "incomplete"
    assert client.get(f"/responses/{ids[1]}").json() == later == client.post(f"/responses/{ids[1]}/cancel").json()
    assert client.delete(f"/responses/{ids[2]}").json() == {"id": ids[2], "object": "response", "deleted": True}
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        answer = client.request(method, f"/responses/{ids[2]}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
    assert fake.num_live == 0, "their generations have ended too"


@pytest.mark.parametrize(
    ("failure", "code"), [(EngineDeadError("dead"), "server_error"), (OverloadedError("full", retry_after=1.0), "rate")]
)
def test_failures_are_kept(server: tuple[FakeServing, httpx.Client], failure: Exception, code: str) -> None:
    fake, client = server
    fake.failure, fake.fails_at = failure, 2
    begun = client.post("/responses", json={"input": "Hi", "background": True}).json()
    for response in (ended(client, begun["id"]), streamed(client)):
        assert response["status"] == "failed" and response["error"]["code"].startswith(code)
        assert response["output"][0]["content"][0]["text"] == "".join(SCRIPT[:2])
        assert response["output"][0]["status"] == "incomplete"


def streamed(client: httpx.Client) -> dict[str, Any]:
    """Stream a response that fails; return it as stored."""
    text = httpx.post(
        f"{client.base_url}responses", json={"input": "Hi", "stream": True}
    ).text  # its connection is closed
    names, events = [], []
    for event in text.strip().split("\n\n"):
        name, line = event.split("\n")
        names.append(name.removeprefix("event: "))
        events.append(json.loads(line.removeprefix("data: ")))
    assert names == [event["type"] for event in events] and names[-2:] == ["error", "response.failed"]
    assert events[-2]["message"] and events[-2]["code"] in ("engine_dead", "rate_limit_exceeded")
    kept = client.get(f"/responses/{events[-1]['response']['id']}").json()
    assert kept == events[-1]["response"]
    return kept


def test_what_is_asked_wrongly(server: tuple[FakeServing, httpx.Client]) -> None:
    _, client = server
    own = client.post("/responses", json={"input": "Hi"}).json()["id"]
    for method, path, body, status, name in (
        ("POST", "", {"input": "Hi", "previous_response_id": "x"}, 400, "previous_response_id"),
        ("POST", "", {"input": "Hi", "previous_response_id": "resp_x"}, 404, "previous_response_id"),
        ("POST", "", {"input": [{"id": "msg_x_0"}]}, 400, "input"),
        ("POST", "", {"input": "Hi", "max_output_tokens": 0}, 400, "max_output_tokens"),
        ("POST", "", {"input": "Hi", "model": "other"}, 404, "model"),
        ("POST", f"/{own}/cancel", None, 400, "response_id"),
        ("GET", "/x", None, 400, "response_id"),
        ("GET", f"/{own}?stream=true", None, 400, "stream"),
        ("GET", f"/{own}/input_items?limit=0", None, 400, "limit"),
        ("GET", f"/{own}/input_items?limit={'0' * 5000}5", None, 400, "limit"),
        ("GET", f"/{own}/input_items?limit=1000", None, 400, "limit"),
        ("GET", f"/{own}/input_items?after=unknown", None, 400, "after"),
        ("GET", f"/{own}/input_items?order=up", None, 400, "order"),
    ):
        answer = client.request(method, f"/responses{path}", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, name), answer.text


def test_items_are_listed_in_pages_and_referred_to(server: tuple[FakeServing, httpx.Client]) -> None:
    fake, client = server
    given = [{"role": "user", "content": f"{number}"} for number in range(5)]
    first = client.post("/responses", json={"input": given}).json()
    body = {"input": "more", "previous_response_id": first["id"]}
    second = client.post("/responses", json=body).json()
    texts, after, pages = [], "", 0
    while True:
        query = {"limit": 3, **({"after": after} if after else {})}
        page = client.get(f"/responses/{second['id']}/input_items", params=query).json()
        texts += [item["content"][0]["text"] for item in page["data"]]
        after, pages = page["last_id"], pages + 1
        if not page["has_more"]:
            break
    assert (texts, pages) == (["more", TEXT, "4", "3", "2", "1", "0"], 3)
    counted = client.post("/responses/input_tokens", json=body | {"previous_response_id": second["id"]})
    assert (
        counted.json() == {"object": "response.input_tokens", "input_tokens": 3} and "warnings" not in counted.headers
    )
    assert "typical_p" in client.post("/responses/input_tokens", json=body | {"typical_p": 1}).headers["warnings"]
    refers = [{"type": "item_reference", "id": first["output"][0]["id"]}, {"role": "user", "content": "And?"}]
    client.post("/responses", json={"input": refers})
    assert [message["content"] for message in fake.calls[-1].messages] == [TEXT, "And?"]


def test_a_response_is_its_keys_alone_and_may_be_kept_by_nobody() -> None:
    with serving(api_key=("a", "b")) as (_, client):
        keys = [{"authorization": f"Bearer {key}"} for key in "ab"]
        own = client.post("/responses", json={"input": "Hi", "request_id": "r"}, headers=keys[0]).json()
        assert client.get(f"/responses/{own['id']}", headers=keys[0]).json() == own
        body = {"input": "Hi", "previous_response_id": own["id"]}
        for answer in (
            client.get(f"/responses/{own['id']}", headers=keys[1]),
            client.post("/responses", json=body, headers=keys[1]),
            client.delete(f"/responses/{own['id']}", headers=keys[1]),
        ):
            assert answer.status_code == 404
        refers = {"input": [{"id": own["output"][0]["id"]}]}
        assert client.post("/responses", json=refers, headers=keys[1]).status_code == 400
        client.post("/responses", json={"input": "other", "request_id": "r"}, headers=keys[1])
        assert client.get(f"/responses/{own['id']}", headers=keys[0]).json() == own
        unkept = client.post("/responses", json={"input": "Hi", "store": False}, headers=keys[0]).json()
        assert client.get(f"/responses/{unkept['id']}", headers=keys[0]).status_code == 404
    with serving(max_stored_response_bytes=0) as (_, client):
        response = client.post("/responses", json={"input": "Hi"}).json()
        assert response["store"] is False and client.get(f"/responses/{response['id']}").status_code == 404


def test_background_responses_have_places_like_others() -> None:
    with serving(max_rpcs=3) as (fake, client):
        fake.delay = 0.2
        begun = [client.post("/responses", json={"input": "Hi", "background": True}) for _ in range(4)]
        assert [answer.status_code for answer in begun] == [200, 200, 429, 429]
        fake.delay = 0.0
        for answer in begun[:2]:
            assert ended(client, answer.json()["id"])["status"] == "completed"
        assert client.post("/responses", json={"input": "Hi", "background": True}).status_code == 200


def test_background_responses_have_room_for_their_bodies() -> None:
    """A large tool is held until its response is stored, then released; half of the room is for other clients."""
    text = "x" * 900_000
    tools = [{"type": "function", "name": "f", "description": text, "parameters": {"type": "object"}}]
    with serving(max_body_bytes=1 << 20, max_receiving_bytes=1 << 20) as (fake, client):
        for _ in range(2):
            fake.delay = 0.3
            body = {"input": "Hi", "background": True, "tools": tools}
            begun = [client.post("/responses", json=body) for _ in range(4)]
            assert [answer.status_code for answer in begun] == [200, 200, 429, 429]
            assert 2 * len(text) < fake.ledger.accounts()["requests"] < 2.2 * len(text)
            assert begun[0].json()["status"] == "queued" and begun[0].json()["tools"][0]["description"] == text
            small = client.post("/responses", json={"input": "Hi", "background": True})
            assert small.status_code == 200, "small ones have room whatever others hold"
            deleted = client.delete(f"/responses/{small.json()['id']}")
            assert deleted.status_code == 200
            fake.delay = 0.0
            cancelled = client.post(f"/responses/{begun[0].json()['id']}/cancel").json()
            assert cancelled["status"] in ("cancelled", "completed")
            assert client.get(f"/responses/{cancelled['id']}").json() == cancelled
            assert ended(client, begun[1].json()["id"])["tools"][0]["description"] == text
            assert client.delete(f"/responses/{begun[1].json()['id']}").status_code == 200
            assert client.delete(f"/responses/{cancelled['id']}").status_code == 200
            assert client.get(f"/responses/{cancelled['id']}").status_code == 404
            assert not any(fake.ledger.accounts().values())


def test_pages_are_slices_of_the_whole_list() -> None:
    draws = random.Random(3)
    for _ in range(200):
        count = draws.randrange(1, 5)
        names = [[f"{turn}-{number}" for number in range(draws.randrange(1, 4))] for turn in range(2 * count + 1)]
        lists = [[{"id": each} for each in own] for own in names]
        chain = [
            StoredResponse(
                json.dumps({"output": lists[2 * turn + 1]}).encode(), json.dumps(lists[2 * turn]).encode(), None
            )
            for turn in range(count)
        ]
        is_ascending, limit = draws.random() < 0.5, draws.randrange(1, 9)
        whole = [each for own in lists for each in own][:: 1 if is_ascending else -1]
        after = draws.choice([None, *(each["id"] for each in whole)])
        start = 0 if after is None else whole.index({"id": after}) + 1
        page = page_of(ordered(chain, lists[-1], is_ascending), limit, after)
        assert page["data"] == whole[start : start + limit]
        assert page["has_more"] == (start + limit < len(whole))


def test_a_short_page_reads_no_more_of_a_conversation_than_it_shows() -> None:
    unreadable = StoredResponse(b"no JSON", b"no JSON", None)
    last = StoredResponse(json.dumps({"output": [{"id": "b"}]}).encode(), json.dumps([{"id": "a"}]).encode(), None)
    own: list[dict[str, Any]] = [{"id": "c"}]
    page = page_of(ordered([unreadable, last], own, is_ascending=False), 2, None)
    assert [each["id"] for each in page["data"]] == ["c", "b"] and page["has_more"]  # type: ignore[union-attr]
