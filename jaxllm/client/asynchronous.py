"""The asynchronous gRPC client."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import grpc
import grpc.aio

from jaxllm.client import reading
from jaxllm.client.calls import Call, Calls
from jaxllm.client.channel import Endpoint, error_of
from jaxllm.client.requests import EmbedRequests
from jaxllm.client.results import Completion, Delta, Embedding
from jaxllm.errors import DeadlineError, EngineError, UnavailableError, UserError

P = ParamSpec("P")
Result = TypeVar("Result")
Item = TypeVar("Item")


def _method(
    make: Callable[Concatenate[Any, P], Call[Result]],
) -> Callable[Concatenate[AsyncClient, P], Awaitable[Result]]:
    @functools.wraps(make)
    async def method(client: AsyncClient, /, *arguments: P.args, **options: P.kwargs) -> Result:
        return await _answer(client, make(client, *arguments, **options))

    return method


def _sequence(
    make: Callable[Concatenate[Any, P], Iterator[Call[Result]]],
) -> Callable[Concatenate[AsyncClient, P], Awaitable[Result]]:
    @functools.wraps(make)
    async def method(client: AsyncClient, /, *arguments: P.args, **options: P.kwargs) -> Result:
        calls = make(client, *arguments, **options)
        result = await _answer(client, next(calls))
        for call in calls:
            result = await _answer(client, call)
        return result

    return method


async def _answer(client: AsyncClient, call: Call[Result]) -> Result:
    try:
        return call.read(await client._start(call))
    except grpc.RpcError as failure:
        raise error_of(failure, client.target) from None


def _stream(
    make: Callable[Concatenate[Any, P], Call[None]], kind: Callable[[Any, Any, str], Result]
) -> Callable[Concatenate[AsyncClient, P], Result]:
    @functools.wraps(make)
    def method(client: AsyncClient, /, *arguments: P.args, **options: P.kwargs) -> Result:
        call = make(client, *arguments, **options)
        return kind(client._start(call), call.request, client.target)

    return method


class AsyncClient(Endpoint):
    """A connection to a server, bound to the event loop of its first call; options as in `Endpoint`.

    Methods are those of `Client`, awaited; `stream…` return an asynchronous iterator.
    """

    def _open(self) -> None:
        self._channel: grpc.aio.Channel | None = None  # opened by the first call: gRPC binds it to the loop

    def _start(self, call: Call[Any]) -> Any:
        if self._channel is None:
            self._channel = self._connect(grpc.aio)
        return super()._start(call)

    generate = _method(Calls.generate)
    stream = _stream(Calls.stream, lambda *of: AsyncStream(*of))
    chat = _method(Calls.chat)
    stream_chat = _stream(Calls.stream_chat, lambda *of: AsyncStream(*of))
    embed = _method(Calls.embed)
    stream_embed = _stream(Calls.stream_embed, lambda *of: AsyncEmbeddingStream(*of))
    classify = _method(Calls.classify)
    score = _method(Calls.score)
    tokenize = _method(Calls.tokenize)
    detokenize = _method(Calls.detokenize)
    models = _method(Calls.models)
    server_info = _method(Calls.server_info)
    load = _method(Calls.load)
    abort = _method(Calls.abort)
    pause = _method(Calls.pause)
    resume = _method(Calls.resume)
    sleep = _method(Calls.sleep)
    wake_up = _method(Calls.wake_up)
    weight_info = _method(Calls.weight_info)
    start_weight_update = _method(Calls.start_weight_update)
    update_weights = _sequence(Calls.update_weights)
    finish_weight_update = _method(Calls.finish_weight_update)
    reset_prefix_cache = _method(Calls.reset_prefix_cache)
    load_adapter = _method(Calls.load_adapter)
    unload_adapter = _method(Calls.unload_adapter)
    adapters = _method(Calls.adapters)
    health = _method(Calls.health)

    async def wait_until_ready(self, timeout: float = 60.0) -> None:
        """Wait until the server is healthy; raise `UnavailableError` after `timeout` seconds."""
        end = time.monotonic() + timeout
        state = ""
        while state != "serving":
            left = end - time.monotonic()
            if left <= 0:
                raise UnavailableError(f"{self.target} was not ready within {timeout:g} s: {state or 'no answer'}")
            try:
                state = await self.health(timeout=min(left, 1.0))
            except (UnavailableError, DeadlineError) as error:
                state = str(error)
            if state != "serving":
                await asyncio.sleep(0.1)

    async def close(self) -> None:
        """Close the connection and cancel its unfinished calls."""
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Answers(Generic[Item]):
    _unread: deque[Item]
    _take: Callable[[Any], None]

    def __init__(self, call: Any, request: Any, target: str) -> None:
        super().__init__()
        self._call = call
        self._request = request
        self._loop = asyncio.get_running_loop()
        self._messages = call.__aiter__()
        self._target = target
        self._is_closed = False

    async def close(self) -> None:
        self._is_closed = True
        self._call.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Item:
        while not self._unread:
            try:
                message = await anext(self._messages)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._is_closed and not (task and task.cancelling()):
                    raise StopAsyncIteration from None
                raise
            except grpc.RpcError as failure:
                raise error_of(failure, self._target) from None
            self._take(message)
        return self._unread.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __del__(self) -> None:
        # `break` out of `async for` cancels nothing; gRPC's tasks keep the call alive.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._call.cancel)


class AsyncStream(_Answers[Delta], reading.Received):
    """Iterates over a call's deltas. Like `blocking.Stream`."""

    async def result(self) -> Completion:
        async for _ in self:
            pass
        return self.so_far


class AsyncEmbeddingStream(_Answers[Embedding], reading.ReceivedEmbeddings):
    """Iterates over embeddings. Like `blocking.EmbeddingStream`."""

    _request: EmbedRequests

    def __init__(self, call: Any, request: EmbedRequests, target: str) -> None:
        super().__init__(call, request, target)
        request.metadata_of_call = call.initial_metadata

    async def result(self) -> list[Embedding]:
        return sorted([embedding async for embedding in self], key=lambda embedding: embedding.index)

    async def __anext__(self) -> Embedding:
        try:
            return await super().__anext__()
        except StopAsyncIteration:
            if self._request.failure is not None and not self._is_closed:
                raise self._request.failure from None
            raise
        except (UserError, EngineError):
            await self.close()
            raise
