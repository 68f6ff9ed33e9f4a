"""The client that blocks. What it can call is in `calls`; `asynchronous` is the client for event loops."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import grpc

from jaxllm.client import reading
from jaxllm.client.calls import Call, Calls
from jaxllm.client.channel import Endpoint, error_of
from jaxllm.client.results import Completion, Delta
from jaxllm.errors import DeadlineError, UnavailableError

P = ParamSpec("P")
Result = TypeVar("Result")


def _method(make: Callable[Concatenate[Any, P], Call[Result]]) -> Callable[Concatenate[Client, P], Result]:
    @functools.wraps(make)
    def method(client: Client, /, *arguments: P.args, **options: P.kwargs) -> Result:
        call = make(client, *arguments, **options)
        try:
            return call.read(client._start(call))
        except grpc.RpcError as failure:
            raise error_of(failure, client.target) from None

    return method


def _stream(make: Callable[Concatenate[Any, P], Call[None]]) -> Callable[Concatenate[Client, P], Stream]:
    @functools.wraps(make)
    def method(client: Client, /, *arguments: P.args, **options: P.kwargs) -> Stream:
        return Stream(client._start(make(client, *arguments, **options)), client.target)

    return method


class Client(Endpoint):
    """A connection to a server that any number of threads can share. Options are those of `Endpoint`.

    Every method raises `UserError` for what is wrong with the call, and `EngineError` for what is wrong with the server
    (`OverloadedError`, `UnavailableError`, `DeadlineError` … in `jaxllm.errors`).
    """

    def _open(self) -> None:
        self._channel: grpc.Channel = self._connect(grpc)

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

    def wait_until_ready(self, timeout: float = 60.0) -> None:
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
                state = self.health(timeout=min(left, 1.0))
            except (UnavailableError, DeadlineError) as error:
                state = str(error)
            if state != "serving":
                time.sleep(0.1)

    def close(self) -> None:
        """End the connection, and with it the calls that are under way."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stream(reading.Received):
    """Iterates over what is new of a call's sequences: each `Delta` belongs to the sequence of its `index`.

    Leaving a `with` block, or `close`, ends the call on the server too. After an exception, what came before is still
    valid: `so_far` has it.
    """

    def __init__(self, call: Any, target: str) -> None:
        super().__init__()
        self._call = call
        self._target = target
        self._is_closed = False

    def result(self) -> Completion:
        """Wait for the rest and return everything."""
        for _ in self:
            pass
        return self.so_far

    def close(self) -> None:
        """End the call, if it has not ended."""
        self._is_closed = True
        self._call.cancel()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        while not self._deltas:
            try:
                message = next(self._call)
            except grpc.RpcError as failure:
                if self._is_closed:
                    raise StopIteration from None
                raise error_of(failure, self._target) from None
            self._take(message)
        return self._deltas.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
