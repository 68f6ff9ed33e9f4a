"""`Answering`: reads requests into replies."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp

from jaxllm_server.http.bodies import BodyReader
from jaxllm_server.http.guard import CLIENT, is_request_id
from jaxllm_server.http.routes import JSON, ApiRoute, Body, Invoked
from jaxllm_server.observability.tracing import Tracer
from jaxllm_server.requests import fields
from jaxllm_server.requests.form import CallsReply
from jaxllm_server.shared.options import ServerOptions

if TYPE_CHECKING:
    from jaxllm_server.serving import Serving

_log = logging.getLogger("jaxllm.server.http")
Made = TypeVar("Made")
MakeReply: TypeAlias = Callable[[fields.Body, ServerOptions, str], Made]
_MOST_TOLD = 256  # clients can invent any number


class Answering:
    """Reads bodies into replies and prepares their answers; one per server."""

    def __init__(self, serving: Serving, options: ServerOptions, tracer: Tracer) -> None:
        self.serving = serving
        self.options = options
        self.bodies = BodyReader(serving, options)
        self._tracer = tracer
        self._told: set[str] = set()

    def route(
        self,
        path: str,
        body: Body,
        make_reply: MakeReply[Made],
        write: Callable[[Request, Made], ASGIApp],
        *,
        pools: bool,
        is_invoked: bool = False,
        media: Sequence[str] = (JSON,),
    ) -> ApiRoute:
        async def run(request: Request) -> ASGIApp:
            self.serving.check_room(request.scope[CLIENT], pools=pools)
            return write(request, await self.read(request, make_reply))

        invoked = Invoked(make_reply, write) if is_invoked else None
        return ApiRoute(path, run, bodies=(body,), pools=pools, invoked=invoked, media=media)

    async def read(self, request: Request, make: MakeReply[Made]) -> Made:
        own_id = request.scope["jaxllm"]["request_id"]
        return await self.bodies.read(request, lambda body: make(body, self.options, own_id))

    def head(self, reply: CallsReply) -> dict[str, Any]:
        model = self.serving.check_model(reply.calls[0].model)
        return {"id": f"{reply.id_prefix}{reply.request_id}", "created": int(time.time()), "model": model}

    def parts(self, request: Request, reply: CallsReply) -> dict[str, Any]:
        """Return an `Answer`'s fields; set `client_id` of the calls, and report ignored fields."""
        record = request.scope["jaxllm"]
        self.warn(request, getattr(reply, "ignored", ()))
        if is_request_id(reply.request_id, self.options):  # an invalid one is refused later
            record["name"] = record["name"].replace(record["request_id"], reply.request_id)
        if record["client_id"] is not None:
            reply.calls = [replace(call, client_id=record["client_id"]) for call in reply.calls]
        return {
            "serving": self.serving,
            "tracer": self._tracer,
            "reply": reply,
            "name": record["name"],
            "client": request.scope[CLIENT],
            "num_bytes": record["body_bytes"],
            "entry": record["entry"],
        }

    def warn(self, request: Request, ignored: Sequence[str]) -> None:
        """Report ignored fields in headers; log each once."""
        if self.options.unknown_fields != "warn":
            return
        request.scope["jaxllm"]["ignored"] = ignored
        for name in ignored:
            if name not in self._told and len(self._told) < _MOST_TOLD:
                self._told.add(name)
                route = request.scope["jaxllm"]["route"]
                _log.warning("a client sent %s, which is not a field of %s: it is ignored", ascii(name), route)
