"""`jaxllm serve` end to end: real processes, real clients, the embedded model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI

from jaxllm import AsyncClient, Client
from jaxllm.bench.explain import programs_in, read_trace
from jaxllm.commands import cli
from tests.support import paths
from tests.support.serving_process import QUICK, ServingProcess
from tests.support.sizes import SLOTS

MODEL = "jaxllm-embedded"
PROMPT = "Once upon a time"
SAMPLED = {"temperature": 0.9, "seed": 5, "max_tokens": 24}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingProcess]:
    traces = str(tmp_path_factory.mktemp("traces"))
    with ServingProcess(*QUICK, "--max-queued-requests", "1000", "--profile", traces, "--profile-steps", "4") as server:
        yield server


@pytest.fixture(scope="module")
def openai(server: ServingProcess) -> OpenAI:
    return OpenAI(base_url=f"{server.http}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(server: ServingProcess) -> Iterator[Client]:
    with Client(server.grpc) as client:
        yield client


def ids_of(text: str, openai: OpenAI) -> list[int]:
    return openai.post("/../tokenize", body={"prompt": text, "add_special_tokens": False}, cast_to=object)["tokens"]  # type: ignore[index]


@pytest.mark.ci
def test_the_first_steps_are_traced(server: ServingProcess, client: Client) -> None:
    client.generate(PROMPT, max_tokens=32, ignore_eos=True)
    events = read_trace(Path(server.wait_for(r"trace: (\S+)")))
    assert sum(event["name"] == "step" for event in events) == 4
    assert {"plan", "dispatch", "wait", "commit"} <= {event["name"] for event in events} and programs_in(events)


def test_every_path_gives_the_same_tokens(server: ServingProcess, openai: OpenAI, client: Client) -> None:
    whole = client.generate(PROMPT, **SAMPLED)
    assert len(whole.token_ids) == whole.usage.completion_tokens > 4
    texts = {
        "gRPC stream": "".join(delta.text for delta in client.stream(PROMPT, **SAMPLED)),
        "completions": openai.completions.create(model=MODEL, prompt=PROMPT, **SAMPLED).choices[0].text,
        "completions stream": "".join(
            chunk.choices[0].text
            for chunk in openai.completions.create(model=MODEL, prompt=PROMPT, stream=True, **SAMPLED)
        ),
        "buf curl": "".join(output["text"] for output in buf_curl(server, "Generate")[0]["outputs"]),
        "buf curl stream": "".join(
            delta.get("text", "")
            for message in buf_curl(server, "StreamGenerate")
            for delta in message.get("deltas", [])
        ),
        "offline": offline(),
    }
    assert texts == dict.fromkeys(texts, whole.text)


def test_fields_that_vllm_has_beside_openais(openai: OpenAI) -> None:
    """Fields of vLLM that OpenAI lacks: each has the effect of an equivalent request."""
    messages: list[Any] = [{"role": "user", "content": "Tell me a story."}]
    told: dict[str, Any] = {"model": MODEL, **SAMPLED, "extra_body": {"return_token_ids": True}}
    whole = openai.chat.completions.create(messages=messages, **told)
    ids = whole.prompt_token_ids
    told["extra_body"] = {"return_token_ids": True, "prompt_token_ids": ids}
    written = openai.chat.completions.create(messages=[], **told)
    assert written.choices[0].message.content == whole.choices[0].message.content
    assert written.prompt_token_ids == ids
    text = PROMPT * 3
    cut = {"return_token_ids": True, "truncate_prompt_tokens": 5, "truncation_side": "right"}
    answer = openai.completions.create(model=MODEL, prompt=text, max_tokens=1, extra_body=cut)
    assert answer.choices[0].prompt_token_ids == ids_of(text, openai)[:5]
    several = openai.completions.create(model=MODEL, prompt=PROMPT, n=4, logprobs=0, **SAMPLED)
    means = [sum(choice.logprobs.token_logprobs) / len(choice.logprobs.tokens) for choice in several.choices]
    best = openai.completions.create(model=MODEL, prompt=PROMPT, n=2, best_of=4, **SAMPLED)
    ranked = sorted(zip(means, several.choices, strict=True), key=lambda pair: -pair[0])
    assert [choice.text for choice in best.choices] == [choice.text for _, choice in ranked[:2]]
    assert best.usage == several.usage
    with pytest.raises(BadRequestError, match="cannot fill in the middle"):
        openai.completions.create(model=MODEL, prompt=PROMPT, suffix="The end.")


@pytest.mark.ci
@pytest.mark.parametrize("backend", ["grpc", "openai", "openai-chat"])
def test_bench_serve_measures_it(
    backend: str, server: ServingProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = server.grpc if backend == "grpc" else server.http
    arguments = ["bench", "serve", "--backend", backend, "--base-url", base, "--num-prompts", "5", "--num-warmups", "1"]
    arguments += ["--input-len=24", "--output-len=8", "--save-detailed", "--metrics-url", f"{server.http}/metrics"]
    arguments += ["--seed", str(len(backend))]  # prompts that no other backend has cached
    assert cli.main([*arguments, "--result-filename", str(tmp_path / "result.json")]) == 0, capsys.readouterr().err
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["input_lens"], result["output_lens"]) == (5, [24] * 5, [8] * 5)
    assert result["model_id"] == result["tokenizer_id"] == "jaxllm-embedded" and all(result["generated_texts"])
    assert result["warnings"] == [], "all lengths are as asked for, and the tokenizer counts as the server does"
    assert all(first > 0 for first in result["ttfts"]) and result["mean_tpot_ms"] > 0
    assert result["timeline"]["kv_usage"] and result["timeline"]["generated_tokens"][0] == 0
    assert cli.main([*arguments, "--result-filename", str(tmp_path / "again.json")]) == 0
    (warning,) = json.loads((tmp_path / "again.json").read_text())["warnings"]
    assert "prompt tokens came from the prefix cache: change --seed" in warning


@pytest.mark.parametrize("backend", ["grpc", "openai"])
def test_bench_serve_refuses_what_it_cannot_hold(
    backend: str, server: ServingProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    base = server.grpc if backend == "grpc" else server.http
    assert cli.main(["bench", "serve", "--backend", backend, "--base-url", base, "--num-prompts", "2"]) == 1
    err = capsys.readouterr().err
    assert "a prompt of 1024 tokens with an output of 128 is longer than the server's context of " in err
    assert err.count("\n") == 1 and err.endswith("lower --input-len or --output-len.\n")


def offline() -> str:
    """Return the output of the Python API in another process, with programs of other sizes than the server's."""
    code = f"""
from jaxllm import LLM, SamplingParams
with LLM(**{SLOTS!r}) as llm:
    print(llm.generate({PROMPT!r}, SamplingParams(**{SAMPLED!r}), use_tqdm=False)[0].outputs[0].text, end="")
"""
    environment = {**os.environ, "PYTHONPATH": str(paths.ROOT)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def buf_curl(server: ServingProcess, method: str) -> list[dict[str, Any]]:
    buf = Path(sys.executable).parent / "buf"
    found = str(buf) if buf.exists() else shutil.which("buf")
    if found is None:
        pytest.skip("buf is not installed")
    request = {
        "text": PROMPT,
        "sampling": {"temperature": SAMPLED["temperature"], "seed": SAMPLED["seed"]},
        "stop": {"maxTokens": SAMPLED["max_tokens"]},
    }
    url = f"http://{server.grpc}/jaxllm.v1.InferenceService/{method}"
    options = ["--protocol", "grpc", "--http2-prior-knowledge", "--reflect-protocol", "grpc-v1"]
    ran = subprocess.run([found, "curl", *options, "-d", json.dumps(request), url], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    messages, rest = [], ran.stdout.strip()
    while rest:
        message, end = json.JSONDecoder().raw_decode(rest)
        messages.append(message)
        rest = rest[end:].lstrip()
    return messages


def test_the_node_client_gets_the_same(server: ServingProcess, client: Client) -> None:
    node, modules = shutil.which("node"), paths.ROOT / "tests" / "clients" / "node" / "node_modules" / "@grpc"
    if node is None or not modules.exists():
        pytest.skip("make clients installs @grpc/grpc-js")
    script = paths.ROOT / "tests" / "clients" / "node" / "grpc.js"
    ran = subprocess.run([node, str(script), server.grpc, PROMPT], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    own = {"temperature": 0.9, "seed": 5, "max_tokens": 24}
    assert told["unary"] == told["stream"] == client.generate(PROMPT, **own).text
    assert told["error"] == 3 and told["cancelled"] == 1


def test_the_model_answers_in_a_chat(openai: OpenAI, client: Client) -> None:
    messages: Any = [{"role": "user", "content": "What is 47 + 38?"}]
    own = {"temperature": 0, "max_tokens": 40}
    answer = openai.chat.completions.create(model=MODEL, messages=messages, **own)
    assert "85" in (answer.choices[0].message.content or "") and answer.choices[0].finish_reason == "stop"
    assert client.chat(messages, **own).text == answer.choices[0].message.content
    chunks = list(openai.chat.completions.create(model=MODEL, messages=messages, stream=True, **own))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content


def test_messages_and_ollamas_api_say_what_a_chat_says(server: ServingProcess, openai: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What is 47 + 38?"}]
    same: dict[str, Any] = {"model": MODEL, "messages": messages, "temperature": 0}
    chat = openai.chat.completions.create(**same)
    with httpx.Client(base_url=server.http, timeout=60.0) as http:
        message = http.post("/v1/messages", json={**same, "max_tokens": 32_000}).json()  # more than the context holds
        counted = http.post("/v1/messages/count_tokens", json={"model": MODEL, "messages": messages}).json()
        stopped = http.post("/v1/messages", json={**same, "max_tokens": 99, "stop_sequences": ["8"]}).json()
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        tool = {"name": "add", "input_schema": {**schema, "additionalProperties": False}}
        forced = {"max_tokens": 99, "tools": [tool], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
        called = http.post("/v1/messages", json={**same, **forced}).json()
        body = {"model": MODEL, "messages": messages, "options": {"temperature": 0}, "stream": False}
        ollama = http.post("/api/chat", json=body).json()
    assert chat.usage is not None
    said, num_tokens = chat.choices[0].message.content, (chat.usage.prompt_tokens, chat.usage.completion_tokens)
    assert message["content"] == [{"type": "text", "text": said}] and message["stop_reason"] == "end_turn"
    assert (message["usage"]["input_tokens"], message["usage"]["output_tokens"]) == num_tokens
    assert counted == {"input_tokens": num_tokens[0]}
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "8")
    assert stopped["content"][0]["text"] == (said or "").partition("8")[0]
    assert called["stop_reason"] == "tool_use" and isinstance(called["content"][0]["input"]["a"], int)
    assert (ollama["message"]["content"], ollama["prompt_eval_count"], ollama["eval_count"]) == (said, *num_tokens)
    assert 0 < ollama["eval_duration"] < ollama["total_duration"]


def test_a_conversation_goes_on_from_a_response_that_is_kept(openai: OpenAI) -> None:
    first = openai.responses.create(model=MODEL, input="What is 47 + 38?", temperature=0)
    assert "85" in first.output_text
    own: Any = {"model": MODEL, "input": "And 3 + 5?", "temperature": 0, "previous_response_id": first.id}
    second = openai.responses.create(**own)
    with openai.responses.stream(**own) as stream:
        streamed = stream.get_final_response()
    assert streamed.output_text == second.output_text != "" and first.usage and second.usage
    assert second.usage.input_tokens > first.usage.total_tokens
    history = [*first.output, {"role": "user", "content": "And 3 + 5?"}]
    sent: Any = [{"role": "user", "content": "What is 47 + 38?"}, *history]
    again = openai.responses.create(model=MODEL, input=sent, temperature=0, store=False)
    assert again.output_text == second.output_text, "what a client sends back is what was kept"
    asked: Any = {"model": MODEL, "input": "Tell me a story.", "temperature": 0, "max_output_tokens": 8}
    logprobs = openai.responses.create(**asked, top_logprobs=2, include=["message.output_text.logprobs"])
    assert logprobs.status == "incomplete" and logprobs.output[0].type == "message"
    (part,) = logprobs.output[0].content
    assert part.type == "output_text" and part.logprobs is not None and len(part.logprobs) == 8
    assert "".join(entry.token for entry in part.logprobs) == part.text


def test_a_prompt_is_scored_without_an_output(openai: OpenAI) -> None:
    """Score a prompt like lm-eval: the numbers are those of an echo with a token, without that token's."""
    own: Any = {"model": MODEL, "prompt": [PROMPT, "The cat sat"], "echo": True, "logprobs": 2, "n": 2, "seed": 1}
    scored, sampled = (openai.completions.create(max_tokens=most, **own) for most in (0, 1))
    streamed = list(openai.completions.create(max_tokens=0, stream=True, **own))
    assert scored.usage is not None and scored.usage.completion_tokens == 0 and scored.usage.prompt_tokens > 4
    by_index = {choice.index: choice for event in streamed for choice in event.choices}
    assert len(streamed) == len(by_index) == len(scored.choices) == 4
    for zero, one in zip(scored.choices, sampled.choices, strict=True):
        assert (zero.text, zero.finish_reason) == (own["prompt"][zero.index // 2], "length")
        assert zero.logprobs is not None and one.logprobs is not None
        assert zero.logprobs.tokens == (one.logprobs.tokens or [])[:-1]
        told, wanted = zero.logprobs.token_logprobs or [], (one.logprobs.token_logprobs or [])[:-1]
        assert told[0] is None and told[1:] == pytest.approx(wanted[1:], abs=1e-4)
        other = by_index[zero.index]
        assert (other.text, other.finish_reason) == (zero.text, "length")
    whole = openai.completions.create(model=MODEL, prompt=[5] * 511, echo=True, logprobs=0, max_tokens=0)
    assert whole.usage is not None and whole.usage.total_tokens == 511
    with pytest.raises(BadRequestError, match="your prompt contains 512 input tokens") as caught:
        openai.completions.create(model=MODEL, prompt=[5] * 512, echo=True, logprobs=0, max_tokens=0)
    assert caught.value.code == "context_length_exceeded"


def random_call(rng: random.Random) -> dict[str, Any]:
    """Draw options that have the same name in both protocols."""
    own: dict[str, Any] = {"temperature": rng.choice([0, 0.7, 1.0, 1.5]), "seed": rng.randrange(2**31)}
    own["max_tokens"] = rng.randint(1, 20)
    if own["temperature"] and rng.random() < 0.2:
        own["n"] = rng.choice([2, 3])
    if rng.random() < 0.3:
        own["stop"] = rng.sample([" a", "e", "the", ".", "Tim", "\n"], 2)
    if rng.random() < 0.3:
        own["logprobs"] = rng.choice([0, 1, 4])
    if rng.random() < 0.3:
        own["top_p"], own["frequency_penalty"] = 0.9, 0.4
    if rng.random() < 0.2:
        own["logit_bias"] = {rng.randrange(3, 500): rng.choice([-100.0, 5.0, 100.0]) for _ in range(3)}
    return own


async def in_turn(count: int, width: int, one: Any) -> None:
    """Run `one(number)` for each number, `width` at a time."""
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await one(number)

    await asyncio.gather(*(work() for _ in range(width)))


def prompt_of(rng: random.Random) -> str:
    return " ".join(
        rng.choices(["Once", "Tim", "a", "the", "dog", "What is", "7 + 8", "naïve", "日本", "🙂"], k=rng.randint(1, 12))
    )


COUNTS = [300, pytest.param(1000, marks=pytest.mark.slow)]  # random requests


@pytest.mark.ci
@pytest.mark.parametrize("count", COUNTS)
async def test_streams_give_what_unary_calls_give_over_grpc(server: ServingProcess, count: int) -> None:
    async with AsyncClient(server.grpc) as client:

        async def one(number: int) -> None:
            rng = random.Random(number)
            prompt, own = prompt_of(rng), random_call(rng)
            whole = await client.generate(prompt, **own)
            stream = client.stream(prompt, **own)
            parts: dict[int, list[Any]] = {output.index: ["", [], [], None] for output in whole.outputs}
            async for delta in stream:
                part = parts[delta.index]
                assert part[3] is None
                part[0] += delta.text
                part[1] += delta.token_ids
                part[2] += delta.logprobs or []
                part[3] = delta.finish_reason
            for output in whole.outputs:
                text, ids, logprobs, reason = parts[output.index]
                assert (text, ids, reason) == (output.text, output.token_ids, output.finish_reason)
                # Other neighbours, other buckets: the last digits of logits differ.
                told = [entry.logprob for entry in output.logprobs or ()]
                assert [entry.logprob for entry in logprobs] == pytest.approx(told, abs=1e-4)
                assert [entry.token_id for entry in logprobs] == ([] if output.logprobs is None else ids)
            assert stream.usage is not None and whole.usage is not None
            assert stream.usage.prompt_tokens == whole.usage.prompt_tokens
            assert stream.usage.completion_tokens == whole.usage.completion_tokens
            assert whole.usage.completion_tokens == sum(len(output.token_ids) for output in whole.outputs)

        await in_turn(count, 24, one)


@pytest.mark.ci
@pytest.mark.parametrize("count", COUNTS)
async def test_streams_give_what_unary_calls_give_over_http(server: ServingProcess, count: int) -> None:
    async with AsyncOpenAI(base_url=f"{server.http}/v1", api_key="none", max_retries=0) as openai:

        async def one(number: int) -> None:
            rng = random.Random(-number - 1)
            prompt, own = prompt_of(rng), random_call(rng)
            own["extra_body"] = {"return_token_ids": True}
            if "logit_bias" in own:
                own["logit_bias"] = {str(token): bias for token, bias in own["logit_bias"].items()}
            whole = await openai.completions.create(model=MODEL, prompt=prompt, **own)
            texts = {choice.index: "" for choice in whole.choices}
            ids: dict[int, list[int]] = {choice.index: [] for choice in whole.choices}
            reasons: dict[int, str | None] = dict.fromkeys(texts)
            usage = None
            async for chunk in await openai.completions.create(
                model=MODEL, prompt=prompt, stream=True, stream_options={"include_usage": True}, **own
            ):
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
                    ids[choice.index] += getattr(choice, "token_ids", None) or []
                    reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            for choice in whole.choices:
                assert texts[choice.index] == choice.text
                assert ids[choice.index] == choice.token_ids  # type: ignore[attr-defined]
                assert reasons[choice.index] == choice.finish_reason
            assert usage == whole.usage and usage is not None
            assert usage.completion_tokens == sum(map(len, ids.values()))

        await in_turn(count, 24, one)


async def streams_of(server: ServingProcess, count: int, max_tokens: int) -> AsyncIterator[tuple[str, str, int]]:
    """Run streams on both protocols; return protocol, end and tokens of each."""
    async with (
        AsyncClient(server.grpc, retries=False) as client,
        AsyncOpenAI(base_url=f"{server.http}/v1", api_key="none", max_retries=0) as openai,
    ):

        async def over_grpc(number: int) -> tuple[str, str, int]:
            tokens, reason = 0, ""
            try:
                async for delta in client.stream(PROMPT, seed=number, max_tokens=max_tokens, ignore_eos=True):
                    tokens += len(delta.token_ids)
                    reason = delta.finish_reason or reason
            except Exception as error:
                reason = type(error).__name__
            return "grpc", reason, tokens

        async def over_http(number: int) -> tuple[str, str, int]:
            tokens, reason = 0, ""
            extra = {"ignore_eos": True, "return_token_ids": True}
            try:
                async for chunk in await openai.completions.create(
                    model=MODEL, prompt=PROMPT, seed=number, max_tokens=max_tokens, stream=True, extra_body=extra
                ):
                    for choice in chunk.choices:
                        tokens += len(getattr(choice, "token_ids", None) or [])
                        reason = choice.finish_reason or reason
            except Exception as error:
                reason = type(error).__name__
            return "http", reason, tokens

        tasks = [asyncio.ensure_future((over_grpc if n % 2 else over_http)(n)) for n in range(count)]
        for done in asyncio.as_completed(tasks):
            yield await done


async def arrived(server: ServingProcess, count: int) -> None:
    """Wait until the engine has received `count` requests, because requests after a SIGTERM are refused."""
    ours = ("jaxllm:num_requests_running", "jaxllm:num_requests_waiting{", "jaxllm:request_success_total")
    async with asyncio.timeout(60):
        while True:
            lines = httpx.get(f"{server.http}/metrics").text.splitlines()
            if sum(float(line.split()[-1]) for line in lines if line.startswith(ours)) >= count:
                return
            await asyncio.sleep(0.02)


@pytest.mark.ci
def test_fifty_streams_survive_a_sigterm() -> None:
    async def check(server: ServingProcess) -> list[tuple[str, str, int]]:
        async def later() -> None:
            await arrived(server, 50)
            long = {"input": PROMPT, "background": True, "ignore_eos": True, "max_output_tokens": 450}
            begun = httpx.post(f"{server.http}/v1/responses", json=long).json()
            await arrived(server, 51)
            server.signal(signal.SIGTERM)
            await asyncio.sleep(0.3)
            with contextlib.suppress(httpx.ConnectError, httpx.RemoteProtocolError):
                async with httpx.AsyncClient(base_url=server.http) as http:
                    assert (await http.get("/ready")).status_code == 503
                    refused = await http.post("/v1/completions", json={"prompt": "x"})
                    assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
                    assert (await http.get("/live")).status_code == 200
                    polled = (await http.get(f"/v1/responses/{begun['id']}")).json()
                    assert polled["status"] == "queued"

        signalling = asyncio.ensure_future(asyncio.to_thread(asyncio.run, later()))
        ended = [end async for end in streams_of(server, 50, 150)]
        await signalling
        return ended

    with ServingProcess(*QUICK) as server:
        ended = asyncio.run(check(server))
        assert len(ended) == 50
        assert {(reason, tokens) for _, reason, tokens in ended} == {("length", 150)}
        assert server.wait(40.0) == 0, "".join(server.log)
        assert any("all requests have finished" in line for line in server.log)


@pytest.mark.ci
def test_what_is_not_through_in_time_is_told_so_and_a_second_signal_ends_at_once() -> None:
    async def check(server: ServingProcess) -> list[tuple[str, str, int]]:
        async def later() -> None:
            await asyncio.sleep(1.0)
            server.signal(signal.SIGINT)

        signalling = asyncio.ensure_future(later())
        ended = [end async for end in streams_of(server, 40, 450)]
        await signalling
        return ended

    with ServingProcess(*QUICK, "--shutdown-timeout", "0.2") as server:
        ended = asyncio.run(check(server))
        assert {reason for protocol, reason, _ in ended if protocol == "grpc"} <= {"length", "DrainingError"}
        assert {reason for protocol, reason, _ in ended if protocol == "http"} <= {
            "length",
            "APIError",
            "InternalServerError",
        }
        assert any(reason != "length" for _, reason, _ in ended)
        assert server.wait(10.0) == 0
    for later in (0.0, 0.1, 0.3):  # during the load of the model, in a thread that runs XLA
        with ServingProcess(*QUICK, ready=False) as server:
            time.sleep(later)
            server.signal()
            server.signal()
            assert server.wait(10.0) in (0, 130)


@pytest.mark.ci
def test_a_start_that_cannot_be_is_one_line_and_an_exit_code(server: ServingProcess) -> None:
    port = server.http.rpartition(":")[2]
    for arguments, code, message in [
        (["--port", port, "--grpc-port", "none"], 1, "HTTP cannot listen"),
        (["--port", "none", "--grpc-port", server.grpc.rpartition(":")[2]], 1, "gRPC cannot listen"),
        (["--port", "none", "--grpc-port", "none"], 2, "both front ends are disabled"),
        (["--prot", "1"], 2, "did you mean --port"),
        (["/nowhere"], 2, "there is no folder /nowhere"),
    ]:
        ran = subprocess.run(
            [sys.executable, "-m", "jaxllm", "serve", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": f"{Path.cwd()}{os.pathsep}{Path.cwd() / 'server'}"},
        )
        assert ran.returncode == code, (arguments, ran.stderr)
        assert message in ran.stderr and ran.stderr.count("\n") == 1, ran.stderr
