"""The routes of the HTTP front end, and what those do that answer requests: a body becomes a reply, that an answer.

What bodies and answers mean is in the packages of the APIs, writing answers in `answers.py`, what a server tells of
itself in `status.py`, the Responses API in `responses.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxllm.errors import FeatureDisabledError, UnavailableError, UserError
from jaxllm.pooling_params import TASKS as POOLING_TASKS
from jaxllm.version import __version__
from jaxllm_server.access.client_quota import Places
from jaxllm_server.anthropic.messages import MessagesReply, count_call_of
from jaxllm_server.http import docs_page
from jaxllm_server.http.answers import PoolAnswer, TextAnswer, json_response, while_connected
from jaxllm_server.http.bodies import BodyReader
from jaxllm_server.http.guard import CLIENT, is_request_id
from jaxllm_server.http.openapi import description_of
from jaxllm_server.http.response_sockets import ROUTE as SOCKETS
from jaxllm_server.http.responses import ResponseEndpoints
from jaxllm_server.http.sse import dumps
from jaxllm_server.http.status import StatusEndpoints
from jaxllm_server.http.writers import ChunkWriter, EventReply, LineWriter, NamedWriter
from jaxllm_server.observability.tracing import Tracer
from jaxllm_server.ollama.replies import OllamaChatReply, OllamaEmbedReply, OllamaGenerateReply
from jaxllm_server.openai.adapters import load_request_of, unload_request_of
from jaxllm_server.openai.chat import ChatReply
from jaxllm_server.openai.chats import ChatsReply
from jaxllm_server.openai.completions import CompletionReply
from jaxllm_server.openai.invocations import route_of
from jaxllm_server.openai.pooling import REPLIES, PoolReply
from jaxllm_server.openai.tokens import detokenize_request_of, tokenize_call_of, tokens_response
from jaxllm_server.requests.fields import Body
from jaxllm_server.requests.form import Reply
from jaxllm_server.shared.options import ServerOptions

if TYPE_CHECKING:
    from jaxllm_server.observability.prometheus import PrometheusObserver
    from jaxllm_server.serving import Serving

_log = logging.getLogger("jaxllm.server.http")
AnyReply = TypeVar("AnyReply")
_MANY_TOKENS = 4096
_POOLING_PATHS = frozenset({"/api/embed", *REPLIES})
_GENERATING_PATHS = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/api/chat",
        "/api/generate",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/responses/compact",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel",
        "/v1/responses/{response_id}/input_items",
    }
)
_MOST_TOLD = 256  # names of ignored fields that the log has: a client can make up any number of them


class Endpoints:
    """What the routes do."""

    def __init__(
        self, serving: Serving, options: ServerOptions, observer: PrometheusObserver | None, tracer: Tracer
    ) -> None:
        self._serving = serving
        self._options = options
        self._tracer = tracer
        self._places = Places("requests", options.max_rpcs)
        self._bodies = BodyReader(serving, options)
        self._pages: dict[tuple[str, tuple[str, ...]], bytes] = {}  # by the function that wrote it, and the tasks
        self._told: set[str] = set()  # fields of which the log has said that they are ignored
        self._fingerprint = f"jaxllm-{__version__}"
        self._status = StatusEndpoints(serving, options, observer, self._bodies.json)
        self._responses = ResponseEndpoints(
            serving, options, tracer, self._places, self._bodies, self._parts_of_answer, self._head
        )

    def routes(self) -> list[Route]:
        """Return every route there is; a path is also what its requests are counted under."""
        posts: dict[str, Callable[[Request], Awaitable[ASGIApp]]] = {
            "/v1/completions": self.completions,
            "/v1/chat/completions": self.chat,
            "/v1/chat/completions/batch": self.chats,
            "/v1/messages": self._events(MessagesReply, NamedWriter),
            "/v1/messages/count_tokens": self.count_tokens,
            "/api/chat": self._events(OllamaChatReply, LineWriter),
            "/api/generate": self._events(OllamaGenerateReply, LineWriter),
            "/api/embed": self._pooling(OllamaEmbedReply),
            "/api/show": self._status.ollama_show,
            "/v1/responses": self._responses.create,
            "/v1/responses/input_tokens": self._responses.count,
            "/v1/responses/compact": self._responses.compact,
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
            "/v1/models": self._status.models,
            "/v1/models/{model:path}": self._status.model,
            "/api/tags": self._status.ollama_models,
            "/api/ps": self._status.ollama_models,
            "/api/version": self._status.version,
            "/v1/responses/{response_id}": self._gated(self._responses.retrieve),
            "/v1/responses/{response_id}/input_items": self._gated(self._responses.input_items),
            "/health": self._status.health,
            "/live": self._status.live,
            "/ready": self._status.ready,
            "/version": self._status.version,
            "/load": self._status.load,
            "/metrics": self._status.metrics,
        }
        if self._options.enable_tokenizer_info_endpoint:
            gets["/tokenizer_info"] = self.tokenizer_info
        if not self._options.disable_fastapi_docs:
            gets |= {"/openapi.json": self.openapi, "/docs": self.docs}
        gets["/"] = self.front_page
        deletes = {"/v1/responses/{response_id}": self._responses.delete}
        return [
            *(Route(path, _counted(path, self._gated(run)), methods=["POST"]) for path, run in posts.items()),
            *(Route(path, _counted(path.replace(":path", ""), run), methods=["GET"]) for path, run in gets.items()),
            Route("/v1/responses", _counted(SOCKETS, self._responses.sockets.open), methods=["GET"]),
            Route("/ping", _counted("/ping", self._status.ping), methods=["GET", "POST"]),
            *(Route(path, _counted(path, run), methods=["DELETE"]) for path, run in deletes.items()),
        ]

    async def completions(self, request: Request) -> ASGIApp:
        """Continue one or more prompts."""
        self._serving.check_room(request.scope[CLIENT], pools=False)
        return self._answer(request, await self._read(request, CompletionReply))

    def _completions(self, request: Request, reply: CompletionReply) -> ASGIApp:
        client, model = request.scope[CLIENT], reply.calls[0].model

        async def read_prompts() -> None:
            for prompt in reply.echo_of:
                reply.prompt_texts.append(await self._serving.echo(prompt, client, model))

        return self._text_answer(request, reply, read_prompts)

    async def chat(self, request: Request) -> ASGIApp:
        """Answer a conversation."""
        self._serving.check_room(request.scope[CLIENT], pools=False)
        return self._answer(request, await self._read(request, ChatReply))

    async def chats(self, request: Request) -> ASGIApp:
        """Answer several conversations."""
        self._serving.check_room(request.scope[CLIENT], pools=False)
        return self._text_answer(request, await self._read(request, ChatsReply))

    async def _read(self, request: Request, make_reply: Callable[[Body, ServerOptions, str], AnyReply]) -> AnyReply:
        """Read a body and make a reply of it."""
        own_id = _own_request_id(request)
        return await self._bodies.read(request, lambda body: make_reply(body, self._options, own_id))

    def _answer(self, request: Request, reply: CompletionReply | ChatReply | PoolReply) -> ASGIApp:
        """Return the answer that a reply writes."""
        if isinstance(reply, CompletionReply):
            return self._completions(request, reply)
        if isinstance(reply, ChatReply):
            return self._text_answer(request, reply)
        return PoolAnswer(**self._parts_of_answer(request, reply), head=self._head(reply))

    def _events(
        self, make_reply: Callable[[Body, ServerOptions, str], EventReply], writer: type[NamedWriter]
    ) -> Callable[[Request], Awaitable[ASGIApp]]:
        """Return an endpoint that answers a conversation in another form than OpenAI's."""

        async def answer(request: Request) -> ASGIApp:
            self._serving.check_room(request.scope[CLIENT], pools=False)
            reply = await self._read(request, make_reply)
            return TextAnswer(**self._parts_of_answer(request, reply), writer=writer(reply, self._head(reply)))

        return answer

    async def count_tokens(self, request: Request) -> ASGIApp:
        """Count the tokens of a conversation that would be answered."""
        ignored: list[str] = []
        read = partial(count_call_of, policy=self._options.unknown_fields, ignored=ignored)
        call = replace(await self._bodies.read(request, read), client=request.scope[CLIENT])
        self._warn(request, ignored)
        ids = await while_connected(request.receive, self._serving.tokenize(call))
        return json_response({"input_tokens": len(ids)})

    def _pooling(
        self, make_reply: Callable[[Body, ServerOptions, str], PoolReply]
    ) -> Callable[[Request], Awaitable[ASGIApp]]:
        """Return an endpoint that embeds, classifies or scores."""

        async def pool(request: Request) -> ASGIApp:
            self._serving.check_room(request.scope[CLIENT], pools=True)
            return self._answer(request, await self._read(request, make_reply))

        return pool

    async def invocations(self, request: Request) -> ASGIApp:
        """Answer a body of any of these routes, which its fields tell (SageMaker)."""
        self._serving.check_room(request.scope[CLIENT])
        tasks = self._serving.tasks

        def make(body: Body, options: ServerOptions, own_id: str) -> CompletionReply | ChatReply | PoolReply:
            path = route_of(body, tasks)
            replies = {"/v1/chat/completions": ChatReply, "/v1/completions": CompletionReply, **REPLIES}
            return replies[path](body, options, own_id)

        return self._answer(request, await self._read(request, make))

    async def tokenize(self, request: Request) -> ASGIApp:
        """Turn a text or a conversation into token ids."""
        ignored: list[str] = []
        read = partial(tokenize_call_of, policy=self._options.unknown_fields, ignored=ignored)
        call, wants_pieces = await self._bodies.read(request, read)
        self._warn(request, ignored)
        client = request.scope[CLIENT]
        ids = await while_connected(request.receive, self._serving.tokenize(replace(call, client=client)))
        tokenizer = await self._serving.tokenizer_of(call.model, client) if wants_pieces else None

        def write() -> Response:
            pieces = None if tokenizer is None else [tokenizer.token(token_id) for token_id in ids]
            return json_response(tokens_response(ids, self._serving.engine.model.max_model_len, pieces))

        return await self._bodies.run(write, len(ids) > _MANY_TOKENS, client)

    async def detokenize(self, request: Request) -> ASGIApp:
        """Turn token ids into text."""
        ignored: list[str] = []
        read = partial(detokenize_request_of, policy=self._options.unknown_fields, ignored=ignored)
        model, ids = await self._bodies.read(request, read)
        self._warn(request, ignored)
        return json_response({"prompt": await self._serving.detokenize(ids, request.scope[CLIENT], model)})

    async def tokenizer_info(self, request: Request) -> ASGIApp:
        """Say what the tokenizer's tokenizer_config.json does."""
        return json_response(await self._serving.tokenizer_info(request.scope[CLIENT]))

    async def load_adapter(self, request: Request) -> ASGIApp:
        """Load an adapter under a name."""
        name, path, in_place = await self._bodies.read(request, load_request_of)
        await self._serving.adapters.load(name, path, in_place=in_place, client=request.scope[CLIENT])
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, request: Request) -> ASGIApp:
        """Take an adapter away."""
        name = await self._bodies.read(request, unload_request_of)
        self._serving.adapters.unload(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def drain(self, request: Request) -> ASGIApp:
        """Give a replica no more work, and answer when it has none and serves anew."""
        engine, number = self._serving.engine, request.query_params.get("replica", "")
        if not engine.drains_replicas:
            raise FeatureDisabledError("this server has one engine: SIGTERM drains it.", "replica")
        if not number.isdecimal():
            raise UserError(f"replica must be the number of a replica, got {number!r}.", "replica")
        await engine.drain_replica(int(number[:9]))
        return json_response({"replica": int(number[:9])})

    async def openapi(self, request: Request) -> ASGIApp:
        """Describe these routes (OpenAPI 3.1)."""
        return Response(self._written_description, media_type="application/json")

    async def docs(self, request: Request) -> ASGIApp:
        """Show that description as a page on which the routes can be tried."""
        return self._page(docs_page.page_of)

    async def front_page(self, request: Request) -> ASGIApp:
        """List the paths of the API and link to the page on which they can be tried."""
        return self._page(docs_page.front_page)

    def _page(self, write: Callable[..., bytes]) -> Response:
        """Return a page about the paths that this server has a use for, written once: requests need no key."""
        try:
            tasks = tuple(self._serving.tasks)
        except UnavailableError:  # the model is being loaded
            tasks = ("generate", *POOLING_TASKS)
        key = write.__name__, tasks
        if key not in self._pages:
            self._pages[key] = write(self._description, partial(self._is_served, tasks))
        return Response(self._pages[key], media_type="text/html", headers=docs_page.HEADERS)

    @cached_property
    def _description(self) -> dict[str, Any]:
        return description_of(self.routes(), self._options.root_path)

    @cached_property
    def _written_description(self) -> bytes:
        return dumps(self._description)

    def _is_served(self, tasks: Sequence[str], path: str) -> bool:
        """Whether a model for `tasks` and the options of this server have a use for a path."""
        if path in _POOLING_PATHS:
            return tasks != ("generate",)
        if path in _GENERATING_PATHS:
            return "generate" in tasks
        if path.endswith("_lora_adapter"):
            return self._options.lora_root is not None
        return path != "/drain" or self._serving.engine.drains_replicas

    def _gated(self, endpoint: Callable[[Request], Awaitable[ASGIApp]]) -> Callable[[Request], Awaitable[ASGIApp]]:
        """Wrap an endpoint so that its requests count as being answered, body and answer included."""

        async def run(request: Request) -> ASGIApp:
            async def answer(scope: Scope, receive: Receive, send: Send) -> None:
                with self._places.place(), self._serving.ledger.entry(scope[CLIENT]) as entry:
                    scope["jaxllm"]["entry"] = entry
                    response = await endpoint(request)
                    await response(scope, receive, send)

            return answer

        run.__name__, run.__doc__ = endpoint.__name__, endpoint.__doc__
        return run

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
            "num_bytes": own["body_bytes"],
            "entry": own["entry"],
        }

    def _warn(self, request: Request, ignored: Sequence[str]) -> None:
        """Tell a client which fields its request is answered without; the log has each of them once."""
        if self._options.unknown_fields != "warn":
            return
        request.scope["jaxllm"]["ignored"] = ignored
        for name in ignored:
            if name not in self._told and len(self._told) < _MOST_TOLD:
                self._told.add(name)
                route = request.scope["jaxllm"]["route"]
                _log.warning("a client sent %s, which is not a field of %s: it is ignored", ascii(name), route)


def _counted(path: str, endpoint: Callable[[Request], Awaitable[ASGIApp]]) -> Callable[[Request], Awaitable[Any]]:
    """Wrap an endpoint so that its requests are counted under its path."""

    async def run(request: Request) -> ASGIApp:
        request.scope["jaxllm"]["route"] = path
        return await endpoint(request)

    run.__name__, run.__doc__ = endpoint.__name__, endpoint.__doc__
    return run


def _own_request_id(request: Request) -> str:
    return request.scope["jaxllm"]["request_id"]
