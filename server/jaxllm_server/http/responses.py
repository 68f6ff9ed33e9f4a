"""The routes of the Responses API: what is asked for is answered, kept, run in the background, found again and ended.

What bodies and answers mean is in `responses/`. A response is kept when it has ended; one whose client left before has
no end, and is not. One in the background ends by itself: its client polls it, and a cancelled one is kept as it is.
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
from jaxllm_server.access.client_quota import Places
from jaxllm_server.access.ledger import REQUESTS, RESPONSES, Entry
from jaxllm_server.generation.calls import LARGE_REQUEST, Call
from jaxllm_server.http.answers import TextAnswer, while_connected
from jaxllm_server.http.bodies import BodyReader
from jaxllm_server.http.error_bodies import Refusal, log_failure
from jaxllm_server.http.guard import CLIENT
from jaxllm_server.http.response_sockets import KEPT, ResponseSockets
from jaxllm_server.http.sse import dumps, dumps_large
from jaxllm_server.http.writers import NamedWriter
from jaxllm_server.requests.fields import Body, text
from jaxllm_server.responses.compaction import CompactionReply
from jaxllm_server.responses.items import RESPONSE_PREFIX, Item, num_characters, references_of, response_id_of
from jaxllm_server.responses.reply import REPEATED_NUMBERS, ResponseReply
from jaxllm_server.responses.request import of_message
from jaxllm_server.responses.store import (
    LostError,
    OfConnection,
    ResponseStore,
    Stored,
    find_items,
    history_of,
    ordered,
    page_of,
)
from jaxllm_server.shared.options import ServerOptions

if TYPE_CHECKING:
    from jaxllm_server.observability.tracing import Tracer
    from jaxllm_server.serving import Serving

OwnReply = TypeVar("OwnReply", bound=ResponseReply)
_LARGE = 256 << 10  # bytes of JSON that are read or written beside the event loop: 1 ms (measured)
_MANY_ITEMS = 512  # of a conversation; to read them takes 4 µs each (measured)
_MOST_LISTED, _LISTED = 100, 20  # items of one answer: OpenAI's bound and default


class KeepingWriter(NamedWriter):
    """Writes an answer, and hands over the response as it is when it ends."""

    def __init__(self, reply: ResponseReply, head: Mapping[str, Any], keep: Callable[[bytes], None]) -> None:
        super().__init__(reply, head)
        self._response = reply.snapshot
        self._keep = keep

    def finish(self, content: bytes) -> None:
        """Keep the whole answer."""
        self._keep(content)

    def end(self) -> bytes:
        """Return the last events."""
        self._keep(dumps(self._response()))
        return super().end()

    def failure(self, error: Exception) -> bytes:
        """Return the events that tell of an error."""
        events = super().failure(error)
        self._keep(dumps(self._response()))
        return events


@dataclass
class Job:
    """A response that is made in the background."""

    task: asyncio.Task[None]
    reply: ResponseReply
    num_bytes: int  # of the body, and of the conversation before it
    kept: asyncio.Future[None]  # done when the response is in the store
    writing: asyncio.Future[bytes] | None = None


class ResponseEndpoints:
    """What the routes do. `parts_of_answer` and `head_of` are those of the server's other routes."""

    def __init__(
        self,
        serving: Serving,
        options: ServerOptions,
        tracer: Tracer,
        places: Places,
        bodies: BodyReader,
        parts_of_answer: Callable[[Request, Any], dict[str, Any]],
        head_of: Callable[[Any], dict[str, Any]],
    ) -> None:
        self._serving = serving
        self._options = options
        self._tracer = tracer
        self._places = places
        self._bodies = bodies
        self._parts_of_answer = parts_of_answer
        self._head_of = head_of
        self._store = ResponseStore(options.max_stored_response_bytes)
        self.sockets = ResponseSockets(options, serving.ledger, partial(OfConnection, self._store))
        serving.ledger.watch(RESPONSES, lambda: self._store.num_bytes)
        self._jobs: dict[tuple[str, str], Job] = {}  # by client and id

    async def create(self, request: Request) -> ASGIApp:
        """Answer a conversation, at once or in the background."""
        client = request.scope[CLIENT]
        self._serving.check_room(client, pools=False)
        kept_here: OfConnection | None = request.scope.get(KEPT)
        reply, chain = await self._reply_of(request, ResponseReply)
        parts = self._parts_of_answer(request, reply)
        head = self._head_of(reply) | await self._sampling_of(reply, client, parts["num_bytes"])
        response_id: str = head["id"]
        self._serving.check_text("request_id", reply.request_id)
        items = b""
        is_kept = reply.is_kept or kept_here is not None
        copied = kept_here.own(chain) if kept_here is not None and reply.is_kept else {}  # it outlasts them
        previous = next((each for each in reversed(chain) if each not in copied), None)
        if is_kept:
            is_large = num_characters(reply.items) + sum(each.size for each in copied.values()) > _LARGE

            def write() -> bytes:
                return dumps_large([*history_of(copied.values()), *reply.items])

            items = await self._bodies.run(write, is_large, client)
        name = response_id if kept_here is None else kept_here.name_of(response_id)
        if name in chain or (client, response_id) in self._jobs:
            raise RequestIdInUseError(f"request id {reply.request_id!r} is in use.", "request_id")

        def keep(response: bytes) -> None:
            stored = Stored(response, items, previous)
            if reply.is_kept or kept_here is None:
                self._store.put(client, response_id, stored)
            else:
                kept_here.put(response_id, stored)

        if reply.is_background:
            reply.begin(head)
            num_bytes = request.scope["jaxllm"]["body_bytes"] + sum(each.size for each in chain.values())
            return await self._begin(request, reply, response_id, keep, num_bytes)
        writer = KeepingWriter(reply, head, keep) if is_kept else NamedWriter(reply, head)
        return TextAnswer(**parts, writer=writer)

    async def count(self, request: Request) -> ASGIApp:
        """Count the tokens of the conversation that a body would have answered."""
        reply, _ = await self._reply_of(request, ResponseReply)
        self._parts_of_answer(request, reply)  # says which fields are ignored
        self._serving.check_text("request_id", reply.request_id)
        call = replace(reply.calls[0], client=request.scope[CLIENT])
        ids = await while_connected(request.receive, self._serving.tokenize(call))
        return _json(dumps({"object": "response.input_tokens", "input_tokens": len(ids)}))

    async def compact(self, request: Request) -> ASGIApp:
        """Sum up a conversation."""
        self._serving.check_room(request.scope[CLIENT], pools=False)
        reply, _ = await self._reply_of(request, CompactionReply)
        reply.bound(self._serving.engine.model.max_model_len)
        parts = self._parts_of_answer(request, reply)
        head = self._head_of(reply) | await self._sampling_of(reply, request.scope[CLIENT], parts["num_bytes"])
        return TextAnswer(**parts, writer=NamedWriter(reply, head))

    async def _reply_of(self, request: Request, reply_type: type[OwnReply]) -> tuple[OwnReply, dict[str, Stored]]:
        """Read a body; return its reply, and the earlier responses of its conversation by their names in the store."""
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
        """Return a response, as far as it has come."""
        if request.query_params.get("stream", "false") != "false":
            raise UnsupportedError("A kept response is not streamed by jaxllm: leave stream out.", "stream")
        client, response_id = _asked(request)
        job = self._jobs.get((client, response_id))
        return _json(self._find(client, response_id).response if job is None else await self._written(job, client))

    async def delete(self, request: Request) -> ASGIApp:
        """Forget a response; one that is being made is ended first."""
        client, response_id = _asked(request)
        job = await self._end_job(client, response_id)
        if not self._store.delete(client, response_id) and job is None:
            raise _not_found(response_id)
        return _json(dumps({"id": response_id, "object": "response", "deleted": True}))

    async def cancel(self, request: Request) -> ASGIApp:
        """End a response that is being made in the background; one that has ended is returned as it is."""
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
        """List what a response was made from: the conversation before, and its own input; the last item first."""
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
        """Return the sampling parameters that a response repeats, and the clock; raises `UserError` for a wrong one."""
        try:
            params = await self._serving.completed(replace(reply.calls[0], client=client, num_bytes=num_bytes))
        except UserError as error:
            if error.parameter is not None:
                error.parameter = reply.names.get(error.parameter, error.parameter)
            raise
        return {**{name: getattr(params, name) for name in REPEATED_NUMBERS}, "clock": time.time}

    def _chain(self, body: Body, client: str, kept_here: OfConnection | None) -> dict[str, Stored]:
        """Return the earlier responses of a request's conversation, by their names in the store."""
        previous = text(body, "previous_response_id")
        if previous is None:
            return {}
        if not previous.startswith(RESPONSE_PREFIX):
            message = f"Invalid 'previous_response_id': {previous[:64]!r}. Expected an ID that begins with 'resp'."
            raise UserError(message, "previous_response_id")
        if (client, previous) in self._jobs:
            raise UserError(f"The response {previous!r} is still being made.", "previous_response_id")
        if kept_here is not None:
            previous = kept_here.used = kept_here.name_of(previous)
        try:
            return self._store.chain(client, previous)
        except LostError as error:
            message = f"Previous response with id '{printable(error.response_id[:128])}' not found."
            reason = "PREVIOUS_RESPONSE_NOT_FOUND"
            raise Refusal(404, message, reason, parameter="previous_response_id") from error

    async def _kept_items(self, ids: set[str], client: str, kept_here: OfConnection | None) -> Mapping[str, Item]:
        """Return the items to which a request refers; those that are not kept are missing."""
        found = []
        for response_id in {response_id_of(each) for each in ids}:
            try:
                name = response_id if kept_here is None else kept_here.name_of(response_id)
                found.append(self._store.get(client, name))
            except LostError:
                continue  # `items_of` says which item is missing
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
        """Start to make a response, with a place among the server's requests and in its ledger until it is kept."""
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

        task.add_done_callback(end)  # and not a `finally`: a task that is cancelled at once does not even begin
        return _json(await self._written(job, client))

    async def _written(self, job: Job, client: str) -> bytes:
        """Write a response as far as it has come; off the event loop if it repeats a long request."""
        response = job.reply.snapshot()
        if job.num_bytes <= _LARGE:
            return dumps(response)
        response["output"] = deepcopy(response["output"])  # which may grow while it is written
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
        """Cancel a response that is being made, and wait until it has ended."""
        job = self._jobs.get((client, response_id))
        if job is not None:
            job.task.cancel()
            await asyncio.wait([job.kept])
        return job

    def _find(self, client: str, response_id: str) -> Stored:
        try:
            return self._store.get(client, response_id)
        except LostError as error:
            raise _not_found(response_id) from error


def _asked(request: Request) -> tuple[str, str]:
    """Return who asks for which response."""
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
