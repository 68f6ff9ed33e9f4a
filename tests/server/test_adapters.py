"""Adapters under `jaxllm serve`: names that clients switch between while others are loaded and unloaded beside them."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import AsyncOpenAI

from jaxllm import Client
from jaxllm.commands import cli
from jaxllm.embedded import MODEL_DIR
from tests.support.adapters import write_adapter
from tests.support.serving_process import ServingProcess
from tests.support.sizes import SLOTS, flags

MODEL, CONTENTS = "jaxllm-embedded", ("a", "b", "c")
PROMPTS = ("Once upon a time", "Tom had a red ball.", "One sunny day")
TEMPLATE = "{% for message in messages %}[{{ message['content'] }}]{% endfor %} Once upon a time"
MESSAGES: Any = [{"role": "user", "content": "Hi"}]
OWN: Any = {"temperature": 0, "max_tokens": 12}
RANK = 4
WARM_LOADS = 200  # after which nothing grows any more
MOST_GROWTH = 32 << 20  # bytes, in 800 further loads, of 1 MB each


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(CONTENTS):
        write_adapter(root / name, MODEL_DIR, RANK, seed=seed, strength=0.5)
    (root / "c" / "chat_template.jinja").write_text(TEMPLATE)
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ServingProcess]:
    lora = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", str(RANK), "--lora-root", str(root))
    modules = (f"first={root / 'a'}", json.dumps({"name": "second", "path": str(root / "b")}))
    own = ("--max-queued-requests", "1000", "--enable-log-requests")
    with ServingProcess(*flags(SLOTS), *own, *lora, "--lora-modules", *modules) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ServingProcess) -> Iterator[Client]:
    with Client(server.grpc) as client:
        yield client


@pytest.fixture(scope="module")
def texts(client: Client) -> dict[tuple[str, str], str]:
    """What the model says with each content, "" for none, to each prompt."""
    client.load_adapter("third", "c")
    names = {"": "", "a": "first", "b": "second", "c": "third"}
    found = {
        (own, prompt): client.generate(prompt, model=name, **OWN).text
        for own, name in names.items()
        for prompt in PROMPTS
    }
    client.unload_adapter("third")
    assert all(len({found[own, prompt] for own in names}) == len(names) for prompt in PROMPTS), sorted(found.items())
    return found


def test_names_are_models_over_both_protocols(
    server: ServingProcess, client: Client, texts: dict[tuple[str, str], str]
) -> None:
    with httpx.Client(base_url=server.http, timeout=60) as http:
        cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
        assert list(cards) == [MODEL, "first", "second"] and {cards[n]["parent"] for n in ("first", "second")} == {
            MODEL
        }
        for name, content in (("first", "a"), ("second", "b"), (MODEL, "")):
            for prompt in PROMPTS:
                body = {"model": name, "prompt": prompt, **OWN}
                answer = http.post("/v1/completions", json=body).json()
                assert (answer["choices"][0]["text"], answer["model"]) == (texts[content, prompt], name)
        stream = client.stream(PROMPTS[0], adapter="second", **OWN)
        assert stream.result().text == texts["b", PROMPTS[0]] and stream.so_far.model == "second"
    assert [(own.name, own.rank) for own in client.adapters()] == [("first", RANK), ("second", RANK)]
    assert server.wait_for(r"request \w+: adapter (first), 4 prompt tokens")


def test_a_template_of_an_adapters_own_is_used_for_its_requests(
    server: ServingProcess, client: Client, texts: dict[tuple[str, str], str]
) -> None:
    client.load_adapter("styled", "c")
    rendered = "[Hi] Once upon a time"
    assert client.tokenize(MESSAGES, model="styled") == client.tokenize(rendered, add_special_tokens=False)
    assert (
        client.tokenize(MESSAGES)
        == client.tokenize(MESSAGES, model="first")
        != client.tokenize(MESSAGES, model="styled")
    )
    expected = client.generate(rendered, adapter="styled", add_special_tokens=False, **OWN)
    with httpx.Client(base_url=server.http, timeout=60) as http:
        answer = http.post("/v1/chat/completions", json={"model": "styled", "messages": MESSAGES, **OWN}).json()
    assert answer["choices"][0]["message"]["content"] == expected.text
    assert answer["usage"]["prompt_tokens"] == expected.usage.prompt_tokens
    client.unload_adapter("styled")


@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_clients_switch_while_adapters_come_and_go(
    server: ServingProcess, client: Client, texts: dict[tuple[str, str], str], count: int
) -> None:
    rng = random.Random(count)
    sizes: list[int] = []

    async def say(openai: AsyncOpenAI, name: str, prompt: str, begun: asyncio.Event | None = None) -> str:
        pieces = []
        async for chunk in await openai.completions.create(model=name, prompt=prompt, stream=True, **OWN):
            assert chunk.model == name
            if begun is not None:
                begun.set()
            pieces.append(chunk.choices[0].text)
        return "".join(pieces)

    async def switch(openai: AsyncOpenAI, is_over: asyncio.Event) -> int:
        num_asked = 0
        while not is_over.is_set():
            (name, content), prompt = rng.choice([(MODEL, ""), ("first", "a"), ("second", "b")]), rng.choice(PROMPTS)
            assert await say(openai, name, prompt) == texts[content, prompt], name
            num_asked += 1
        return num_asked

    async def come_and_go(openai: AsyncOpenAI, http: httpx.AsyncClient, number: int) -> None:
        """Load under one of few names, ask, and unload, or load other content in place, while the answer comes."""
        name, (content, other) = f"guest-{number % 2}", rng.sample(CONTENTS, 2)
        answer = await http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": content})
        assert answer.status_code == 200, answer.text
        begun, prompt = asyncio.Event(), rng.choice(PROMPTS)
        saying = asyncio.ensure_future(say(openai, name, prompt, begun))
        await asyncio.wait([saying, asyncio.ensure_future(begun.wait())], return_when=asyncio.FIRST_COMPLETED)
        if number % 4 == 3:
            body = {"lora_name": name, "lora_path": other, "load_inplace": True}
            answer = await http.post("/v1/load_lora_adapter", json=body)
            assert answer.status_code == 200, answer.text
            assert await say(openai, name, prompt) == texts[other, prompt]
        assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": name})).status_code == 200
        gone = await http.post("/v1/completions", json={"model": name, "prompt": prompt})
        assert gone.status_code == 404, "at once"
        assert await saying == texts[content, prompt], "what ran has kept its adapter"

    async def run() -> None:
        openai = AsyncOpenAI(base_url=f"{server.http}/v1", api_key="none", max_retries=0)
        async with openai, httpx.AsyncClient(base_url=server.http, timeout=60) as http:
            is_over = asyncio.Event()
            switching = [asyncio.ensure_future(switch(openai, is_over)) for _ in range(3)]
            for number in range(0, count, 2):
                await asyncio.gather(*(come_and_go(openai, http, each) for each in (number, number + 1)))
                sizes.append(psutil.Process(server.process.pid).memory_info().rss)
            is_over.set()
            assert sum(await asyncio.gather(*switching)) > count / 4

    asyncio.run(run())
    assert [own.name for own in client.adapters()] == ["first", "second"]
    growth = sizes[-1] - sizes[min(len(sizes), WARM_LOADS // 2) - 1]
    print(f"{count} loads, {growth / 2**20:.1f} MiB more in the last {2 * (len(sizes) - WARM_LOADS // 2)}")
    assert growth < MOST_GROWTH
    with httpx.Client(base_url=server.http) as http:
        lines = http.get("/metrics").text.splitlines()
    finished = [line for line in lines if line.startswith("jaxllm:lora_requests_finished_total")]
    assert len(finished) == 3, "the model's two, and the others together"
    assert any(line.startswith("jaxllm:compilations_after_ready_total") and line.endswith(" 0.0") for line in lines)


def test_bench_serve_asks_for_adapters_by_name(server: ServingProcess, tmp_path: Path, client: Client) -> None:
    def finished() -> int:
        lines = httpx.get(f"{server.http}/metrics").text.splitlines()
        found = [
            line
            for line in lines
            if line.startswith("jaxllm:lora_requests_finished_total") and 'name="other"' not in line
        ]
        return int(sum(float(line.split()[-1]) for line in found))

    for backend, base in (("openai", server.http), ("grpc", server.grpc)):
        before = finished()
        arguments = ["bench", "serve", "--backend", backend, "--base-url", base, "--num-prompts", "6", "--input-len=8"]
        arguments += ["--output-len=4", "--save-result", "--result-filename", str(tmp_path / backend)]
        assert cli.main([*arguments, "--lora-modules", "first", "second"]) == 0
        assert json.loads((tmp_path / backend).read_text())["lora_modules"] == ["first", "second"]
        assert finished() == before + 6


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("x=/no/adapter", "adapter 'x': there is no folder /no/adapter"),
        ("x={root}", "adapter 'x': {root} has no adapter_config.json."),
        (f"{MODEL}={{root}}/a", f"--lora-modules: {MODEL} is the name of the model."),
    ],
)
def test_a_broken_module_is_one_line_and_no_server(
    root: Path, module: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["serve", "--port", "0", "--grpc-port", "0", "--enable-lora", "--lora-modules"]
    assert cli.main([*arguments, module.format(root=root)]) == 2
    err = capsys.readouterr().err
    assert said.format(root=root) in err and err.count("\n") == 1, err
