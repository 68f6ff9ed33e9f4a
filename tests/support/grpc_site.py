"""A gRPC server without an engine, in front of a scripted `Serving`, and helpers for its tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
import numpy as np
import pytest
import uvloop
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2

from jaxllm import errors
from jaxllm.engine.kv_events import BlockBatch
from jaxllm.engine.model_info import ModelInfo
from jaxllm.metrics import Load
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.state import AllBlocksCleared, BlockRemoved, BlockStored
from jaxllm.v1 import inference_pb2 as pb
from jaxllm_server.access.auth import Keys
from jaxllm_server.access.client_quota import Shares
from jaxllm_server.access.ledger import Ledger
from jaxllm_server.adapters import ServedAdapters
from jaxllm_server.generation.calls import Call, Chunk, Part, PromptInfo, Timing, TokenUsage
from jaxllm_server.grpc.server import GrpcServer, start_grpc
from jaxllm_server.pooling import pool_stream
from jaxllm_server.pooling.pool_calls import PoolCall, PoolResult
from jaxllm_server.shared.options import ServerOptions
from tests.support.fake_serving import FakeAdapters

Result = TypeVar("Result")
SOON = 3.0  # seconds, a bound for events that take milliseconds
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class ScriptedServing:
    """Answers with the chunks of `script`, pooled calls with `pool_script`; counts open iterators."""

    def __init__(self, options: ServerOptions, script: Callable[[Call], AsyncIterator[Chunk]] | None = None) -> None:
        self.options = options
        self.names = ("m", "alias")
        self.script = script or (lambda call: words("one ", "two"))
        self.pool_script = pooled
        self.tasks: tuple[str, ...] = ("generate",)
        self.shares = Shares(options.max_sequences_per_client)
        self.ledger = Ledger(options)
        self.calls: list[Call] = []
        self.pool_calls: list[PoolCall] = []
        self.num_open = 0
        self.askers: list[str] = []  # callers that requested room
        self.started = asyncio.Event()
        self.engine: Any = FakeEngine(has_adapters=options.lora_root is not None)
        self.adapters = ServedAdapters(self.engine, options, self.names)
        self.pooling = SimpleNamespace(pool=self.pool, stream=self.pool_stream)

    async def off_loop(self, client: str, function: Callable[..., Any], *arguments: Any, language: Any = None) -> Any:
        return await asyncio.to_thread(function, *arguments)

    def check_room(self, client: str) -> None:
        self.askers.append(client)

    def check_model(self, name: str, adapter: str = "") -> str:
        if adapter or name in self.adapters:
            return self.adapters.find(adapter or name).name
        if name and name not in self.names:
            raise errors.NotFoundError(f"The model `{name}` does not exist.", "model")
        return self.names[0]

    async def generate(self, call: Call, params: Any = None) -> AsyncGenerator[Chunk, None]:
        self.calls.append(call)
        self.num_open += 1
        self.started.set()
        try:
            async for own in self.script(call):
                yield replace(own, request_id=call.request_id or "")
        finally:
            self.num_open -= 1

    async def pool(self, call: PoolCall) -> AsyncGenerator[PoolResult]:
        self.pool_calls.append(call)
        self.num_open += 1
        self.started.set()
        try:
            with self.shares.place(call.client, 1):
                async for result in self.pool_script(call):
                    yield result
        finally:
            self.num_open -= 1

    async def pool_stream(self, *asked: Any) -> AsyncGenerator[pool_stream.Answer[pb.EmbedRequest]]:
        return pool_stream.answers(cast(Any, self), self.pool, *asked)

    async def tokenize(self, call: Call) -> list[int]:
        self.calls.append(call)
        return list(range(len(call.prompt or call.messages or ())))

    async def detokenize(self, ids: list[int], client: str, model: str) -> str:
        return " ".join(map(str, ids))

    async def closed(self) -> None:
        """Wait until no iterator is open."""
        async with asyncio.timeout(SOON):
            while self.num_open:
                await asyncio.sleep(0.001)


class FakeEngine(FakeAdapters):
    """The part of an `AsyncLLM` that the services use."""

    def __init__(self, has_adapters: bool) -> None:
        self.state = "serving"
        super().__init__()
        self.aborted: list[str] = []
        self.paused: tuple[str, bool] | None = None
        self.max_queued_requests = 32
        self.config = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1, enable_lora=has_adapters)
        self.model_info = ModelInfo(
            tokenizer=cast(Any, SimpleNamespace(has_chat_template=True)),
            generation_config={},
            default_params=SamplingParams(temperature=0.6, max_tokens=None),
            eos_ids=frozenset({5, 2}),
            vocab_size=1000,
            max_model_len=128,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            block_size=16,
            num_kv_blocks=99,
            dtype="float32",
            device_kind="cpu",
        )

    @property
    def model(self) -> ModelInfo:
        if self.state == "loading":
            raise errors.UnavailableError("The model is still being loaded.")
        return self.model_info

    def get_load(self) -> Load:
        return Load(1, 2, 3, 4, 99, 8, 50.0, 0.25, 0.5)

    async def check_health(self) -> None:
        pass

    async def off_loop(self, function: Any, *arguments: Any, client: str | None, language: bytes | None = None) -> Any:
        return function(*arguments)

    async def abort(self, ids: Any) -> None:
        self.aborted += ids

    async def reset_prefix_cache(self) -> bool:
        return True

    async def pause(self, mode: str, clear_cache: bool) -> None:
        self.paused = mode, clear_cache

    async def resume(self) -> None:
        self.paused = None

    async def kv_events(self, start: int) -> AsyncGenerator[BlockBatch, None]:
        if start > 7:
            raise errors.OutOfRangeError("batch is not kept.", "start_sequence")
        stored = (
            BlockStored(b"\0" * 7 + b"\1" + b"x" * 24, None, (1, 2)),
            BlockStored(b"\xff" * 32, b"\0" * 7 + b"\1", (3, 4)),
        )
        stored += (BlockStored(b"\1" * 32, None, (1, 2), adapter=5),)
        yield BlockBatch(
            start,
            1.5,
            2,
            (AllBlocksCleared(), *stored, BlockRemoved(b"\xff" * 32), BlockRemoved(b"\0" * 32)),
            {5: "pirate"},
        )


class FakeObserver:
    """Records the server's reports."""

    def __init__(self) -> None:
        self.handled: list[tuple[str, str, str]] = []

    def request_handled(self, protocol: str, route: str, code: str, seconds: float) -> None:
        assert seconds >= 0
        self.handled.append((protocol, route, code))


