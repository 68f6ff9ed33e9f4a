"""The client that blocks. What it can call is in `calls`; `asynchronous` is the client for event loops."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import grpc

from jaxllm.client import reading
from jaxllm.client.calls import Call, Calls
from jaxllm.client.channel import Endpoint, error_of
from jaxllm.client.requests import EmbedRequests
from jaxllm.client.results import Completion, Delta, Embedding
from jaxllm.errors import DeadlineError, EngineError, UnavailableError, UserError

P = ParamSpec("P")
Result = TypeVar("Result")
Item = TypeVar("Item")


def _method(make: Callable[Concatenate[Any, P], Call[Result]]) -> Callable[Concatenate[Client, P], Result]:
    @functools.wraps(make)
    def method(client: Client, /, *arguments: P.args, **options: P.kwargs) -> Result:
        call = make(client, *arguments, **options)
        try:
            return call.read(client._start(call))
        except grpc.RpcError as failure:
            raise error_of(failure, client.target) from None

    return method


def _stream(
    make: Callable[Concatenate[Any, P], Call[None]], kind: Callable[[Any, Any, str], Result]
) -> Callable[Concatenate[Client, P], Result]:
    @functools.wraps(make)
    def method(client: Client, /, *arguments: P.args, **options: P.kwargs) -> Result:
        call = make(client, *arguments, **options)
        return kind(client._start(call), call.request, client.target)

    return method


class Client(Endpoint):
    """A connection to a server that any number of threads can share. Options are those of `Endpoint`.

    Every method raises `UserError` for what is wrong with the call, and `EngineError` for what is wrong with the server
    (`OverloadedError`, `UnavailableError`, `DeadlineError` … in `jaxllm.errors`).
    """

    def _open(self) -> None:
        self._channel: grpc.Channel = self._connect(grpc)

    generate = _method(Calls.generate)
    stream = _stream(Calls.stream, lambda *of: Stream(*of))
    chat = _method(Calls.chat)
    stream_chat = _stream(Calls.stream_chat, lambda *of: Stream(*of))
    embed = _method(Calls.embed)
    stream_embed = _stream(Calls.stream_embed, lambda *of: EmbeddingStream(*of))
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
    reset_prefix_cache = _method(Calls.reset_prefix_cache)
    load_adapter = _method(Calls.load_adapter)
    unload_adapter = _method(Calls.unload_adapter)
    adapters = _method(Calls.adapters)
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


class _Answers(Generic[Item]):
    """Iterates over what a call answers. Leaving a `with` block, or `close`, ends the call on the server too."""

    _unread: deque[Item]  # that has come
    _take: Callable[[Any], None]  # adds what a message holds

    def __init__(self, call: Any, request: Any, target: str) -> None:
        super().__init__()
        self._call = call
        self._request = request
        self._target = target
        self._is_closed = False

    def close(self) -> None:
        """End the call, if it has not ended."""
        self._is_closed = True
        self._call.cancel()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        while not self._unread:
            try:
                message = next(self._call)
            except grpc.RpcError as failure:
                if self._is_closed:
                    raise StopIteration from None
                raise error_of(failure, self._target) from None
            self._take(message)
        return self._unread.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stream(_Answers[Delta], reading.Received):
    """Iterates over what is new of a call's sequences: each `Delta` belongs to the sequence of its `index`.

    Leaving a `with` block, or `close`, ends the call on the server too. After an exception, what came before is still
    valid: `so_far` has it.
    """

    def result(self) -> Completion:
        """Wait for the rest and return everything."""
        for _ in self:
            pass
        return self.so_far


class EmbeddingStream(_Answers[Embedding], reading.ReceivedEmbeddings):
    """Iterates over embeddings as they are ready: each belongs to the prompt of its `index`.

    Leaving a `with` block, or `close`, ends the call on the server too, and so does the first prompt that fails. An
    exception of the prompts, or of one that cannot be sent, is raised when those before it are answered.
    """

    _request: EmbedRequests

    def result(self) -> list[Embedding]:
        """Wait for the rest and return what was not read yet, in the order of the prompts."""
        return sorted(self, key=lambda embedding: embedding.index)

    def __next__(self) -> Embedding:
        try:
            return super().__next__()
        except StopIteration:
            if self._request.failure is not None and not self._is_closed:
                raise self._request.failure from None
            raise
        except (UserError, EngineError):
            self.close()
            raise
