"""Reaching a server, and leaving it: addresses, keys, deadlines, streams that are given up, what is imported."""

from __future__ import annotations

import asyncio
import gc
import inspect
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from jaxllm import AsyncClient, Client, errors
from jaxllm.v1 import control_pb2, inference_pb2
from tests.client.fake_server import WAIT, WHOLE, Blocking, FakeServer, deltas_of_whole, until_gone
from tests.support.paths import ROOT


@pytest.mark.parametrize("way", ["close", "with", "break"])
def test_leaving_a_stream_ends_it_on_the_server(client: Any, server: FakeServer, way: str) -> None:
    server.answers["stream"] = until_gone
    if way == "with":
        with client.stream("Hi") as stream:
            next(stream)
    else:
        stream = client.stream("Hi")
        for _ in stream:
            break
        if way == "close":
            stream.close()
            assert len(list(stream)) <= 1  # what had come already, and no exception
        else:
            del stream, _
            gc.collect()
            if isinstance(client, Blocking):
                # What was let go is cancelled by its loop, which runs only here.
                deadline = time.monotonic() + WAIT
                while not server.cancelled.is_set() and time.monotonic() < deadline:
                    client.run(asyncio.sleep(0.05))
    assert server.cancelled.wait(WAIT)


def test_timeouts_are_of_a_client_or_of_a_call(connect: Callable[..., Any], server: FakeServer) -> None:
    left = []

    def answer(context: grpc.ServicerContext) -> Message:
        left.append(context.time_remaining())
        return WHOLE

    server.answers[inference_pb2.GenerateRequest] = answer
    connect().generate("Hi")
    connect(timeout=100).generate("Hi")
    connect(timeout=100).generate("Hi", timeout=50)
    assert left[0] is None or left[0] > 1e6
    assert 90 < left[1] < 102  # it crosses the wire in units that round up
    assert 40 < left[2] < 52
    release = threading.Event()
    server.answers[inference_pb2.GenerateRequest] = lambda _: release.wait(WAIT) and WHOLE
    with pytest.raises(errors.DeadlineError):
        connect().generate("Hi", timeout=0.1)
    release.set()


def test_the_key_and_metadata_go_with_every_call(connect: Callable[..., Any], server: FakeServer) -> None:
    client = connect(api_key="secret", metadata={"X-Data-Parallel-Rank": "1"})
    server.answers[inference_pb2.GenerateRequest] = WHOLE
    server.answers["stream"] = lambda _: iter(deltas_of_whole())
    server.answers[control_pb2.AbortRequest] = control_pb2.AbortResponse()
    client.generate("Hi")
    client.stream("Hi").result()
    client.abort([])
    assert len(server.seen) == 3
    for _, metadata in server.seen:
        assert metadata["authorization"] == "Bearer secret"
        assert metadata["x-data-parallel-rank"] == "1"
        assert metadata["user-agent"].startswith("jaxllm-python/")


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("http://localhost:8000", {}, "target must be host:port or unix:/path, got 'http://localhost:8000'."),
        ("localhost", {}, "target needs a port, as in localhost:50051."),
        ("", {}, "target needs a port, as in localhost:50051."),
        ("localhost:1", {"ssl_certfile": "cert.pem"}, "ssl_certfile and ssl_keyfile must be given together."),
        ("localhost:1", {"ssl_ca_certs": "/no/such.pem"}, "/no/such.pem cannot be read: No such file or directory."),
    ],
)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_bad_address_is_refused(kind: type, target: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.UserError) as caught:
        kind(target, **options)
    assert str(caught.value) == message


def test_an_http_server_is_told_from_one_that_is_not_there(connect: Callable[..., Any]) -> None:
    class Http1(BaseHTTPRequestHandler):
        def handle_one_request(self) -> None:
            self.rfile.readline()
            self.wfile.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
            self.close_connection = True

    with ThreadingHTTPServer(("127.0.0.1", 0), Http1) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(errors.UnavailableError, match=r"answers in HTTP/1, not gRPC; give the gRPC port"):
            connect(f"127.0.0.1:{server.server_port}", retries=False).generate("Hi", timeout=5)
        server.shutdown()


def test_a_client_does_not_show_its_key() -> None:
    with Client("localhost:1", api_key="secret") as client:
        assert repr(client) == "Client('localhost:1')"


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        own = {name: method for name, method in vars(kind).items() if not name.startswith("_")}
        return {name: [str(p) for p in inspect.signature(method).parameters.values()] for name, method in own.items()}

    assert methods(Client) == methods(AsyncClient)


async def test_many_calls_share_an_asynchronous_client(running: tuple[FakeServer, str], server: FakeServer) -> None:
    server.answers[inference_pb2.GenerateRequest] = WHOLE
    async with AsyncClient(running[1]) as client:
        answers = await asyncio.gather(*(client.generate("Hi") for _ in range(50)))
    assert [completion.text for completion in answers] == ["Hi!"] * 50


async def test_a_cancelled_task_ends_its_stream(running: tuple[FakeServer, str], server: FakeServer) -> None:
    server.answers["stream"] = until_gone
    async with AsyncClient(running[1]) as client:
        stream = client.stream("Hi")
        await anext(stream)
        reading = asyncio.create_task(stream.result())
        await asyncio.sleep(0.05)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
    assert server.cancelled.wait(WAIT)


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_a_client_loads_no_jax_and_no_numpy() -> None:
    ran = run(
        "import sys; from jaxllm import AsyncClient, Client; Client('localhost:1'); AsyncClient('localhost:1');"
        "print(sorted({'jax', 'numpy', 'tokenizers', 'flax'} & set(sys.modules)))"
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "[]\n", "")


@pytest.mark.parametrize("missing", ["grpc", "google.protobuf", "google.rpc", "grpc_health"])
def test_what_is_missing_is_named_with_the_command_that_brings_it(missing: str) -> None:
    ran = run(f"import sys; sys.modules[{missing!r}] = None; from jaxllm import Client")
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].endswith("pip install 'jaxllm[client]'")
