"""A server in this process with the embedded model, and functions that call it over both protocols."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc
import grpc.aio
import httpx

from jaxllm.config import EngineConfig
from jaxllm.embedded import MODEL_DIR
from jaxllm.v1 import inference_pb2_grpc
from jaxllm_server.launch import Server
from jaxllm_server.shared.options import ServerOptions
from tests.support.failures import SECRETS
from tests.support.sizes import SLOTS

ENGINE = SLOTS | {"max_logprobs": 24}


class Answer(NamedTuple):
    """The failure of a call, if it failed, and the content of its answer without ids and times."""

    failure: str | None  # e.g. "500", "INTERNAL", or the type of an error inside a stream
    told: Any


class Clients(NamedTuple):
    """Clients of both protocols."""

    http: httpx.AsyncClient
    grpc: Any


def new_server(engine: dict[str, Any] | None = None, **options: Any) -> Server:
    config = EngineConfig(model=str(MODEL_DIR), **{**ENGINE, **(engine or {})})
    return Server(config, ServerOptions(**{"port": 0, "grpc_port": 0, "log_stats_interval": 0.0, **options}))


@asynccontextmanager
async def opened(server: Server) -> AsyncIterator[Clients]:
    """Open the ports, load the model, connect."""
    await server.open()
    try:
        await server.engine.start()
        assert server.grpc is not None
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc.port}") as channel,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.http_port}", timeout=60) as http,
        ):
            yield Clients(http, inference_pb2_grpc.InferenceServiceStub(channel))
    finally:
        await server.close(0.1)


async def is_empty(server: Server, seconds: float = 5.0) -> None:
    """Wait until the engine holds no state of any call."""
    end = time.monotonic() + seconds
    while (load := server.engine.get_load()).kv_blocks_used or load.running or load.waiting or server.engine.num_live:
        assert time.monotonic() < end, (load, server.engine.num_live)
        await asyncio.sleep(0.005)


async def over_http(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Answer:
    """Make a call over HTTP, as a stream if the body requests one."""
    if body.get("stream"):
        return await _stream_over_http(http, path, body)
    try:
        response = await http.post(path, json=body)
    except httpx.TransportError as error:
        return Answer(type(error).__name__, None)
    assert SECRETS.search(response.text) is None, response.text
    if response.status_code != 200:
        return Answer(str(response.status_code), response.json()["error"]["code"])
    return Answer(None, _lasting(response.json()))


async def _stream_over_http(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Answer:
    events: list[Any] = []
    try:
        async with http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                assert SECRETS.search(response.text) is None, response.text
                return Answer(str(response.status_code), response.json()["error"]["code"])
            lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    except httpx.TransportError as error:
        return Answer(type(error).__name__, None)
    assert SECRETS.search("".join(lines)) is None, lines
    if not lines or lines[-1] != "[DONE]":
        return Answer("truncated", lines)
    events = [json.loads(line) for line in lines[:-1]]
    if "error" in events[-1]:
        error = events[-1]["error"]
        return Answer({"server_error": "500"}.get(error["type"], error["type"]), error["code"])
    return Answer(None, _joined_events(events))


async def over_grpc(stub: Any, request: Any, is_stream: bool) -> Answer:
    """Make a call over gRPC."""
    try:
        if not is_stream:
            reply = await stub.Generate(request)
            outputs = [
                (output.text, list(output.token_ids), output.finish_reason, output.HasField("logprobs"))
                for output in reply.outputs
            ]
            return Answer(None, (outputs, reply.usage.completion_tokens))
        whole: dict[int, list[Any]] = {}
        async for message in stub.StreamGenerate(request):
            for delta in message.deltas:
                own = whole.setdefault(delta.index, ["", [], 0])
                own[0] += delta.text
                own[1] += delta.token_ids
                own[2] = delta.finish_reason or own[2]
        return Answer(None, whole)
    except grpc.aio.AioRpcError as error:
        assert SECRETS.search(error.details() or "") is None, error.details()
        return Answer(error.code().name, None)


def _lasting(body: dict[str, Any]) -> Any:
    """Return the parts of a whole answer that are equal in every run."""
    usage = body["usage"]
    return [_choice(choice) for choice in body["choices"]], usage["prompt_tokens"], usage["completion_tokens"]


def _choice(choice: dict[str, Any]) -> Any:
    message = choice.get("message") or {}
    said = {key: message.get(key) for key in ("content", "reasoning", "reasoning_content")}
    return choice["index"], choice.get("text"), said, choice["finish_reason"], _tokens_of(choice.get("logprobs"))


def _tokens_of(logprobs: Any) -> Any:
    """Return the tokens of log-probabilities; their values differ with the size of the batch."""
    if not logprobs:
        return None
    return logprobs.get("tokens") or [entry["token"] for entry in logprobs["content"]]


def _joined_events(events: list[Any]) -> Any:
    """Join a stream's events, independent of how the stream was cut."""
    whole: dict[int, list[Any]] = {}
    usage = None
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            own = whole.setdefault(choice["index"], ["", None, []])
            delta = choice.get("delta") or {}
            own[0] += choice.get("text") or "".join(delta.get(key) or "" for key in ("reasoning", "content"))
            own[1] = choice["finish_reason"] or own[1]
            own[2] += _tokens_of(choice.get("logprobs")) or []
    return whole, usage and usage["completion_tokens"]
