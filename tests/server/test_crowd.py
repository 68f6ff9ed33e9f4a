"""A thousand concurrent clients, each with a connection, and the largest allowed calls: all are served."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator

import grpc.aio
import httpx
import pytest

from jaxllm.file_limit import raise_file_limit
from jaxllm.v1 import inference_pb2, inference_pb2_grpc
from tests.support.serving_process import QUICK, ServingProcess

pytestmark = pytest.mark.ci
CLIENTS = 1000
SECONDS = 120.0  # on a busy machine; six on an idle one


@pytest.fixture(scope="module")
def server() -> Iterator[ServingProcess]:
    raise_file_limit()
    with ServingProcess(*QUICK) as server:
        yield server


def messages(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {number} + 3?"}]


async def over_a_socket(port: int, number: int) -> bytes:
    """Send a request on a new connection; return the status."""
    body = json.dumps({"messages": messages(number), "max_tokens": 4}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    status = (await reader.readuntil(b"\r\n\r\n"))[9:12]
    writer.close()
    return status


def test_a_thousand_sockets(server: ServingProcess) -> None:
    async def ask_all() -> list[bytes]:
        port = int(server.http.rpartition(":")[2])
        async with asyncio.timeout(SECONDS):
            return await asyncio.gather(*(over_a_socket(port, number) for number in range(CLIENTS)))

    assert Counter(asyncio.run(ask_all())) == {b"200": CLIENTS}


def test_a_thousand_calls_over_grpc(server: ServingProcess) -> None:
    async def ask_all() -> int:
        options = [("grpc.use_local_subchannel_pool", 1)]  # a connection for each channel
        channels = [grpc.aio.insecure_channel(server.grpc, options=options) for _ in range(20)]
        request = inference_pb2.GenerateRequest(text="Once upon a time", stop={"max_tokens": 4})
        async with asyncio.timeout(SECONDS):
            stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
            calls = [stub.Generate(request) for stub in stubs for _ in range(CLIENTS // len(stubs))]
            answers = await asyncio.gather(*calls)
        for channel in channels:
            await channel.close()
        return sum(bool(answer.outputs) for answer in answers)

    assert asyncio.run(ask_all()) == CLIENTS


@pytest.mark.parametrize(
    ("size", "choices"),
    [({"prompt": ["Once"] * 2048}, 2048), ({"prompt": "Once", "n": 128, "stop": ["x" * 256] * 16}, 128)],
)
def test_the_largest_calls(server: ServingProcess, size: dict[str, object], choices: int) -> None:
    answer = httpx.post(f"{server.http}/v1/completions", json={**size, "max_tokens": 1}, timeout=SECONDS)
    assert len(answer.json()["choices"]) == choices
