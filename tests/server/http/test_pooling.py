"""Embeddings, classes and scores over HTTP, in front of a scripted `Serving`; `openai/` tests the bodies' meaning."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from jaxllm.errors import FeatureDisabledError, OverloadedError, RequestFailedError, UserError
from jaxllm_server.openai.pooling import REPLIES
from jaxllm_server.pooling.pool_calls import PoolCall
from jaxllm_server.shared.options import ServerOptions
from tests.server.openai.test_pooling import LEAST
from tests.support.failures import eventually
from tests.support.fake_serving import LABELS, FakeServing, http_server, pooled, raw_exchange

wait_for = functools.partial(eventually, seconds=3.0)


@pytest.fixture
def server() -> Iterator[Any]:
    serving = FakeServing()
    with http_server(serving, ServerOptions(max_pooling_inputs=600)) as port:
        url = f"http://127.0.0.1:{port}"
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with client, httpx.Client(base_url=url) as http:
            yield SimpleNamespace(serving=serving, port=port, client=client, http=http)


def test_embeddings_of_the_openai_client(server: Any) -> None:
    server.serving.width = 300
    texts = ["Once", "upon", ""]
    for form in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}, {"dimensions": 7}):
        answer = server.client.embeddings.create(model="fake", input=texts, user="u", **form)
        assert (answer.object, answer.model) == ("list", "fake") and answer.id.startswith("embd-")
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (9, 9)
        call = PoolCall(task="embed", inputs=texts)
        for index, item in enumerate(answer.data):
            found = item.embedding
            if isinstance(found, str):
                found = np.frombuffer(base64.b64decode(found), "<f4")
            assert np.array_equal(np.float32(found), pooled(index, call, 300)[: form.get("dimensions")])
            assert (item.index, item.object) == (index, "embedding")
    ids = server.client.embeddings.create(model="fake", input=[[1, 2], [3]])
    assert len(ids.data) == 2 and server.serving.calls[-1].inputs == [[1, 2], [3]]


@pytest.mark.parametrize("path", REPLIES)
def test_every_path_answers(server: Any, path: str) -> None:
    answer = server.http.post(path, json={**LEAST[path], "request_id": "mine"}, headers={"x-request-id": "theirs"})
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert {"id", "object", "created", "model", "usage"} <= body.keys() and body["id"].endswith("-mine")
    (item,) = body[REPLIES[path].list_name]
    assert item["index"] == 0
    if path == "/classify":
        assert item["label"] in LABELS
    (call,) = server.serving.calls
    assert (call.client, call.client_id, call.request_id) == ("loopback", "theirs", "mine")
    assert server.serving.askers == ["loopback"]


def test_a_large_answer_is_written_beside_the_loop(server: Any) -> None:
    server.serving.width = 400
    body = {"input": ["a"] * 600}
    assert len(server.http.post("/v1/embeddings", json=body).json()["data"]) == 600
    assert server.serving.num_off_loop == 1
    server.http.post("/v1/embeddings", json={"input": ["a"] * 9})
    assert server.serving.num_off_loop == 1


@pytest.mark.parametrize(
    ("path", "failure", "status", "parameter"),
    [
        ("/v1/embeddings", UserError("no", "inputs"), 400, "input"),
        ("/score", UserError("no", "inputs"), 400, "text_1"),
        ("/v2/rerank", UserError("no", "prompt"), 400, "query"),
        ("/score", UserError("no", "pairs"), 400, "text_2"),
        ("/rerank", UserError("no", "pairs"), 400, "documents"),
        ("/pooling", UserError("no", "dimensions"), 400, "dimensions"),
        ("/classify", FeatureDisabledError("no", "model"), 400, "model"),
        ("/pooling", OverloadedError("no", 1.0), 429, None),
        ("/classify", RequestFailedError("no"), 500, None),
    ],
)
def test_what_fails_is_named_as_the_body_has_it(
    server: Any, path: str, failure: Exception, status: int, parameter: str | None
) -> None:
    server.serving.failure = failure
    answer = server.http.post(path, json=LEAST[path])
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, parameter)


def test_what_is_left_is_aborted_when_the_client_goes(server: Any) -> None:
    server.serving.delay = 0.05
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/embeddings", json={"input": ["a"] * 500}, timeout=0.3)
    wait_for(lambda: server.serving.calls and not server.serving.num_live)


@pytest.mark.parametrize("path", [pytest.param(path, marks=[pytest.mark.ci] * ("/v2" not in path)) for path in REPLIES])
def test_bodies_that_hurt_are_refused_before_anything_is_computed(server: Any, path: str) -> None:
    name = next(iter(LEAST[path]))
    deep: Any = "a"
    for _ in range(60):
        deep = [deep]
    mixed = [["a", 1, None, 1.5, {}, [], True][number % 7] for number in range(50_000)]
    many = ["a"] * 400_000
    ids = [[1]] * 100_000
    broken = [f'{{"{name}": {value}}}' for value in ("NaN", '"\\ud800"', f'"a", "{name}": "b"')]
    bodies = [{**LEAST[path], name: value} for value in (deep, mixed, many, ids, {"text": deep}, {"a": many})]
    for body in [*map(json.dumps, bodies), *broken]:
        answer = server.http.post(path, content=body, headers={"content-type": "application/json"}, timeout=60)
        assert answer.status_code == 400 and len(answer.content) < 500, body[:99]
    assert not server.serving.calls
    too_large = (
        b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99999999\r\n\r\n"
    )
    assert b" 413 " in raw_exchange(server.port, too_large % path.encode()).split(b"\r\n")[0]
