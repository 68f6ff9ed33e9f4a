"""How the answer to a request for text becomes bytes: whole, or as events of a stream in the framing of its API.

A reply says what an answer holds, as plain data; a writer of this module puts it on the wire. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from jaxllm_server.generation.calls import Call, Chunk
from jaxllm_server.http.sse import DONE, EventWriter, dumps, event, named_event
from jaxllm_server.openai.replies import error_body_of
from jaxllm_server.requests.form import Reply

Write: TypeAlias = Callable[[Any], bytes]


class Writer(Protocol):
    """Writes one answer. It remembers how far it has written, and nothing else."""

    media_type: bytes  # of a stream

    def whole(self, chunks: Sequence[Chunk], write: Write = dumps) -> bytes:
        """Return the whole answer; one chunk for each call. Called in any thread."""
        ...

    def finish(self, content: bytes) -> None:
        """Take note of the whole answer as it was written."""
        ...

    def events(self, number: int, chunk: Chunk) -> bytes:
        """Return what a chunk of call `number` adds to a stream, b"" for nothing."""
        ...

    def end(self) -> bytes:
        """Return what ends a stream; raises what keeps it from ending well."""
        ...

    def failure(self, error: Exception) -> bytes:
        """Return what ends a stream that has failed."""
        ...


class EventReply(Protocol):
    """One request of an API whose stream has events of several types, and how its chunks are written.

    Each event is an object that says its `type`. The id, the time and the model come by `begin`, before all else.
    """

    calls: Sequence[Call]
    is_stream: bool
    request_id: str
    id_prefix: str
    names: Mapping[str, str]  # parameter that an error names -> field of the request, where they differ

    def begin(self, head: Mapping[str, Any]) -> None:
        """Take in `id`, `created` (seconds since 1970) and `model`."""
        ...

    def response(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        """Return the whole answer; one chunk for each call."""
        ...

    def events(self, number: int, chunk: Chunk) -> list[dict[str, Any]]:
        """Return a chunk's events, of call `number`; the first chunk's begin with those that open a stream."""
        ...

    def last_events(self) -> list[dict[str, Any]]:
        """Return the events after the last chunk's."""
        ...

    def failure(self, error: Exception) -> list[dict[str, Any]]:
        """Return the events that end a stream which has failed."""
        ...


class ChunkWriter:
    """Writes the answers of completions and chats: events begin with the same fields, and `[DONE]` comes last."""

    media_type = b"text/event-stream; charset=utf-8"

    def __init__(self, reply: Reply, head: Mapping[str, Any]) -> None:
        self._reply = reply
        self._head = head
        self._writer = EventWriter({"object": reply.chunk_object, **head})

    def whole(self, chunks: Sequence[Chunk], write: Write = dumps) -> bytes:
        """Return the whole answer."""
        return write({"object": self._reply.object, **self._head, **self._reply.response(chunks)})

    def finish(self, content: bytes) -> None:
        """Keep nothing."""

    def events(self, number: int, chunk: Chunk) -> bytes:
        """Return what a chunk adds."""
        return b"".join(self._writer.event(tail) for tail in self._reply.events(number, chunk))

    def end(self) -> bytes:
        """Return the usage, where it was asked for, and the end."""
        last = self._reply.last_event()
        return DONE if last is None else self._writer.event(last) + DONE

    def failure(self, error: Exception) -> bytes:
        """Return the error and the end."""
        return event(error_body_of(error)) + DONE


class NamedWriter:
    """Writes events with their names, which are their types: `event: …` before `data: …`."""

    media_type = b"text/event-stream; charset=utf-8"

    def __init__(self, reply: EventReply, head: Mapping[str, Any]) -> None:
        self._reply = reply
        reply.begin(head)

    def whole(self, chunks: Sequence[Chunk], write: Write = dumps) -> bytes:
        """Return the whole answer."""
        return write(self._reply.response(chunks))

    def finish(self, content: bytes) -> None:
        """Keep nothing."""

    def events(self, number: int, chunk: Chunk) -> bytes:
        """Return what a chunk adds."""
        return self._write(self._reply.events(number, chunk))

    def end(self) -> bytes:
        """Return the last events."""
        return self._write(self._reply.last_events())

    def failure(self, error: Exception) -> bytes:
        """Return the events that tell of an error."""
        return self._write(self._reply.failure(error))

    def _write(self, events: Sequence[Mapping[str, Any]]) -> bytes:
        return b"".join(named_event(each["type"], each) for each in events)


class LineWriter(NamedWriter):
    """Writes each event as a line of JSON."""

    media_type = b"application/x-ndjson"

    def _write(self, events: Sequence[Mapping[str, Any]]) -> bytes:
        return b"".join(dumps(each) + b"\n" for each in events)
