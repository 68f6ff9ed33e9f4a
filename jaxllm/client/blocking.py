"""The blocking gRPC client."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
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
        return _answer(client, make(client, *arguments, **options))

    return method


def _sequence(
    make: Callable[Concatenate[Any, P], Iterator[Call[Result]]],
) -> Callable[Concatenate[Client, P], Result]:
    @functools.wraps(make)
    def method(client: Client, /, *arguments: P.args, **options: P.kwargs) -> Result:
        calls = make(client, *arguments, **options)
        result = _answer(client, next(calls))
        for call in calls:
            result = _answer(client, call)
        return result

    return method


def _answer(client: Client, call: Call[Result]) -> Result:
    try:
        return call.read(client._start(call))
    except grpc.RpcError as failure:
        raise error_of(failure, client.target) from None


def _stream(
    make: Callable[Concatenate[Any, P], Call[None]], kind: Callable[[Any, Any, str], Result]
) -> Callable[Concatenate[Client, P], Result]:
    @functools.wraps(make)
    def method(client: Client, /, *arguments: P.args, **options: P.kwargs) -> Result:
        call = make(client, *arguments, **options)
        return kind(client._start(call), call.request, client.target)

    return method


class Client(Endpoint):
    """A thread-safe connection to a server; options as in `Endpoint`.

    Raises `UserError` if a call is wrong, an `EngineError` if the server fails.
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

    def wait_until_ready(self, timeout: float = 60.0) -> None:
        """Wait until the server is healthy; raise `UnavailableError` after `timeout` seconds."""
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
        """Close the connection and cancel its unfinished calls."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Answers(Generic[Item]):
    _unread: deque[Item]
    _take: Callable[[Any], None]

    def __init__(self, call: Any, request: Any, target: str) -> None:
        super().__init__()
        self._call = call
        self._request = request
        self._target = target
        self._is_closed = False

    def close(self) -> None:
        """Cancel the call unless it has ended."""
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
    """Iterates over a call's deltas; `Delta.index` identifies the sequence.

    Leaving a `with` block, or `close`, cancels the call. After an exception, `so_far` holds all deltas received.
    """

    def result(self) -> Completion:
        """Read the rest of the stream and return the completion."""
        for _ in self:
            pass
        return self.so_far


class EmbeddingStream(_Answers[Embedding], reading.ReceivedEmbeddings):
    """Iterates over embeddings as they complete; `Embedding.index` identifies the prompt.

    Leaving a `with` block, `close`, or the first failed prompt cancels the call. An invalid prompt raises after earlier
    embeddings.
    """

    _request: EmbedRequests

    def result(self) -> list[Embedding]:
        """Read the rest of the stream; return unread embeddings in the prompts' order."""
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
