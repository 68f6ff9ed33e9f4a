"""ASGI apps that run a reply's calls and send the results.

The status is sent after the first output, so earlier errors have theirs. A disconnect closes the calls' iterators,
which aborts them.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxllm.errors import UserError
from jaxllm_server.access.ledger import ANSWERS, OUTPUTS, Entry
from jaxllm_server.http.error_bodies import ClientGone, log_failure
from jaxllm_server.http.protocol import transport_of
from jaxllm_server.http.sse import dumps, dumps_large
from jaxllm_server.http.writers import EventReply, Writer
from jaxllm_server.requests.form import CallsReply, Reply
from jaxllm_server.shared.merge import merge

if TYPE_CHECKING:
    from jaxllm_server.generation.calls import Chunk
    from jaxllm_server.observability.tracing import Tracer
    from jaxllm_server.serving import Serving

Result = TypeVar("Result")
AnyReply = TypeVar("AnyReply", bound=CallsReply)
_MANY_VALUES = 1 << 12  # log-probabilities; more take a thread
_VALUE_BYTES = 150  # per log-probability (measured)
_CHARACTERS = 32  # of text, as slow as one log-probability
_PIECE = 1 << 20  # bytes per write; the next waits until most of them are sent
STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # disables nginx's buffering
]


@dataclass(frozen=True)
class Answer(ABC, Generic[AnyReply]):
    """A request's answer, as an ASGI app."""

    serving: Serving
    tracer: Tracer
    reply: AnyReply
    name: str  # in the log
    client: str
    num_bytes: int
    entry: Entry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; raise errors that occur before its first byte."""
        traceparent = next((value for name, value in scope["headers"] if name == b"traceparent"), b"")
        span = self.tracer.start(traceparent.decode("latin-1") or None, scope["path"], {"http.request.method": "POST"})
        failure: BaseException | None = None
        try:
            await while_connected(receive, self._work(scope, send))
        except UserError as error:
            failure = error
            error.parameter = self._name_of(error.parameter)
            raise
        except BaseException as error:
            failure = error
            raise
        finally:
            span.end(failure)

    @abstractmethod
    async def _work(self, scope: Scope, send: Send) -> None: ...

    def _name_of(self, parameter: str | None) -> str | None:
        return parameter if parameter is None else self.reply.names.get(parameter, parameter)


class _Begun:
    """Tracks outputs; each one's first event repeats the prompt's log-probabilities."""

    def __init__(self, num_values: int) -> None:
        self._num_values = num_values
        self._indices: set[int] = set()

    def begin(self, chunk: Chunk) -> int:
        """Return an upper bound on the prompt's log-probabilities in a chunk's events."""
        new = {part.index for part in chunk.outputs} - self._indices
        self._indices |= new
        return len(new) * self._num_values


@dataclass(frozen=True)
class TextAnswer(Answer[Reply | EventReply]):
    """A text request's answer."""

    writer: Writer
    prepare: Callable[[], Awaitable[None]] | None = None  # before the first chunk

    async def _work(self, scope: Scope, send: Send) -> None:
        await (self._stream(scope, send) if self.reply.is_stream else self._send_whole(send))

    async def _send_whole(self, send: Send) -> None:
        chunks: dict[int, Chunk] = {}
        async with aclosing(self._chunks()) as items:
            async for number, chunk in items:
                chunks[number] = chunk
        if self.prepare is not None:
            await self.prepare()
        ordered = [chunks.pop(number) for number in sorted(chunks)]
        num_values = sum(map(_num_values, ordered))
        self.entry.charge(OUTPUTS, num_values * _VALUE_BYTES)
        if num_values > _MANY_VALUES:
            content = await self.serving.off_loop(self.client, self.writer.whole, ordered, dumps_large)
        else:
            content = self.writer.whole(ordered)
        self.writer.finish(content)
        self.entry.charge(ANSWERS, len(content))
        await send_json(send, content)

    async def _stream(self, scope: Scope, send: Send) -> None:
        writer = self.writer
        async with aclosing(self._chunks()) as items:
            first = await anext(items)
            if self.prepare is not None:
                await self.prepare()
            headers = [(b"content-type", writer.media_type), *STREAM_HEADERS]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            is_whole = True
            try:
                begun: dict[int, _Begun] = {}
                await _send_events(send, await self._events(*first, begun))
                async for number, chunk in items:
                    await _send_events(send, await self._events(number, chunk, begun))
                ending = writer.end()
            except Exception as error:
                is_whole = False
                log_failure(self.name, error)
                ending = writer.failure(error)
            await send({"type": "http.response.body", "body": ending})
        if not is_whole and (transport := transport_of(scope)) is not None:
            transport.close()

    async def _events(self, number: int, chunk: Chunk, begun: dict[int, _Begun]) -> bytes:
        if chunk.prompt is not None and chunk.prompt.logprobs is not None:
            begun[number] = _Begun(_num_prompt_values(chunk))
        own = begun.get(number)
        if own is None or own.begin(chunk) <= _MANY_VALUES:
            return self.writer.events(number, chunk)
        return await self.serving.off_loop(self.client, self.writer.events, number, chunk)

    async def _chunks(self) -> AsyncGenerator[tuple[int, Chunk]]:
        own: dict[str, Any] = {"client": self.client, "num_bytes": self.num_bytes, "entry": self.entry}
        calls = [replace(call, **own) for call in self.reply.calls]
        params = await self.serving.completed(calls[0])  # calls differ in prompts only
        if len(calls) > 1:
            self.serving.check_calls(calls, params)
        iterators = [self.serving.generate(call, params) for call in calls]
        if len(iterators) > 1:
            async with aclosing(merge(iterators)) as merged:
                async for item in merged:
                    yield item
            return
        async with aclosing(iterators[0]) as chunks:
            async for chunk in chunks:
                yield 0, chunk


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`; on disconnect, cancel it and raise `ClientGone`."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            leaving.result()
            raise ClientGone
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
    return working.result()


def json_response(body: Mapping[str, Any], status: int = 200) -> Response:
    return Response(dumps(body), status, media_type="application/json")


async def send_json(send: Send, content: bytes) -> None:
    await send_whole(send, content, "application/json")


async def send_whole(send: Send, content: bytes, media_type: str) -> None:
    headers = [(b"content-type", media_type.encode("ascii")), (b"content-length", b"%d" % len(content))]
    *pieces, last = _pieces(content)
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for piece in pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": last, "more_body": False})


def _pieces(content: bytes) -> list[bytes]:
    if len(content) <= _PIECE:
        return [content]
    return [content[start : start + _PIECE] for start in range(0, len(content), _PIECE)]


def _num_values(chunk: Chunk) -> int:
    """Return an upper bound of log-probabilities; text counts in such units."""
    count = sum(sum(map(len, part.logprobs or ())) + len(part.text) // _CHARACTERS for part in chunk.outputs)
    if chunk.prompt is not None and chunk.prompt.logprobs is not None:
        count += len(chunk.outputs) * _num_prompt_values(chunk)
    return count


def _num_prompt_values(chunk: Chunk) -> int:
    if chunk.prompt is None or chunk.prompt.logprobs is None:
        return 0
    return sum(len(entry) for entry in chunk.prompt.logprobs if entry is not None)


async def _send_events(send: Send, events: bytes) -> None:
    if events:
        for piece in _pieces(events):
            await send({"type": "http.response.body", "body": piece, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
