"""Generating over HTTP: an ASGI answer that runs a reply's calls and sends what comes, whole or as events.

The first output is awaited before the status is sent, so that what goes wrong until then has a status of its own. When
the client goes, the calls' iterators are closed, and that aborts them in the engine; `http_protocol` sees to it that a
client that reads nothing has gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.types import Receive, Scope, Send

from jaxllm.errors import UserError
from jaxllm_server.http.error_bodies import ClientGone, log_failure
from jaxllm_server.http.protocol import transport_of
from jaxllm_server.http.sse import DONE, EventWriter, dumps, event
from jaxllm_server.openai.messages import Reply, error_body_of
from jaxllm_server.shared.merge import merge

if TYPE_CHECKING:
    from jaxllm_server.observability.tracing import Tracer
    from jaxllm_server.shared.calls import Chunk
    from jaxllm_server.shared.serving import Serving

Result = TypeVar("Result")
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events
]


@dataclass(frozen=True)
class Answer:
    """The answer to one request for text; an ASGI app of its own, as Starlette's responses are."""

    serving: Serving
    tracer: Tracer
    reply: Reply
    head: Mapping[str, Any]  # fields that begin the answer and every event of it
    name: str  # of the request in the log
    client: str  # its name
    prepare: Callable[[], Awaitable[None]] | None = None  # awaited before the first chunk is sent: the calls are valid

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send; what fails before the first byte is raised."""
        traceparent = next((value for name, value in scope["headers"] if name == b"traceparent"), b"")
        span = self.tracer.start(traceparent.decode("latin-1") or None, scope["path"], {"http.request.method": "POST"})
        failure: BaseException | None = None
        try:
            work = self._stream(scope, send) if self.reply.form.stream else self._send_whole(send)
            await while_connected(receive, work)
        except UserError as error:
            failure = error
            error.parameter = self._name_of(error.parameter)
            raise
        except BaseException as error:
            failure = error
            raise
        finally:
            span.end(failure)

    async def _send_whole(self, send: Send) -> None:
        chunks: dict[int, Chunk] = {}
        async with aclosing(self._chunks()) as items:
            async for number, chunk in items:
                chunks[number] = chunk
        if self.prepare is not None:
            await self.prepare()
        tail = self.reply.response([chunks[number] for number in sorted(chunks)])
        await send_json(send, {"object": self.reply.object, **self.head, **tail})

    async def _stream(self, scope: Scope, send: Send) -> None:
        reply, writer = self.reply, EventWriter({"object": self.reply.chunk_object, **self.head})
        async with aclosing(self._chunks()) as items:
            first = await anext(items)
            if self.prepare is not None:
                await self.prepare()
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            is_whole = True
            try:
                await _send_events(send, [writer.event(tail) for tail in reply.events(*first)])
                async for number, chunk in items:
                    await _send_events(send, [writer.event(tail) for tail in reply.events(number, chunk)])
                last = reply.last_event()
                ending = [] if last is None else [writer.event(last)]
            except Exception as error:  # too late for a status
                is_whole = False
                log_failure(self.name, error)
                ending = [event(error_body_of(error))]
            await send({"type": "http.response.body", "body": b"".join([*ending, DONE])})
        if not is_whole and (transport := transport_of(scope)) is not None:
            transport.close()

    async def _chunks(self) -> AsyncGenerator[tuple[int, Chunk]]:
        """Yield the chunks of all calls as they come, each with its call's number."""
        calls = [replace(call, client=self.client) for call in self.reply.calls]
        if len(calls) > 1:
            self.serving.check_calls(calls)
        iterators = [self.serving.generate(call) for call in calls]
        if len(iterators) > 1:
            async with aclosing(merge(iterators)) as merged:
                async for item in merged:
                    yield item
            return
        async with aclosing(iterators[0]) as chunks:
            async for chunk in chunks:
                yield 0, chunk

    def _name_of(self, parameter: str | None) -> str | None:
        return parameter if parameter is None else self.reply.names.get(parameter, parameter)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do some work, the body having been read; cancel it and raise `ClientGone` when the client goes."""
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


async def send_json(send: Send, body: Any) -> None:
    """Send a whole answer."""
    content = dumps(body)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


async def _send_events(send: Send, events: list[bytes]) -> None:
    if events:
        await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
