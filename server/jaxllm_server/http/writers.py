"""Serializes answers, whole or in the API's streaming format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from jaxllm_server.generation.calls import Call, Chunk
from jaxllm_server.http.sse import DONE, EventWriter, dumps, event, named_event
from jaxllm_server.openai.replies import error_body_of
from jaxllm_server.requests.form import CallsReply, Reply

Write: TypeAlias = Callable[[Any], bytes]


class Writer(Protocol):
    """Serializes one answer; its only state is the output's progress."""

    media_type: bytes

    def whole(self, chunks: Sequence[Chunk], write: Write = dumps) -> bytes:
        """Return the whole answer, from one chunk per call. Thread-safe."""
        ...

    def finish(self, content: bytes) -> None:
        """Receive the result of `whole` before it is sent."""
        ...

    def events(self, number: int, chunk: Chunk) -> bytes:
        """Return call `number`'s chunk as events, possibly empty."""
        ...

    def end(self) -> bytes:
        """Return a stream's last bytes, or raise an error."""
        ...

    def failure(self, error: Exception) -> bytes: ...


class EventReply(CallsReply, Protocol):
    """A request of an API with several event types; `begin` is called first."""

    calls: Sequence[Call]
    is_stream: bool

    def begin(self, head: Mapping[str, Any]) -> None:
        """Set `id`, `created` (seconds since 1970) and `model`."""
        ...

    def response(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """Return the answer, from one chunk per call."""
        ...

    def events(self, number: int, chunk: Chunk) -> list[dict[str, Any]]:
        """Return the events of call `number`'s chunk; the first one opens the stream."""
        ...

    def last_events(self) -> list[dict[str, Any]]: ...

    def failure(self, error: Exception) -> list[dict[str, Any]]: ...


class ChunkWriter:
    """Writes completions and chats; the stream ends with `[DONE]`."""

    media_type = b"text/event-stream; charset=utf-8"

    def __init__(self, reply: Reply, head: Mapping[str, Any]) -> None:
        self._reply = reply
        self._head = head
        self._writer = EventWriter({"object": reply.chunk_object, **head})

    def whole(self, chunks: Sequence[Chunk], write: Write = dumps) -> bytes:
        return write({"object": self._reply.object, **self._head, **self._reply.response(chunks)})

    def finish(self, content: bytes) -> None:
        """Do nothing."""

    def events(self, number: int, chunk: Chunk) -> bytes:
        return b"".join(self._writer.event(tail) for tail in self._reply.events(number, chunk))

    def end(self) -> bytes:
        last = self._reply.last_event()
        return DONE if last is None else self._writer.event(last) + DONE

    def failure(self, error: Exception) -> bytes:
        return event(error_body_of(error)) + DONE


class NamedWriter:
    """Writes events with their type as name: `event: …` before `data: …`."""

    media_type = b"text/event-stream; charset=utf-8"

    def __init__(self, reply: EventReply, head: Mapping[str, Any]) -> None:
        self._reply = reply
        reply.begin(head)

    def whole(self, chunks: Sequence[Chunk], write: Write = dumps) -> bytes:
        return write(self._reply.response(chunks))

    def finish(self, content: bytes) -> None:
        """Do nothing."""

    def events(self, number: int, chunk: Chunk) -> bytes:
        return self._write(self._reply.events(number, chunk))

    def end(self) -> bytes:
        return self._write(self._reply.last_events())

    def failure(self, error: Exception) -> bytes:
        return self._write(self._reply.failure(error))

    def _write(self, events: Sequence[Mapping[str, Any]]) -> bytes:
        return b"".join(named_event(each["type"], each) for each in events)


class LineWriter(NamedWriter):
    """Writes each event as a line of JSON."""

    media_type = b"application/x-ndjson"

    def _write(self, events: Sequence[Mapping[str, Any]]) -> bytes:
        return b"".join(dumps(each) + b"\n" for each in events)
