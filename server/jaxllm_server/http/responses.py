"""The routes of the Responses API.

A response is stored when it ends, unless its client disconnected before. A background response runs to its end; a
cancelled one is stored as is.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, aclosing
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from jaxllm.errors import RequestIdInUseError, UnsupportedError, UserError, printable
from jaxllm_server.access.client_quota import CallLimit
from jaxllm_server.access.ledger import REQUESTS, RESPONSES, Entry
from jaxllm_server.generation.calls import LARGE_REQUEST, Call
from jaxllm_server.http.answering import Answering
from jaxllm_server.http.answers import TextAnswer, while_connected
from jaxllm_server.http.error_bodies import Refusal, log_failure
from jaxllm_server.http.guard import CLIENT
from jaxllm_server.http.openapi import BODIES
from jaxllm_server.http.response_sockets import KEPT, ResponseSockets
from jaxllm_server.http.response_sockets import ROUTE as SOCKETS
from jaxllm_server.http.routes import GET, ApiRoute
from jaxllm_server.http.sse import dumps, dumps_large
from jaxllm_server.http.writers import NamedWriter
from jaxllm_server.requests.fields import Body, text
from jaxllm_server.responses.compaction import CompactionReply
from jaxllm_server.responses.items import RESPONSE_PREFIX, Item, num_characters, references_of, response_id_of
from jaxllm_server.responses.reply import REPEATED_NUMBERS, ResponseReply
from jaxllm_server.responses.request import of_message
from jaxllm_server.responses.store import (
    ConnectionResponses,
    LostError,
    ResponseStore,
    StoredResponse,
    find_items,
    history_of,
    ordered,
    page_of,
)

if TYPE_CHECKING:
    from jaxllm_server.observability.tracing import Tracer

OwnReply = TypeVar("OwnReply", bound=ResponseReply)
_LARGE = 256 << 10  # bytes of JSON, 1 ms; more take a thread
_MANY_ITEMS = 512  # 4 µs each (measured)
_MOST_LISTED, _LISTED = 100, 20  # OpenAI's limit and default


class KeepingWriter(NamedWriter):
    """Writes an answer; passes the final response to `keep`."""

    def __init__(self, reply: ResponseReply, head: Mapping[str, Any], keep: Callable[[bytes], None]) -> None:
        super().__init__(reply, head)
        self._response = reply.snapshot
        self._keep = keep

    def finish(self, content: bytes) -> None:
        self._keep(content)

    def end(self) -> bytes:
        self._keep(dumps(self._response()))
        return super().end()

    def failure(self, error: Exception) -> bytes:
        events = super().failure(error)
        self._keep(dumps(self._response()))
        return events


@dataclass
class Job:
    """A background response."""

    task: asyncio.Task[None]
    reply: ResponseReply
    num_bytes: int
    kept: asyncio.Future[None]  # done once stored
    writing: asyncio.Future[bytes] | None = None


class ResponseEndpoints:
    """Handlers of the Responses API."""

    def __init__(self, answering: Answering, tracer: Tracer, places: CallLimit) -> None:
        self._serving, self._options = answering.serving, answering.options
        self._tracer = tracer
        self._places = places
        self._answering = answering
        self._bodies = answering.bodies
        self._store = ResponseStore(self._options.max_stored_response_bytes)
        self._sockets = ResponseSockets(self._options, self._serving.ledger, partial(ConnectionResponses, self._store))
        self._serving.ledger.watch(RESPONSES, lambda: self._store.num_bytes)
        self._jobs: dict[tuple[str, str], Job] = {}

    def routes(self) -> list[ApiRoute]:
        one = "/v1/responses/{response_id}"
        read = {"/v1/responses": self.create, "/v1/responses/input_tokens": self.count}
        read["/v1/responses/compact"] = self.compact
        return [
            *(ApiRoute(path, run, bodies=(BODIES[path],), pools=False) for path, run in read.items()),
            ApiRoute(f"{one}/cancel", self.cancel, pools=False),
            ApiRoute(one, self.retrieve, GET, pools=False),
            ApiRoute(f"{one}/input_items", self.input_items, GET, pools=False),
            ApiRoute("/v1/responses", self._sockets.open, GET, pools=False, is_bounded=False, label=SOCKETS),
            ApiRoute(one, self.delete, ("DELETE",), pools=False, is_bounded=False),
        ]

    async def create(self, request: Request) -> ASGIApp:
        """Answer a conversation, immediately or in the background."""
        client = request.scope[CLIENT]
        self._serving.check_room(client, pools=False)
        kept_here: ConnectionResponses | None = request.scope.get(KEPT)
        reply, chain = await self._reply_of(request, ResponseReply)
        parts = self._answering.parts(request, reply)
        head = self._answering.head(reply) | await self._sampling_of(reply, client, parts["num_bytes"])
        response_id: str = head["id"]
        self._serving.check_text("request_id", reply.request_id)
        items = b""
        is_kept = reply.is_kept or kept_here is not None
        copied = kept_here.own(chain) if kept_here is not None and reply.is_kept else {}  # outlives the connection
        previous = next((response_id for response_id in reversed(chain) if response_id not in copied), None)
        if is_kept:
            is_large = num_characters(reply.items) + sum(stored.size for stored in copied.values()) > _LARGE

            def write() -> bytes:
                return dumps_large([*history_of(copied.values()), *reply.items])

            items = await self._bodies.run(write, is_large, client)
        name = response_id if kept_here is None else kept_here.name_of(response_id)
        if name in chain or (client, response_id) in self._jobs:
            raise RequestIdInUseError(f"request id {reply.request_id!r} is in use; choose another.", "request_id")

        def keep(response: bytes) -> None:
            stored = StoredResponse(response, items, previous)
            if reply.is_kept or kept_here is None:
                self._store.put(client, response_id, stored)
            else:
                kept_here.put(response_id, stored)

        if reply.is_background:
            reply.begin(head)
            num_bytes = request.scope["jaxllm"]["body_bytes"] + sum(stored.size for stored in chain.values())
            return await self._begin(request, reply, response_id, keep, num_bytes)
        writer = KeepingWriter(reply, head, keep) if is_kept else NamedWriter(reply, head)
        return TextAnswer(**parts, writer=writer)

    async def count(self, request: Request) -> ASGIApp:
        reply, _ = await self._reply_of(request, ResponseReply)
        self._answering.parts(request, reply)  # reports ignored fields
        self._serving.check_text("request_id", reply.request_id)
        call = replace(reply.calls[0], client=request.scope[CLIENT])
        ids = await while_connected(request.receive, self._serving.tokenize(call))
        return _json(dumps({"object": "response.input_tokens", "input_tokens": len(ids)}))

    async def compact(self, request: Request) -> ASGIApp:
        self._serving.check_room(request.scope[CLIENT], pools=False)
        reply, _ = await self._reply_of(request, CompactionReply)
        reply.bound(self._serving.engine.model.max_model_len)
        parts = self._answering.parts(request, reply)
        head = self._answering.head(reply) | await self._sampling_of(reply, request.scope[CLIENT], parts["num_bytes"])
        return TextAnswer(**parts, writer=NamedWriter(reply, head))

    async def _reply_of(
        self, request: Request, reply_type: type[OwnReply]
    ) -> tuple[OwnReply, dict[str, StoredResponse]]:
        client, kept_here = request.scope[CLIENT], request.scope.get(KEPT)
        body = await self._bodies.json(request)
        if kept_here is not None:
            body = of_message(body)
        chain = self._chain(body, client, kept_here)
        is_large = sum(stored.size for stored in chain.values()) > _LARGE
        history = await self._bodies.run(partial(history_of, chain.values()), is_large, client)
        request.scope["jaxllm"]["entry"].charge(REQUESTS, sum(stored.size for stored in chain.values()))
        kept = await self._kept_items(references_of(body.get("input")), client, kept_here)
        make = partial(reply_type, body, self._options, request.scope["jaxllm"]["request_id"], history, kept)
        given = body.get("input")
        num_items = len(history) + (len(given) if isinstance(given, list) else 1)
        is_large = num_items > _MANY_ITEMS or request.scope["jaxllm"]["body_bytes"] > LARGE_REQUEST
        return await self._bodies.run(make, is_large, client), chain

    async def retrieve(self, request: Request) -> ASGIApp:
        """Return a response, possibly incomplete."""
        if request.query_params.get("stream", "false") != "false":
            raise UnsupportedError("Streaming a stored response is not supported by jaxllm; remove stream.", "stream")
        client, response_id = _asked(request)
        job = self._jobs.get((client, response_id))
        return _json(self._find(client, response_id).response if job is None else await self._written(job, client))

    async def delete(self, request: Request) -> ASGIApp:
        """Delete a response; one in progress is cancelled first."""
        client, response_id = _asked(request)
        job = await self._end_job(client, response_id)
        if not self._store.delete(client, response_id) and job is None:
            raise _not_found(response_id)
        return _json(dumps({"id": response_id, "object": "response", "deleted": True}))

    async def cancel(self, request: Request) -> ASGIApp:
        """Cancel a background response; a finished one is returned unchanged."""
        client, response_id = _asked(request)
        job = await self._end_job(client, response_id)
        if job is not None:
            return _json(await self._written(job, client))
        response = self._find(client, response_id).response
        read = partial(json.loads, response)
        if not (await self._bodies.run(read, len(response) > _LARGE, client))["background"]:
            message = "Cannot cancel a synchronous response."
            raise Refusal(400, message, "INVALID_PARAMETER", parameter="response_id")
        return _json(response)

    async def input_items(self, request: Request) -> ASGIApp:
        """List a response's input items, including the earlier conversation, newest first by default."""
        client, response_id = _asked(request)
        limit, order = request.query_params.get("limit", str(_LISTED)), request.query_params.get("order", "desc")
        if not (limit.isdecimal() and limit.isascii() and len(limit) <= 3 and 1 <= int(limit) <= _MOST_LISTED):
            raise UserError(f"limit must be from 1 to {_MOST_LISTED}.", "limit")
        if order not in ("asc", "desc"):
            raise UserError("order must be asc or desc.", "order")
        job, after = self._jobs.get((client, response_id)), request.query_params.get("after")
        last = response_id if job is None else job.reply.previous
        try:
            chain = [] if last is None else list(self._store.chain(client, last).values())
        except LostError as error:
            raise _not_found(error.response_id) from error

        def write() -> bytes:
            own = json.loads(chain[-1].items) if job is None else job.reply.items
            items = ordered(chain[:-1] if job is None else chain, own, order == "asc")
            return dumps_large(page_of(items, int(limit), after))

        size = sum(stored.size for stored in chain)
        return _json(await self._bodies.run(write, size > _LARGE, client))

    async def _sampling_of(self, reply: ResponseReply, client: str, num_bytes: int) -> dict[str, Any]:
        try:
            params = await self._serving.completed(replace(reply.calls[0], client=client, num_bytes=num_bytes))
        except UserError as error:
            if error.parameter is not None:
                error.parameter = reply.names.get(error.parameter, error.parameter)
            raise
        return {**{name: getattr(params, name) for name in REPEATED_NUMBERS}, "clock": time.time}

    def _chain(self, body: Body, client: str, kept_here: ConnectionResponses | None) -> dict[str, StoredResponse]:
        previous = text(body, "previous_response_id")
        if previous is None:
            return {}
        if not previous.startswith(RESPONSE_PREFIX):
            message = f"Invalid 'previous_response_id': {previous[:64]!r}. Expected an ID that begins with 'resp'."
            raise UserError(message, "previous_response_id")
        if (client, previous) in self._jobs:
            raise UserError(f"The response {previous!r} is still in progress; retry later.", "previous_response_id")
        if kept_here is not None:
            previous = kept_here.used = kept_here.name_of(previous)
        try:
            return self._store.chain(client, previous)
        except LostError as error:
            message = f"Previous response with id '{printable(error.response_id[:128])}' not found."
            reason = "PREVIOUS_RESPONSE_NOT_FOUND"
            raise Refusal(404, message, reason, parameter="previous_response_id") from error

    async def _kept_items(
        self, ids: set[str], client: str, kept_here: ConnectionResponses | None
    ) -> Mapping[str, Item]:
        found = []
        for response_id in {response_id_of(each) for each in ids}:
            try:
                name = response_id if kept_here is None else kept_here.name_of(response_id)
                found.append(self._store.get(client, name))
            except LostError:
                continue
        is_large = sum(stored.size for stored in found) > _LARGE
        return await self._bodies.run(partial(find_items, found, ids), is_large, client) if found else {}

    async def _begin(
        self,
        request: Request,
        reply: ResponseReply,
        response_id: str,
        keep: Callable[[bytes], None],
        num_bytes: int,
    ) -> ASGIApp:
        client, name = request.scope[CLIENT], request.scope["jaxllm"]["name"]
        entry: Entry = request.scope["jaxllm"]["entry"].give()
        with ExitStack() as places:
            places.enter_context(entry)
            places.enter_context(self._places.place())
            held = places.pop_all()
        num_own = request.scope["jaxllm"]["body_bytes"]
        call = replace(reply.calls[0], client=client, num_bytes=num_own, entry=entry)
        task = asyncio.ensure_future(self._make(reply, call, request.headers.get("traceparent")))
        job = Job(task, reply, num_bytes, asyncio.get_running_loop().create_future())
        self._jobs[client, response_id] = job

        def finish(writing: asyncio.Future[bytes]) -> None:
            held.close()
            del self._jobs[client, response_id]
            job.kept.set_result(None)
            if not writing.cancelled() and writing.exception() is None:
                keep(writing.result())

        def end(task: asyncio.Task[None]) -> None:
            if task.cancelled():
                reply.cancel()
            elif (error := task.exception()) is not None:
                log_failure(name, error)
                reply.failure(error)
            if num_bytes > _LARGE:
                job.writing = asyncio.ensure_future(self._written(job, client))
                job.writing.add_done_callback(finish)
            else:
                written: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
                written.set_result(dumps(reply.snapshot()))
                finish(written)

        task.add_done_callback(end)  # a task cancelled immediately never starts
        return _json(await self._written(job, client))

    async def _written(self, job: Job, client: str) -> bytes:
        response = job.reply.snapshot()
        if job.num_bytes <= _LARGE:
            return dumps(response)
        response["output"] = deepcopy(response["output"])
        return await self._bodies.run(partial(dumps_large, response), True, client)

    async def _make(self, reply: ResponseReply, call: Call, traceparent: str | None) -> None:
        span = self._tracer.start(traceparent, "/v1/responses", {"http.request.method": "POST"})
        failure: BaseException | None = None
        try:
            async with aclosing(self._serving.generate(call)) as chunks:
                async for chunk in chunks:
                    reply.events(0, chunk)
        except BaseException as error:
            failure = error
            raise
        finally:
            span.end(failure)

    async def _end_job(self, client: str, response_id: str) -> Job | None:
        """Cancel a background response; return it once stored."""
        job = self._jobs.get((client, response_id))
        if job is not None:
            job.task.cancel()
            await asyncio.wait([job.kept])
        return job

    def _find(self, client: str, response_id: str) -> StoredResponse:
        try:
            return self._store.get(client, response_id)
        except LostError as error:
            raise _not_found(response_id) from error


def _asked(request: Request) -> tuple[str, str]:
    response_id = request.path_params["response_id"]
    if not response_id.startswith(RESPONSE_PREFIX):
        message = f"Invalid 'response_id': {response_id[:64]!r}. Expected an ID that begins with 'resp'."
        raise UserError(message, "response_id")
    return request.scope[CLIENT], response_id


def _not_found(response_id: str) -> Refusal:
    message = f"Response with id '{printable(response_id[:128])}' not found."
    return Refusal(404, message, "RESPONSE_NOT_FOUND", parameter="response_id")


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
