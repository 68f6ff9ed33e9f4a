"""Errors of calls while the server loads, drains, hangs or dies, also over TLS and Unix sockets.

Processes and clients are real; a server runs in this process only where the test breaks its engine.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2

from jaxllm import AsyncClient, errors
from jaxllm.client.requests import generate_request
from jaxllm.config import EngineConfig
from jaxllm.embedded import MODEL_DIR
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.text.tokenizer import Tokenizer
from jaxllm.v1 import control_pb2, inference_pb2
from jaxllm_server.launch import Server
from jaxllm_server.shared.options import ServerOptions
from tests.support.certificates import credentials
from tests.support.failures import (
    LONG,
    SECRETS,
    SMALL,
    TOO_LONG,
    Grpc,
    Request,
    asked,
    eventually,
    grpc_failure,
    over_grpc,
    over_http,
)
from tests.support.grpc_site import one_loop
from tests.support.serving_process import ServingProcess
from tests.support.sizes import FEW_SLOTS

UNLUCKY = 300  # a token whose detokenization fails, every eighth time


# A real process with TLS in both directions, while it loads and while it drains.


def https(server: str, folder: Path, name: str | None) -> httpx.Client:
    settings = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    if name is not None:
        settings.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    return httpx.Client(base_url=server, verify=settings, timeout=20)


@pytest.mark.ci
def test_loading_and_draining_behind_mutual_tls(certificates: Path) -> None:
    pair = ("--ssl-keyfile", str(certificates / "server.key"), "--ssl-certfile", str(certificates / "server.pem"))
    mutual = ("--ssl-ca-certs", str(certificates / "ca.pem"), "--ssl-client-auth")
    server = ServingProcess(*SMALL, *pair, *mutual, ready=False)
    with (
        server,
        grpc.secure_channel(server.grpc, credentials(certificates, "client")) as channel,
        https(server.http, certificates, "client") as http,
    ):
        rpc = Grpc(channel)
        check_loading(rpc, http)
        for name in (None, "stranger"):
            with grpc.secure_channel(server.grpc, credentials(certificates, name)) as stranger:
                with pytest.raises(grpc.RpcError) as caught:
                    Grpc(stranger).health.Check(health_pb2.HealthCheckRequest(), timeout=5)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            with https(server.http, certificates, name) as unknown, pytest.raises(httpx.TransportError):
                unknown.get("/health")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.http.replace('https', 'http')}/health")  # without TLS
        server.wait_for(r"(ready) after")
        assert rpc.inference.Generate(Request(text="a", stop={"max_tokens": 2})).outputs[0].token_ids
        assert http.post("/v1/completions", json=asked()).status_code == 200
        check_draining(server, rpc, http)


def check_loading(rpc: Grpc, http: httpx.Client) -> None:
    not_ready = ("UNAVAILABLE", "NOT_READY", errors.UnavailableError)
    calls: list[Callable[[], Any]] = [
        lambda: rpc.inference.Generate(Request(text="a")),
        lambda: rpc.inference.StreamGenerate(Request(text="a")),
        lambda: rpc.inference.Tokenize(inference_pb2.TokenizeRequest(text="a")),
        lambda: rpc.inference.ListModels(inference_pb2.ListModelsRequest()),
    ]
    assert [over_grpc(call) for call in calls] == [not_ready] * len(calls)
    assert over_http(http.post("/v1/completions", json=asked())) == (503, "not_ready", "service_unavailable")
    assert over_http(http.get("/v1/models")) == (503, "not_ready", "service_unavailable")
    assert [http.get(path).status_code for path in ("/health", "/ready", "/live")] == [503, 503, 200]
    assert rpc.health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert rpc.control.GetServerInfo(control_pb2.GetServerInfoRequest()).state == control_pb2.SERVER_STATE_LOADING
    # An invalid request gets the same error, because validation needs the loaded model.
    assert over_grpc(lambda: rpc.inference.Generate(Request(text="a", sampling={"top_p": 2.0}))) == not_ready


def check_draining(server: ServingProcess, rpc: Grpc, http: httpx.Client) -> None:
    stream = rpc.inference.StreamGenerate(Request(text="Once", stop=LONG))
    next(stream)
    server.signal(signal.SIGTERM)
    eventually(
        lambda: rpc.health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    )
    draining = ("UNAVAILABLE", "DRAINING", errors.DrainingError)
    assert over_grpc(lambda: rpc.inference.Generate(Request(text="a"))) == draining
    assert over_http(http.post("/v1/completions", json=asked())) == (503, "draining", "service_unavailable")
    assert [http.get(path).status_code for path in ("/ready", "/live")] == [503, 200]
    num_tokens = 1 + sum(len(delta.token_ids) for message in stream for delta in message.deltas)
    assert num_tokens >= LONG["max_tokens"] - 3 and stream.code() is grpc.StatusCode.OK
    assert server.wait(20.0) == 0


# Servers in this process, so that their engines can be made to fail.


@pytest.fixture(scope="module")
def run() -> Iterator[Any]:
    with one_loop() as run:
        yield run


def new_server(**options: Any) -> Server:
    config = EngineConfig(model=str(MODEL_DIR), num_kv_blocks=24, **FEW_SLOTS)
    return Server(config, ServerOptions(**{"port": 0, "grpc_port": 0, "log_stats_interval": 0.0, **options}))


@asynccontextmanager
async def clients_of(server: Server) -> AsyncIterator[tuple[Grpc, httpx.AsyncClient, AsyncClient]]:
    options = server.options
    assert server.grpc is not None
    target = f"unix:{options.grpc_uds}" if options.grpc_uds else f"127.0.0.1:{server.grpc.port}"
    transport = httpx.AsyncHTTPTransport(uds=options.uds)
    url = "http://localhost" if options.uds else f"http://127.0.0.1:{server.http_port}"
    async with (
        grpc.aio.insecure_channel(target) as channel,
        httpx.AsyncClient(transport=transport, base_url=url, timeout=20) as http,
        AsyncClient(target, retries=False) as client,
    ):
        yield Grpc(channel), http, client


async def failure_of(call: Any) -> tuple[str, str, type]:
    """Await a call or read a stream, and return the error that it must raise."""
    with pytest.raises(grpc.RpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    return grpc_failure(caught.value)


async def events_of(http: httpx.AsyncClient, **fields: Any) -> list[Any]:
    """Read a stream of events that fails midway; return the data of the events."""
    async with http.stream("POST", "/v1/completions", json=asked(**fields) | {"stream": True}) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    assert SECRETS.search("".join(lines)) is None
    events = [json.loads(line) for line in lines[:-1]]
    assert len(events) > 1 and "error" in events[-1]
    assert all(choice["finish_reason"] is None for event in events[:-1] for choice in event["choices"])
    return events


@pytest.mark.ci
def test_unix_sockets_and_a_request_that_takes_too_long(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLMEngine, "step", slowly(LLMEngine.step))
    late = ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", errors.DeadlineError)

    async def check() -> None:
        server = new_server(
            uds=str(tmp_path / "http"), grpc_uds=str(tmp_path / "grpc"), request_timeout=1.0, max_queued_requests=8
        )
        async with opened(server):
            await server.engine.start()
            await ask(server)
        assert not (tmp_path / "grpc").exists()

    async def ask(server: Server) -> None:
        assert {(tmp_path / name).stat().st_mode & 0o777 for name in ("http", "grpc")} == {0o700}
        async with clients_of(server) as (rpc, http, client):
            assert (await client.generate("Once", max_tokens=2)).token_ids
            assert (await http.post("/v1/completions", json=asked())).status_code == 200
            request = Request(text="Once", stop={"max_tokens": 200, "ignore_eos": True})
            long = {"max_tokens": 200, "ignore_eos": True}
            assert await failure_of(rpc.inference.Generate(request)) == late
            assert await failure_of(rpc.inference.StreamGenerate(request)) == late
            response = await http.post("/v1/completions", json=asked(**long))
            assert over_http(response) == (504, "deadline_exceeded", "timeout")
            assert response.headers["x-should-retry"] == "false"
            error = (await events_of(http, **long))[-1]["error"]
            assert (error["code"], error["type"]) == ("deadline_exceeded", "timeout")
            # Fits the context, but can never fit the pool of 24 blocks.
            response = await http.post("/v1/completions", json=asked(prompt=[5] * 400))
            assert over_http(response) == (400, "context_length_exceeded", "invalid_request_error")
            assert await failure_of(rpc.inference.Generate(Request(token_ids={"ids": [5] * 400}))) == TOO_LONG

    run(check())


@asynccontextmanager
async def opened(server: Server) -> AsyncIterator[None]:
    """Open the ports, and close them at the end, also after an error."""
    await server.open()
    try:
        yield
    finally:
        await server.close(0.1)


def slowly(step: Callable[[LLMEngine], Any], seconds: float = 0.01) -> Callable[[LLMEngine], Any]:
    def slow(engine: LLMEngine) -> Any:
        time.sleep(seconds)
        return step(engine)

    return slow


@pytest.mark.ci
async def test_one_request_fails_then_the_engine_hangs_then_it_dies(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = ("INTERNAL", "ENGINE_ERROR", errors.RequestFailedError)
    lost = ("UNAVAILABLE", "ENGINE_DEAD", errors.EngineDeadError)
    real, seen = Tokenizer.token_text, itertools.count(1)

    def token_text(tokenizer: Tokenizer, token: int) -> str:
        if token == UNLUCKY and not next(seen) % 8:
            raise RuntimeError("secret of /home/x at 0xdeadbeef")
        return real(tokenizer, token)

    def die(engine: LLMEngine) -> Any:
        raise SystemError("secret of /home/x at 0xdeadbeef")

    monkeypatch.setattr(Tokenizer, "token_text", token_text)

    async def one_fails(rpc: Grpc, http: httpx.AsyncClient, client: AsyncClient) -> None:
        # Only requests with log-probabilities detokenize single tokens, and only the first request samples this one.
        own: dict[str, Any] = {"temperature": 0, "logit_bias": {UNLUCKY: 100.0}, "logprobs": 0, "max_tokens": 40}
        request = generate_request("Once", own)
        other = asyncio.ensure_future(client.generate("Once", max_tokens=200, ignore_eos=True))
        assert await failure_of(rpc.inference.Generate(request)) == failed
        assert await failure_of(rpc.inference.StreamGenerate(request)) == failed
        response = await http.post("/v1/completions", json=asked(**own))
        assert over_http(response) == (500, "engine_error", "server_error")
        error = (await events_of(http, **own))[-1]["error"]
        assert (error["code"], error["type"]) == ("engine_error", "server_error")
        assert len((await other).token_ids) == 200
        assert (await http.get("/health")).status_code == 200

    async def it_hangs(server: Server, rpc: Grpc, http: httpx.AsyncClient, client: AsyncClient) -> None:
        real_step = LLMEngine.step
        monkeypatch.setattr(LLMEngine, "step", slowly(real_step, 1.0))
        late = asyncio.ensure_future(client.generate("Once", max_tokens=1))
        while server.engine.state != "hung":
            await asyncio.sleep(0.01)
        not_ready = ("UNAVAILABLE", "NOT_READY", errors.UnavailableError)
        assert await failure_of(rpc.inference.Generate(Request(text="a"))) == not_ready
        response = await http.post("/v1/completions", json=asked())
        assert over_http(response) == (503, "not_ready", "service_unavailable")
        assert (await http.get("/ready")).status_code == 503
        assert (await late).token_ids
        monkeypatch.setattr(LLMEngine, "step", real_step)

    async def engine_dies(server: Server, rpc: Grpc, http: httpx.AsyncClient, client: AsyncClient) -> None:
        long = {"max_tokens": 180, "ignore_eos": True}
        monkeypatch.setattr(LLMEngine, "step", slowly(LLMEngine.step, 0.02))  # keeps them running until the engine dies
        watch = rpc.health.Watch(health_pb2.HealthCheckRequest())
        while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
            pass  # the response still reports the hang
        stream = client.stream("Once", **long)
        await anext(stream)
        events = asyncio.ensure_future(events_of(http, **long))
        waits = asyncio.ensure_future(client.generate("Once", **long))
        await asyncio.sleep(0.1)
        monkeypatch.setattr(LLMEngine, "step", die)
        with pytest.raises(errors.EngineDeadError):
            await stream.result()
        assert stream.so_far.token_ids
        # The process answers with this error for a moment before it ends.
        assert await failure_of(rpc.inference.Generate(Request(text="a"), wait_for_ready=False)) == lost
        response = await http.post("/v1/completions", json=asked())
        assert over_http(response) == (503, "engine_dead", "service_unavailable")
        assert [(await http.get(path)).status_code for path in ("/health", "/live", "/ready")] == [503] * 3
        assert (await events)[-1]["error"]["code"] == "engine_dead"
        with pytest.raises(errors.EngineDeadError):
            await waits
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING

    server = new_server(hang_timeout=0.3)
    running = asyncio.ensure_future(server.run())
    while server.engine.state != "serving" and not running.done():
        await asyncio.sleep(0.01)
    async with clients_of(server) as clients:
        await one_fails(*clients)
        await it_hangs(server, *clients)
        await engine_dies(server, *clients)
    assert await running == 1


def test_tls_without_certificates_of_clients(run: Any, certificates: Path) -> None:
    """The engine of this server is never started; except for their text, its answers equal those during loading."""

    async def check() -> None:
        server = new_server(ssl_keyfile=str(certificates / "server.key"), ssl_certfile=str(certificates / "server.pem"))
        async with opened(server):
            await ask(server)

    async def ask(server: Server) -> None:
        assert server.grpc is not None
        target, authority = f"127.0.0.1:{server.grpc.port}", certificates / "ca.pem"
        async with (
            AsyncClient(target, ssl_ca_certs=authority, retries=False) as client,
            AsyncClient(target, retries=False) as plain,
            httpx.AsyncClient(verify=ssl.create_default_context(cafile=str(authority))) as http,
        ):
            with pytest.raises(errors.UnavailableError, match="not started"):
                await client.generate("a")
            with pytest.raises(errors.UnavailableError, match="reached"):
                await plain.generate("a", timeout=2.0)
            url = f"https://localhost:{server.http_port}"
            assert over_http(await http.post(f"{url}/v1/completions", json=asked()))[:2] == (503, "not_ready")
            with pytest.raises(httpx.TransportError):
                await http.get(f"http://localhost:{server.http_port}/health")
        async with httpx.AsyncClient() as trusting_others:
            with pytest.raises(httpx.TransportError):
                await trusting_others.get(f"{url}/health")

    run(check())