class FakeTracer:
    """Records spans and their ends."""

    def __init__(self) -> None:
        self.spans: list[Any] = []

    def start(self, traceparent: str | None, name: str, attributes: Any) -> Any:
        span = SimpleNamespace(traceparent=traceparent, name=name, error="open")
        span.end = lambda error=None: setattr(span, "error", error)
        self.spans.append(span)
        return span


def chunk(text: str = "", *, is_first: bool = False, is_last: bool = False) -> Chunk:
    part = Part(0, text, "", [], [7], None, "stop" if is_last else None, None, 3 if is_last else None)
    prompt = PromptInfo([1, 2, 3], 1) if is_first else None
    return Chunk("", [part], prompt, TokenUsage(3, 2, 1, 0), Timing(0.1, 0.2, 0.3, 0.4) if is_last else None, is_last)


async def words(*texts: str, wait: float = 0.0) -> AsyncIterator[Chunk]:
    for i, text in enumerate(texts):
        if wait:
            await asyncio.sleep(wait)
        yield chunk(text, is_first=i == 0, is_last=i == len(texts) - 1)


async def answer(call: Call, text: str = "one two") -> AsyncIterator[Chunk]:
    """Answer in one chunk, or word by word."""
    async for own in words(*(text.split(" ") if call.stream else [text])):
        yield own


async def pooled(call: PoolCall) -> AsyncIterator[PoolResult]:
    """Yield each input's length and number, last first."""
    for index in reversed(range(len(call.inputs))):
        values = [len(call.inputs[index]), index] if call.pairs is None else [len(call.pairs[index])]
        yield PoolResult(index, np.array(values, np.float32), 3)


async def failing(error: BaseException, after: int = 0) -> AsyncIterator[Chunk]:
    for i in range(after):
        yield chunk("x", is_first=i == 0)
    raise error


async def silent(after: int = 0) -> AsyncIterator[Chunk]:
    for i in range(after):
        yield chunk("x", is_first=i == 0)
    await asyncio.sleep(3600)


class Site:
    """A running server with its parts."""

    def __init__(self, serving: ScriptedServing, target: str) -> None:
        self.server: GrpcServer
        self.serving = serving
        self.target = target
        self.observer = FakeObserver()
        self.tracer = FakeTracer()

    @contextlib.asynccontextmanager
    async def channel(self, **options: Any) -> AsyncIterator[grpc.aio.Channel]:
        async with grpc.aio.insecure_channel(self.target, options=list(options.items())) as channel:
            yield channel

    async def handled(self, count: int) -> None:
        """Wait until `count` calls are recorded."""
        async with asyncio.timeout(SOON):
            while len(self.observer.handled) < count:
                await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def site(
    script: Callable[[Call], AsyncIterator[Chunk]] | None = None, keys: Keys | None = None, **options: Any
) -> AsyncIterator[Site]:
    chosen = ServerOptions(**({"port": None, "grpc_port": 0, "grpc_filter": False} | options))
    own = Site(ScriptedServing(chosen, script), f"unix:{chosen.grpc_uds}")
    fakes: Any = (own.serving, chosen, keys or Keys(), own.tracer, own.observer)
    own.server = await start_grpc(*fakes)
    if own.server.port is not None:
        own.target = f"127.0.0.1:{own.server.port}"
    try:
        yield own
    finally:
        await own.server.stop(None)


async def _bounded(coroutine: Awaitable[Result], seconds: float) -> Result:
    async with asyncio.timeout(seconds):
        return await coroutine


@contextlib.contextmanager
def one_loop(seconds: float = 30.0) -> Iterator[Callable[[Awaitable[Any]], Any]]:
    """Yield a function that runs coroutines on one loop per module, because gRPC's poller belongs to a loop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        yield lambda coroutine: runner.run(_bounded(coroutine, seconds))


def ask(text: str = "a", **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, **fields)


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


async def drained(stream: Any) -> list[Any]:
    return [message async for message in stream]


async def error_of(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def reason_of(error: grpc.aio.AioRpcError) -> str:
    return details_of(error)["ErrorInfo"].reason if details_of(error) else ""


def details_of(error: grpc.aio.AioRpcError) -> dict[str, Any]:
    """Return the google.rpc details of an error, by name."""
    raw = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin")
    if raw is None:
        return {}
    status = status_pb2.Status.FromString(raw if isinstance(raw, bytes) else raw.encode())
    assert (status.code, status.message) == (error.code().value[0], error.details())
    return details_in(status)


def details_in(status: status_pb2.Status) -> dict[str, Any]:
    """Unpack the details of a status."""
    found: dict[str, Any] = {}
    for packed in status.details:
        name = packed.TypeName().rpartition(".")[2]
        found[name] = getattr(error_details_pb2, name)()
        packed.Unpack(found[name])
    return found
