"""The client for event loops. What it can call is in `calls`; `blocking` is the client for threads."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import grpc
import grpc.aio

from jaxllm.client import reading
from jaxllm.client.calls import Call, Calls
from jaxllm.client.channel import Endpoint, error_of
from jaxllm.client.results import Completion, Delta
from jaxllm.errors import DeadlineError, UnavailableError

P = ParamSpec("P")
Result = TypeVar("Result")


def _method(
    make: Callable[Concatenate[Any, P], Call[Result]],
) -> Callable[Concatenate[AsyncClient, P], Awaitable[Result]]:
    @functools.wraps(make)
    async def method(client: AsyncClient, /, *arguments: P.args, **options: P.kwargs) -> Result:
        call = make(client, *arguments, **options)
        try:
            return call.read(await client._start(call))
        except grpc.RpcError as failure:
            raise error_of(failure, client.target) from None

    return method


def _stream(make: Callable[Concatenate[Any, P], Call[None]]) -> Callable[Concatenate[AsyncClient, P], AsyncStream]:
    @functools.wraps(make)
    def method(client: AsyncClient, /, *arguments: P.args, **options: P.kwargs) -> AsyncStream:
        return AsyncStream(client._start(make(client, *arguments, **options)), client.target)

    return method


class AsyncClient(Endpoint):
    """A connection to a server for the event loop of its first call. Options are those of `Endpoint`.

    The methods are those of `Client`: all are awaited but `stream` and `stream_chat`, which return the iterator.
    Every method raises `UserError` for what is wrong with the call, and `EngineError` for what is wrong with the server
    (`OverloadedError`, `UnavailableError`, `DeadlineError` … in `jaxllm.errors`).
    """

    def _open(self) -> None:
        self._channel: grpc.aio.Channel | None = None  # made late, because gRPC binds it to the event loop that runs

    def _start(self, call: Call[Any]) -> Any:
        if self._channel is None:
            self._channel = self._connect(grpc.aio)
        return super()._start(call)

    generate = _method(Calls.generate)
    stream = _stream(Calls.stream)
    chat = _method(Calls.chat)
    stream_chat = _stream(Calls.stream_chat)
    tokenize = _method(Calls.tokenize)
    detokenize = _method(Calls.detokenize)
    models = _method(Calls.models)
    server_info = _method(Calls.server_info)
    load = _method(Calls.load)
    abort = _method(Calls.abort)
    pause = _method(Calls.pause)
    resume = _method(Calls.resume)
    reset_prefix_cache = _method(Calls.reset_prefix_cache)
    health = _method(Calls.health)

    async def wait_until_ready(self, timeout: float = 60.0) -> None:
        """Wait until the server is healthy: it may not have been started yet, or be loading its model.

        Raises:
            UnavailableError: after `timeout` seconds.
        """
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
        """End the connection, and with it the calls that are under way."""
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncStream(reading.Received):
    """Iterates over what is new of a call's sequences: each `Delta` belongs to the sequence of its `index`.

    Leaving an `async with` block, or `close`, ends the call on the server too. After an exception, what came before is
    still valid: `so_far` has it.
    """

    def __init__(self, call: Any, target: str) -> None:
        super().__init__()
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._messages = call.__aiter__()
        self._target = target
        self._is_closed = False

    async def result(self) -> Completion:
        """Wait for the rest and return everything."""
        async for _ in self:
            pass
        return self.so_far

    async def close(self) -> None:
        """End the call, if it has not ended."""
        self._is_closed = True
        self._call.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            try:
                message = await anext(self._messages)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._is_closed and not (task and task.cancelling()):
                    raise StopAsyncIteration from None  # the call was cancelled by `close`, not the task
                raise
            except grpc.RpcError as failure:
                raise error_of(failure, self._target) from None
            self._take(message)
        return self._deltas.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __del__(self) -> None:
        # `break` out of `async for` ends nothing by itself, and a call that runs is kept alive by gRPC's own tasks.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._call.cancel)
