"""The HTTP front end: its routes, the reading of bodies, and one place where every failure becomes an answer.

What bodies and answers mean is in `openai/`, writing answers in `answers.py`, admission in `guard.py`.
`/health`, `/live` and `/ready` look at the engine's state and never wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxllm.errors import FeatureDisabledError, UserError
from jaxllm.fleet.fleet_llm import FleetLLM
from jaxllm.version import __version__
from jaxllm_server.anthropic import models as anthropic
from jaxllm_server.anthropic.messages import MessagesReply, count_call_of
from jaxllm_server.http import docs_page
from jaxllm_server.http.answers import PoolAnswer, TextAnswer, while_connected
from jaxllm_server.http.error_bodies import (
    ClientGone,
    Headers,
    Refusal,
    answer_of,
    body_too_large,
    is_anthropics,
    log_failure,
    nothing_at,
    status_of,
)
from jaxllm_server.http.guard import CLIENT, Bodies, Guard, is_request_id, request_id_of
from jaxllm_server.http.openapi import description_of
from jaxllm_server.http.protocol import transport_of
from jaxllm_server.http.responses import ResponseEndpoints
from jaxllm_server.http.sse import dumps
from jaxllm_server.http.writers import ChunkWriter, EventReply, LineWriter, NamedWriter
from jaxllm_server.observability.tracing import Tracer
from jaxllm_server.ollama.models import asked_name, ollama_details, ollama_model
from jaxllm_server.ollama.replies import PATHS as OLLAMA_PATHS
from jaxllm_server.ollama.replies import OllamaChatReply, OllamaEmbedReply, OllamaGenerateReply
from jaxllm_server.openai.adapters import load_request_of, unload_request_of
from jaxllm_server.openai.chat import ChatReply
from jaxllm_server.openai.completions import CompletionReply
from jaxllm_server.openai.invocations import route_of
from jaxllm_server.openai.messages import Body, Reply, model_card, model_list
from jaxllm_server.openai.pooling import REPLIES, PoolReply
from jaxllm_server.openai.tokens import detokenize_request_of, tokenize_call_of, tokens_response
from jaxllm_server.openai.unknown_fields import warnings_of
from jaxllm_server.shared import strict_json
from jaxllm_server.shared.auth import Keys
from jaxllm_server.shared.client_quota import Places
from jaxllm_server.shared.options import ServerOptions

if TYPE_CHECKING:
    from jaxllm_server.observability.prometheus import PrometheusObserver
    from jaxllm_server.shared.serving import Serving

_log = logging.getLogger("jaxllm.server.http")
Result = TypeVar("Result")
CLIENT_GONE = 499  # nginx's number, for the metrics: nothing is sent
_NOT_FOUND = "no route"  # as what requests without a route are counted
_DEAD = ("dead", "stopped")
_LARGE_BODY = 256 << 10  # bytes; token ids of this size take 6 ms to parse (measured)
_MANY_TOKENS = 4096
_MOST_TOLD = 256  # names of ignored fields that the log has: a client can make up any number of them


def make_app(
    serving: Serving, options: ServerOptions, observer: PrometheusObserver | None, tracer: Tracer | None
) -> ASGIApp:
    """Build the front end. The engine may still be loading: what needs it says so (503)."""
    endpoints = Endpoints(serving, options, observer, tracer or Tracer())
    router = Router(endpoints.routes(), redirect_slashes=False, default=_refuse_path)
    return Front(Guard(router, options, Keys(options.api_key, options.admin_api_key)), options, observer)


class Endpoints:
    """What the routes do."""

    def __init__(
        self, serving: Serving, options: ServerOptions, observer: PrometheusObserver | None, tracer: Tracer
    ) -> None:
        self._serving = serving
        self._options = options
        self._observer = observer
        self._tracer = tracer
        self._places = Places("requests", options.max_rpcs)
        self._bodies = Bodies(options.most_receiving_bytes, options.max_body_bytes)
        self._since = int(time.time())
        self._told: set[str] = set()  # fields of which the log has said that they are ignored
        self._fingerprint = f"jaxllm-{__version__}"
        shared = self._body, self._parts_of_answer, self._head, self._run
        self._responses = ResponseEndpoints(serving, options, tracer, self._places, *shared)

    def routes(self) -> list[Route]:
        """Return every route there is; a path is also what its requests are counted under."""
        posts: dict[str, Callable[[Request], Awaitable[ASGIApp]]] = {
            "/v1/completions": self.completions,
            "/v1/chat/completions": self.chat,
            "/v1/messages": self._events(MessagesReply, NamedWriter),
            "/v1/messages/count_tokens": self.count_tokens,
            "/api/chat": self._events(OllamaChatReply, LineWriter),
            "/api/generate": self._events(OllamaGenerateReply, LineWriter),
            "/api/embed": self._pooling(OllamaEmbedReply),
            "/api/show": self.ollama_show,
            "/v1/responses": self._responses.create,
            "/v1/responses/input_tokens": self._responses.count,
            "/v1/responses/{response_id}/cancel": self._responses.cancel,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
            "/v1/load_lora_adapter": self.load_adapter,
            "/v1/unload_lora_adapter": self.unload_adapter,
            "/invocations": self.invocations,
            "/drain": self.drain,
            **{path: self._pooling(reply) for path, reply in REPLIES.items()},
        }
        gets: dict[str, Callable[[Request], Awaitable[ASGIApp]]] = {
            "/v1/models": self.models,
            "/v1/models/{model:path}": self.model,
            "/api/tags": self.ollama_models,
            "/api/ps": self.ollama_models,
            "/api/version": self.version,
            "/v1/responses/{response_id}": self._responses.retrieve,
            "/v1/responses/{response_id}/input_items": self._responses.input_items,
            "/health": self.health,
            "/live": self.live,
            "/ready": self.ready,
            "/version": self.version,
            "/load": self.load,
            "/metrics": self.metrics,
        }
        if self._options.enable_tokenizer_info_endpoint:
            gets["/tokenizer_info"] = self.tokenizer_info
        if not self._options.disable_fastapi_docs:
            gets |= {"/openapi.json": self.openapi, "/docs": self.docs}
        deletes = {"/v1/responses/{response_id}": self._responses.delete}
        return [
            *(Route(path, _counted(path, self._gated(run)), methods=["POST"]) for path, run in posts.items()),
            *(Route(path, _counted(path.replace(":path", ""), run), methods=["GET"]) for path, run in gets.items()),
            Route("/ping", _counted("/ping", self.ping), methods=["GET", "POST"]),
            *(Route(path, _counted(path, run), methods=["DELETE"]) for path, run in deletes.items()),
        ]

    async def completions(self, request: Request) -> ASGIApp:
        """Continue one or more prompts."""
        self._serving.check_room(request.scope[CLIENT], pools=False)
        return self._completions(request, await self._body(request))

    def _completions(self, request: Request, body: Body) -> ASGIApp:
        reply = CompletionReply(body, self._options, _own_request_id(request))
        client, model = request.scope[CLIENT], reply.calls[0].model

        async def read_prompts() -> None:
            for prompt in reply.echo_of:
                is_text = isinstance(prompt, str)
                reply.prompt_texts.append(prompt if is_text else await self._serving.detokenize(prompt, client, model))

        return self._text_answer(request, reply, read_prompts)

    async def chat(self, request: Request) -> ASGIApp:
        """Answer a conversation."""
        self._serving.check_room(request.scope[CLIENT], pools=False)
        return self._chat(request, await self._body(request))

    def _chat(self, request: Request, body: Body) -> ASGIApp:
        return self._text_answer(request, ChatReply(body, self._options, _own_request_id(request)))

    def _events(
        self, make_reply: Callable[[Body, ServerOptions, str], EventReply], writer: type[NamedWriter]
    ) -> Callable[[Request], Awaitable[ASGIApp]]:
        """Return an endpoint that answers a conversation in another form than OpenAI's."""

        async def answer(request: Request) -> ASGIApp:
            self._serving.check_room(request.scope[CLIENT], pools=False)
            own_id = _own_request_id(request)
            reply = await self._read(request, lambda body: make_reply(body, self._options, own_id))
            return TextAnswer(**self._parts_of_answer(request, reply), writer=writer(reply, self._head(reply)))

        return answer

    async def count_tokens(self, request: Request) -> ASGIApp:
        """Count the tokens of a conversation that would be answered."""
        ignored: list[str] = []
        read = partial(count_call_of, policy=self._options.unknown_fields, ignored=ignored)
        call = replace(await self._read(request, read), client=request.scope[CLIENT])
        self._warn(request, ignored)
        ids = await while_connected(request.receive, self._serving.tokenize(call))
        return _json({"input_tokens": len(ids)})

    async def ollama_models(self, request: Request) -> ASGIApp:
        """List the served names as Ollama does."""
        return _json({"models": [ollama_model(card) for card in self._cards()]})

    async def ollama_show(self, request: Request) -> ASGIApp:
        """Describe one name as Ollama does."""
        asked = asked_name(await self._body(request))
        self._serving.check_model(asked)
        pools = self._serving.engine.model.pooler is not None
        return _json(ollama_details(self._card(asked), self._options, pools))

    def _pooling(
        self, make_reply: Callable[[Body, ServerOptions, str], PoolReply]
    ) -> Callable[[Request], Awaitable[ASGIApp]]:
        """Return an endpoint that embeds, classifies or scores."""

        async def pool(request: Request) -> ASGIApp:
            self._serving.check_room(request.scope[CLIENT], pools=True)
            return self._pool(request, await self._body(request), make_reply)

        return pool

    def _pool(
        self, request: Request, body: Body, make_reply: Callable[[Body, ServerOptions, str], PoolReply]
    ) -> ASGIApp:
        reply = make_reply(body, self._options, _own_request_id(request))
        return PoolAnswer(**self._parts_of_answer(request, reply), head=self._head(reply))

    async def invocations(self, request: Request) -> ASGIApp:
        """Answer a body of any of these routes, which its fields tell (SageMaker)."""
        self._serving.check_room(request.scope[CLIENT])
        body = await self._body(request)
        path = route_of(body, self._serving.tasks)
        if path in REPLIES:
            return self._pool(request, body, REPLIES[path])
        return self._chat(request, body) if path == "/v1/chat/completions" else self._completions(request, body)

    async def tokenize(self, request: Request) -> ASGIApp:
        """Turn a text or a conversation into token ids."""
        ignored: list[str] = []
        call, wants_pieces = tokenize_call_of(await self._body(request), self._options.unknown_fields, ignored)
        self._warn(request, ignored)
        client = request.scope[CLIENT]
        ids = await while_connected(request.receive, self._serving.tokenize(replace(call, client=client)))
        tokenizer = await self._serving.tokenizer_of(call.model, client) if wants_pieces else None

        def write() -> Response:
            pieces = None if tokenizer is None else [tokenizer.token(token_id) for token_id in ids]
            return _json(tokens_response(ids, self._serving.engine.model.max_model_len, pieces))

        return await self._run(write, len(ids) > _MANY_TOKENS, client)

    async def detokenize(self, request: Request) -> ASGIApp:
        """Turn token ids into text."""
        ignored: list[str] = []
        model, ids = detokenize_request_of(await self._body(request), self._options.unknown_fields, ignored)
        self._warn(request, ignored)
        return _json({"prompt": await self._serving.detokenize(ids, request.scope[CLIENT], model)})

    async def tokenizer_info(self, request: Request) -> ASGIApp:
        """Say what the tokenizer's tokenizer_config.json does."""
        return _json(await self._serving.tokenizer_info(request.scope[CLIENT]))

    async def load_adapter(self, request: Request) -> ASGIApp:
        """Load an adapter under a name."""
        name, path, in_place = load_request_of(await self._body(request))
        await self._serving.adapters.load(name, path, in_place=in_place, client=request.scope[CLIENT])
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, request: Request) -> ASGIApp:
        """Take an adapter away."""
        name = unload_request_of(await self._body(request))
        self._serving.adapters.unload(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def models(self, request: Request) -> ASGIApp:
        """List the names that the model goes by, and its adapters."""
        write = anthropic.model_list if _is_anthropics_client(request) else model_list
        return _json(write(self._cards()))

    async def model(self, request: Request) -> ASGIApp:
        """Describe one name."""
        asked = request.path_params["model"]
        if not asked:  # "" would be the served one
            raise nothing_at(request.scope["path"])
        self._serving.check_model(asked)
        card = self._card(asked)
        return _json(anthropic.model_info(card) if _is_anthropics_client(request) else card)

    def _cards(self) -> list[dict[str, Any]]:
        """Describe all served names."""
        names = (*self._serving.names, *(served.name for served in self._serving.adapters))
        return [self._card(name) for name in names]

    def _card(self, name: str) -> dict[str, Any]:
        """Describe a served name."""
        serving, length = self._serving, self._serving.engine.model.max_model_len
        if name in serving.adapters:
            return model_card(name, serving.adapters.find(name).source, self._since, length, serving.names[0])
        return model_card(name, serving.root, self._since, length)

    async def health(self, request: Request) -> ASGIApp:
        """Say whether there is an engine. Fails while the model is being loaded: vLLM's clients wait for this one."""
        return Response(status_code=503 if self._serving.engine.state in (*_DEAD, "loading") else 200)

    async def ping(self, request: Request) -> ASGIApp:
        """Say whether there is an engine, as /health does; SageMaker asks here."""
        return await self.health(request)

    async def live(self, request: Request) -> ASGIApp:
        """Say whether the process is worth keeping."""
        return Response(status_code=503 if self._serving.engine.state in _DEAD else 200)

    async def ready(self, request: Request) -> ASGIApp:
        """Say whether new requests are accepted."""
        state = self._serving.engine.state
        return _json({"state": state}, 200 if state == "serving" else 503)

    async def version(self, request: Request) -> ASGIApp:
        """Say what serves."""
        return _json({"version": __version__})

    async def load(self, request: Request) -> ASGIApp:
        """Say how busy the engine is; `server_load` is vLLM's number, of requests that are not answered yet."""
        engine = self._serving.engine
        load = engine.get_load()
        answer = {"server_load": load.running + load.waiting, **load._asdict()}
        if isinstance(engine, FleetLLM):
            answer["replicas"] = [{"state": each.state, **each.get_load()._asdict()} for each in engine.replicas]
        return _json(answer)

    async def drain(self, request: Request) -> ASGIApp:
        """Give a replica no more work, and answer when it has none and serves anew."""
        engine, number = self._serving.engine, request.query_params.get("replica", "")
        if not isinstance(engine, FleetLLM):
            raise FeatureDisabledError("this server has one engine: SIGTERM drains it.", "replica")
        if not number.isdecimal():
            raise UserError(f"replica must be the number of a replica, got {number!r}.", "replica")
        await engine.drain_replica(int(number[:9]))
        return _json({"replica": int(number[:9])})

    async def openapi(self, request: Request) -> ASGIApp:
        """Describe these routes (OpenAPI 3.1)."""
        return Response(self._description[0], media_type="application/json")

    async def docs(self, request: Request) -> ASGIApp:
        """Show that description as a page on which the routes can be tried."""
        return Response(self._description[1], media_type="text/html", headers=docs_page.HEADERS)

    @cached_property
    def _description(self) -> tuple[bytes, bytes]:
        """The description, and the page of it: made once, since who may ask for them is not known."""
        description = description_of(self.routes(), self._options.root_path)
        return dumps(description), docs_page.page_of(description)

    async def metrics(self, request: Request) -> ASGIApp:
        """Write all metrics for Prometheus."""
        if self._observer is None:
            raise nothing_at("/metrics")
        return Response(self._observer.render(), media_type=self._observer.content_type)

    def _gated(self, endpoint: Callable[[Request], Awaitable[ASGIApp]]) -> Callable[[Request], Awaitable[ASGIApp]]:
        """Wrap an endpoint so that its requests count as being answered, body and answer included."""

        async def run(request: Request) -> ASGIApp:
            async def answer(scope: Scope, receive: Receive, send: Send) -> None:
                with self._places.place():
                    response = await endpoint(request)
                    await response(scope, receive, send)

            return answer

        run.__name__, run.__doc__ = endpoint.__name__, endpoint.__doc__
        return run

    async def _run(self, function: Callable[[], Result], is_long: bool, client: str) -> Result:
        """Call a function; in one of the engine's threads if it takes long and there still are any."""
        if is_long and self._serving.engine.state not in _DEAD:
            return await self._serving.engine.off_loop(function, client=client)
        return function()

    def _text_answer(
        self, request: Request, reply: Reply, prepare: Callable[[], Awaitable[None]] | None = None
    ) -> TextAnswer:
        parts = self._parts_of_answer(request, reply)
        head = {**self._head(reply), "system_fingerprint": self._fingerprint}
        return TextAnswer(**parts, writer=ChunkWriter(reply, head), prepare=prepare)

    def _head(self, reply: Any) -> dict[str, Any]:
        model = self._serving.check_model(reply.calls[0].model)
        return {"id": f"{reply.id_prefix}{reply.request_id}", "created": int(time.time()), "model": model}

    def _parts_of_answer(self, request: Request, reply: Any) -> dict[str, Any]:
        own = request.scope["jaxllm"]
        self._warn(request, getattr(reply, "ignored", ()))
        if is_request_id(reply.request_id, self._options):  # the body's, perhaps; one that is wrong is refused later
            own["name"] = own["name"].replace(own["request_id"], reply.request_id)
        if own["client_id"] is not None:
            reply.calls = [replace(call, client_id=own["client_id"]) for call in reply.calls]
        return {
            "serving": self._serving,
            "tracer": self._tracer,
            "reply": reply,
            "name": own["name"],
            "client": request.scope[CLIENT],
        }

    def _warn(self, request: Request, ignored: Sequence[str]) -> None:
        """Tell a client which fields its request is answered without, and whoever reads the log of each once."""
        if self._options.unknown_fields != "warn":
            return
        request.scope["jaxllm"]["ignored"] = ignored
        for name in ignored:
            if name not in self._told and len(self._told) < _MOST_TOLD:
                self._told.add(name)
                route = request.scope["jaxllm"]["route"]
                _log.warning("a client sent %s, which is not a field of %s: it is ignored", ascii(name), route)

    async def _body(self, request: Request) -> dict[str, Any]:
        """Read a request's JSON, up to the bound of its size."""
        return await self._read(request, lambda body: body)

    async def _read(self, request: Request, make: Callable[[dict[str, Any]], Result]) -> Result:
        """Read a request's JSON and make something of it; of a large one where the event loop does not wait for it."""
        media, _, parameters = request.headers.get("content-type", "").partition(";")
        charset = parameters.replace(" ", "").lower()
        is_json = media.strip().lower() == "application/json" and charset in ("", 'charset="utf-8"', "charset=utf-8")
        # Ollama does not look at the type, and its users' `curl -d` says that it is a form, LiteLLM nothing. Pages of
        # other origins, which the type would keep out as well, have been refused by their Origin.
        if not is_json and not request.url.path.endswith(OLLAMA_PATHS):
            raise Refusal(415, "The body must be application/json in UTF-8.", "CONTENT_TYPE", closes=True)
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Refusal(415, "Compressed bodies are not accepted.", "CONTENT_ENCODING", closes=True)
        client = request.scope[CLIENT]
        with self._bodies.place(client) as grow:
            body = await self._receive(request, grow)
            is_large = len(body) > _LARGE_BODY

            def parse() -> Result:
                return make(strict_json.read(body, self._options.max_json_depth, in_thread=is_large))

            parsing = self._run(parse, is_large, client)
            return await (while_connected(request.receive, parsing) if is_large else parsing)

    async def _receive(self, request: Request, grow: Callable[[int], None]) -> bytearray:
        """Read a body; `grow` is called with each piece's length before it is kept, and may raise."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._options.stall_timeout or None):
                while True:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    piece = message.get("body", b"")
                    if len(body) + len(piece) > self._options.max_body_bytes:
                        raise body_too_large(self._options.max_body_bytes)
                    grow(len(piece))
                    body += piece
                    if not message.get("more_body", False):
                        return body
        except TimeoutError as error:
            text = f"The body did not come within {self._options.stall_timeout:g} seconds."
            raise Refusal(408, text, "REQUEST_TIMEOUT", "timeout", closes=True) from error


class Front:
    """The outermost app: gives a request its id, answers what went wrong with it, and counts it."""

    def __init__(self, guard: Guard, options: ServerOptions, observer: PrometheusObserver | None) -> None:
        self._guard = guard
        self._options = options
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; raises nothing."""
        if scope["type"] != "http":
            await _answer_other(scope, receive, send)
            return
        began = time.monotonic()
        status: int | None = None
        request_id = shown = uuid4().hex
        own: dict[str, Any] = {"request_id": request_id, "client_id": None, "name": request_id}
        own |= {"route": _NOT_FOUND, "ignored": ()}
        scope = {**scope, "app": self, "jaxllm": own}  # "app" makes Starlette raise its 405
        added: Headers = []

        async def sender(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._options.enable_request_id_headers:
                    added.append((b"x-request-id", shown.encode("ascii")))
                    if is_anthropics(scope["path"]):
                        added.append((b"request-id", shown.encode("ascii")))  # as its clients look for it
                if own["ignored"]:
                    added.append((b"warnings", warnings_of(own["ignored"])))
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        try:
            added += self._guard.cors_headers(scope)
            clients = request_id_of(scope, self._options)
            if clients is not None:
                shown = own["client_id"] = clients
                own["name"] = f"{request_id} ({clients})"
                if self._options.enable_log_requests:
                    _log.info("request %s is %s", request_id, clients)
            await self._guard(scope, receive, sender)
        except ClientGone:
            status = CLIENT_GONE
            _log.info("request %s: the client has gone", own["name"])
        except Exception as error:
            log_failure(own["name"], error)
            if status is not None:
                status = status_of(error)
                if (transport := transport_of(scope)) is not None:
                    transport.abort()  # a whole answer is not to be had, and half of one must not look like it
            else:
                await _send_error(sender, error, scope["path"], request_id)
        finally:
            if self._observer is not None:
                try:
                    seconds = time.monotonic() - began
                    self._observer.request_handled("http", own["route"], status or CLIENT_GONE, seconds)
                except Exception:  # statistics must not fail a request
                    _log.exception("the observer failed")


def _counted(path: str, endpoint: Callable[[Request], Awaitable[ASGIApp]]) -> Callable[[Request], Awaitable[Any]]:
    """Wrap an endpoint so that its requests are counted under its path."""

    async def run(request: Request) -> ASGIApp:
        request.scope["jaxllm"]["route"] = path
        return await endpoint(request)

    run.__name__, run.__doc__ = endpoint.__name__, endpoint.__doc__
    return run


def _own_request_id(request: Request) -> str:
    return request.scope["jaxllm"]["request_id"]


def _is_anthropics_client(request: Request) -> bool:
    """Whether a client of Anthropic's API asks, on a path that both have."""
    return "anthropic-version" in request.headers


def _json(body: Mapping[str, Any], status: int = 200) -> Response:
    return Response(dumps(body), status, media_type="application/json")


async def _refuse_path(scope: Scope, receive: Receive, send: Send) -> None:
    raise nothing_at(scope["path"])


async def _send_error(send: Send, error: Exception, path: str, request_id: str) -> None:
    status, headers, body = answer_of(error, path, request_id)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _answer_other(scope: Scope, receive: Receive, send: Send) -> None:
    """Take part in a server's start and stop; take no WebSocket."""
    if scope["type"] == "lifespan":
        for done in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{done}.complete"})
    elif scope["type"] == "websocket":
        with suppress(Exception):
            await send({"type": "websocket.close", "code": 1000})
