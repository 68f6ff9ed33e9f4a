"""Servers of small models that embed, classify and score: concurrent requests get the results of single ones."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from jaxllm import Client, errors
from jaxllm.commands import cli
from tests.hostile.conftest import wait_idle
from tests.hostile.machine import resident_bytes
from tests.support.pooling_models import LETTERS, bert
from tests.support.serving_process import ServingProcess
from tests.support.sizes import SLOTS, flags

pytestmark = pytest.mark.ci
OWN = ("--load-format", "dummy", "--served-model-name", "m", *flags(SLOTS))
LABELS = {"embedder": (), "classifier": ("dull", "odd", "witty"), "scorer": ("relevant",)}
Ask = Callable[[str, dict[str, Any]], dict[str, Any]]


@pytest.fixture(scope="module", params=LABELS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingProcess]:
    folder = bert(tmp_path_factory.mktemp("model"), LABELS[request.param], (8, 16))
    with ServingProcess(str(folder), *OWN) as process:
        process.kind = request.param  # type: ignore[attr-defined]
        yield process


def text(rng: random.Random) -> str:
    return " ".join("".join(rng.choices(LETTERS, k=rng.randint(1, 6))) for _ in range(rng.randint(0, 5)))


def body_of(rng: random.Random, kind: str) -> tuple[str, dict[str, Any]]:
    """Draw a request, of up to forty texts, that a model of a kind supports."""
    texts = [text(rng) for _ in range(rng.choice([1, 2, 5, 40]))]
    inputs: Any = texts
    if rng.random() < 0.3:
        inputs = [[2, *rng.choices(range(4, 56), k=rng.randint(1, 30)), 3] for _ in texts]
    cut = {"truncate_prompt_tokens": rng.choice([None, -1, 7])}
    paths = {"embedder": ["/v1/embeddings", "/pooling", "/score", "/rerank"], "classifier": ["/classify", "/pooling"]}
    path = rng.choice(paths.get(kind, ["/classify", "/pooling", "/score", "/v1/score", "/v2/rerank"]))
    if "score" in path or "rerank" in path:
        names = ("query", "documents") if "rerank" in path else ("queries", "documents")
        return path, dict(zip(names, ("ab", texts), strict=True))
    if kind == "embedder":
        cut |= {"dimensions": rng.choice([None, 8, 16]), "normalize": rng.choice([None, False])}
    elif rng.random() < 0.5:
        cut |= {"use_activation": False}
    return path, {"input": inputs, **cut}


def numbers(path: str, answer: dict[str, Any]) -> dict[int, Any]:
    """Return the result for each input."""
    items = answer["results" if "rerank" in path else "data"]
    names = ("embedding", "data", "probs", "score", "relevance_score")
    return {item["index"]: next(item[name] for name in names if name in item) for item in items}


def alone(body: dict[str, Any], index: int) -> dict[str, Any]:
    """Return a body with one of the texts."""
    name = "documents" if "documents" in body else "input"
    return {**body, name: [body[name][index]]}


def test_every_output_is_that_of_its_text_alone(server: ServingProcess) -> None:
    kind, rng = server.kind, random.Random(5)  # type: ignore[attr-defined]
    bodies = [body_of(rng, kind) for _ in range(40)]

    async def ask_all() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=12)  # more would fill the queue of eight slots
        async with httpx.AsyncClient(base_url=server.http, timeout=60, limits=limits) as http:
            return await asyncio.gather(*(http.post(path, json=body) for path, body in bodies))

    answers = asyncio.run(ask_all())
    with httpx.Client(base_url=server.http, timeout=60) as http:
        for (path, body), answer in zip(bodies, answers, strict=True):
            assert answer.status_code == 200, answer.text
            together = numbers(path, answer.json())
            one = rng.randrange(len(together))
            (expected,) = numbers(path, http.post(path, json=alone(body, one)).json()).values()
            assert np.allclose(together[one], expected, atol=1e-6)
            if path == "/v1/embeddings":
                assert len(together[one]) == (body["dimensions"] or 32)
    wait_idle(server)


def test_what_the_model_does_not_do_is_refused_by_name(server: ServingProcess) -> None:
    kind = server.kind  # type: ignore[attr-defined]
    does = {"embedder": ("embed", "score"), "classifier": ("classify",), "scorer": ("classify", "score")}[kind]
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "embed": ("/v1/embeddings", {"input": "a"}),
        "classify": ("/classify", {"input": "a"}),
        "score": ("/rerank", {"query": "a", "documents": ["b"]}),
        "generate": ("/v1/completions", {"prompt": "a"}),
    }
    for task, (path, body) in bodies.items():
        answer = httpx.post(f"{server.http}{path}", json=body, timeout=20)
        assert answer.status_code == (200 if task in does else 400)
        if task not in does:
            error = answer.json()["error"]
            assert error["code"] == "feature_disabled" and error["message"].startswith("The model m ")
            assert all(word.rstrip("y") in error["message"] for word in does)
    assert httpx.get(f"{server.http}/v1/models").json()["data"][0]["id"] == "m"
    chat = {"messages": [{"role": "user", "content": "a"}]}
    assert httpx.post(f"{server.http}/v1/chat/completions", json=chat).json()["error"]["code"] == "feature_disabled"


def test_pooled_requests_are_counted(server: ServingProcess) -> None:
    def count(name: str) -> float:
        page = httpx.get(f"{server.http}/metrics").text
        return sum(float(value) for value in re.findall(rf"^jaxllm:{name}(?:{{.*}})? (\S+)$", page, re.MULTILINE))

    names = ("request_success_total", "prompt_tokens_total", "e2e_request_latency_seconds_count")
    before = [count(name) for name in names]
    body = {"input": ["ab", "abc", "abcd"]}
    usage = httpx.post(f"{server.http}/pooling", json=body, timeout=20).json()["usage"]
    after = [count(name) for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [3, usage["prompt_tokens"], 3]
    assert re.search(r'requests_handled_total{.*route="/pooling"', httpx.get(f"{server.http}/metrics").text)


@pytest.mark.slow
def test_a_hundred_thousand_texts_in_steady_memory(tmp_path: Path) -> None:
    rng = random.Random(2)
    texts = [text(rng) for _ in range(5000)]
    bodies = [json.dumps({"input": texts[start : start + 500]}) for start in range(0, 5000, 500)]

    async def ask(count: int) -> None:
        async with httpx.AsyncClient(base_url=server.http, timeout=120) as http:

            async def client(own: list[str]) -> None:
                for body in own:
                    answer = await http.post(
                        "/v1/embeddings", content=body, headers={"content-type": "application/json"}
                    )
                    assert len(answer.json()["data"]) == 500

            await asyncio.gather(*(client([*bodies * count][start::4]) for start in range(4)))

    with ServingProcess(str(bert(tmp_path)), *OWN) as server:
        asyncio.run(ask(4))
        before = resident_bytes(server.process.pid)
        asyncio.run(ask(16))
        grown = resident_bytes(server.process.pid) - before
        print(f"{grown / 2**20:.1f} MiB more after 80,000 texts")
        assert grown < 20 << 20
        assert (
            'compilations_after_ready_total{engine="0",model_name="m"} 0.0' in httpx.get(f"{server.http}/metrics").text
        )
        wait_idle(server)


def test_grpc_answers_as_http_does(server: ServingProcess) -> None:
    kind, rng = server.kind, random.Random(6)  # type: ignore[attr-defined]
    texts = [text(rng) or "a" for _ in range(100)]
    with Client(server.grpc) as client, httpx.Client(base_url=server.http, timeout=60) as http:
        model = client.models()[0]

        def ask(path: str, **body: Any) -> list[Any]:
            return list(numbers(path, http.post(path, json=body).raise_for_status().json()).values())

        if kind == "embedder":
            expected = ask("/v1/embeddings", input=texts, dimensions=8)
            given = client.stream_embed(iter(texts), dimensions=8).result()
            np.testing.assert_allclose([one.values for one in given], expected, atol=1e-6)
            assert [one.index for one in given] == list(range(100))
            np.testing.assert_allclose(client.embed(texts[3], dimensions=8).values, expected[3], atol=1e-6)
            bad = client.stream_embed([*texts, "a" * 99, *texts])
            with pytest.raises(errors.ContextLengthError, match=r"^Input 100: This model's maximum context length is"):
                bad.result()
            assert (model.pooled_size, model.dimensions, model.labels) == (32, (8, 16), ())
        if kind != "scorer":
            assert model.tasks == (("embed", "score") if kind == "embedder" else ("classify",))
        if kind != "embedder":
            for use in (None, False):
                given = [client.classify(own, use_activation=use) for own in texts[:5]]
                expected = ask("/classify", input=texts[:5], use_activation=use)
                np.testing.assert_allclose([one.values for one in given], expected, atol=1e-6)
                assert all(one.label == model.labels[np.argmax(one.values)] for one in given)
        if kind != "classifier":
            pairs = ask("/score", queries="ab", documents=texts)
            np.testing.assert_allclose(client.score("ab", texts).values, pairs, atol=1e-6)
        for refused in (client.classify if kind == "embedder" else client.embed, client.generate):
            with pytest.raises(errors.FeatureDisabledError, match=r"^The model m (embeds|classifies|scores) "):
                refused("a")


def test_bench_serve_measures_embeddings(
    server: ServingProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    is_embedder = server.kind == "embedder"  # type: ignore[attr-defined]
    for backend, base, size in (("openai", server.http, 3), ("grpc", server.grpc, 3), ("grpc", server.grpc, 1)):
        saved = tmp_path / f"{backend}-{size}.json"
        arguments = ["--backend", backend, "--base-url", base, "--endpoint", "embeddings", "--num-prompts", "10"]
        arguments += ["--input-len", "12", "--embed-batch-size", str(size), "--result-filename", str(saved)]
        code = cli.main(["bench", "serve", *arguments, "--save-result"])
        out, err = capsys.readouterr()
        assert code == (0 if is_embedder else 1), err
        if is_embedder:
            result = json.loads(saved.read_text())
            assert (result["completed"], result["total_texts"]) == (-(-10 // size), 10), out
            assert (result["total_input_tokens"], result["warnings"]) == (120, [])
        else:
            assert "task is not 'embed'" in err
