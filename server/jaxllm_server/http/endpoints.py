"""HTTP routes; handlers for text and tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxllm.errors import FeatureDisabledError, UnavailableError, UserError
from jaxllm.version import __version__
from jaxllm_server.access.client_quota import CallLimit
from jaxllm_server.anthropic.replies import MessagesReply, count_call_of
from jaxllm_server.http import (
    adapter_routes,
    audio_routes,
    docs_page,
    generate_routes,
    pooling_routes,
    weight_routes,
)
from jaxllm_server.http.answering import Answering, Made, MakeReply
from jaxllm_server.http.answers import TextAnswer, json_response, while_connected
from jaxllm_server.http.guard import CLIENT
from jaxllm_server.http.openapi import BODIES, description_of
from jaxllm_server.http.responses import ResponseEndpoints
from jaxllm_server.http.routes import GET, HTML, JSON, LINES, ApiRoute, Invoked, Run
from jaxllm_server.http.sse import dumps
from jaxllm_server.http.status import StatusEndpoints
from jaxllm_server.http.writers import ChunkWriter, EventReply, LineWriter, NamedWriter
from jaxllm_server.observability.tracing import Tracer
from jaxllm_server.ollama.replies import OllamaChatReply, OllamaGenerateReply
from jaxllm_server.openai.chat import ChatReply
from jaxllm_server.openai.chats import ChatsReply
from jaxllm_server.openai.completions import CompletionReply
from jaxllm_server.openai.invocations import route_of
from jaxllm_server.openai.tokens import detokenize_request_of, tokenize_call_of, tokens_response
from jaxllm_server.requests.fields import Body
from jaxllm_server.requests.form import Reply
from jaxllm_server.shared.options import ServerOptions

if TYPE_CHECKING:
    from jaxllm_server.observability.prometheus import PrometheusObserver
    from jaxllm_server.serving import Serving

_MANY_TOKENS = 4096
_FEATURES: Sequence[Callable[[Answering], list[ApiRoute]]] = (
    *(adapter_routes.routes, pooling_routes.routes, generate_routes.routes, weight_routes.routes),
    audio_routes.routes,
)


class Endpoints:
    """The handlers, and the `table` of all routes."""

    def __init__(
        self, serving: Serving, options: ServerOptions, observer: PrometheusObserver | None, tracer: Tracer
    ) -> None:
        self._serving = serving
        self._options = options
        self._places = CallLimit("requests", options.max_rpcs)
        self._answering = Answering(serving, options, tracer)
        self._bodies = self._answering.bodies
        self._pages: dict[tuple[str, bool | None], bytes] = {}
        self._fingerprint = f"jaxllm-{__version__}"
        self._status = StatusEndpoints(self._answering, observer)
        self._responses = ResponseEndpoints(self._answering, tracer, self._places)
        rows = [*self._text_routes(), *self._responses.routes(), *self._token_routes()]
        rows += [row for routes_of in _FEATURES for row in routes_of(self._answering)]
        self.table = [*rows, self._invocations(rows), *self._status.routes(), *self._other_routes()]

    def routes(self) -> list[Route]:
        return [
            Route(row.path, _counted(row, self._bounded(row.run) if row.is_bounded else row.run), methods=row.methods)
            for row in self.table
        ]

    def _text_routes(self) -> list[ApiRoute]:
        named, lines = (partial(self._event_answer, writer) for writer in (NamedWriter, LineWriter))
        return [
            self._text_route("/v1/chat/completions", ChatReply, self._text_answer, is_invoked=True),
            self._text_route("/v1/completions", CompletionReply, self._completions, is_invoked=True),
            self._text_route("/v1/chat/completions/batch", ChatsReply, self._text_answer),
            self._text_route("/v1/messages", MessagesReply, named),
            self._text_route("/api/chat", OllamaChatReply, lines, media=(JSON, LINES)),
            self._text_route("/api/generate", OllamaGenerateReply, lines, media=(JSON, LINES)),
        ]

    def _text_route(
        self, path: str, make_reply: MakeReply[Made], write: Callable[[Request, Made], ASGIApp], **more: Any
    ) -> ApiRoute:
        return self._answering.route(path, BODIES[path], make_reply, write, pools=False, **more)

    def _token_routes(self) -> list[ApiRoute]:
        count = "/v1/messages/count_tokens"
        info = ApiRoute("/tokenizer_info", self.tokenizer_info, GET, is_bounded=False)
        return [
            ApiRoute(count, self.count_tokens, bodies=(BODIES[count],), pools=False),
            ApiRoute("/tokenize", self.tokenize, bodies=(BODIES["/tokenize"],)),
            ApiRoute("/detokenize", self.detokenize, bodies=(BODIES["/detokenize"],)),
            *([info] if self._options.enable_tokenizer_info_endpoint else ()),
        ]

    def _other_routes(self) -> list[ApiRoute]:
        described = [
            ApiRoute("/openapi.json", self.openapi, GET, is_bounded=False),
            ApiRoute("/docs", self.docs, GET, is_bounded=False, media=(HTML,)),
        ]
        return [
            ApiRoute("/drain", self.drain, is_offered=self._serving.engine.drains_replicas),
            *([] if self._options.disable_fastapi_docs else described),
            ApiRoute("/", self.front_page, GET, is_bounded=False, media=(HTML,)),
        ]

    def _invocations(self, rows: Sequence[ApiRoute]) -> ApiRoute:
        invoked = {row.path: row.invoked for row in rows if row.invoked is not None}

        async def run(request: Request) -> ASGIApp:
            """Answer a body of any of these routes, chosen by its fields (SageMaker)."""
            self._serving.check_room(request.scope[CLIENT])
            tasks = self._serving.tasks

            def make(body: Body, options: ServerOptions, own_id: str) -> tuple[Invoked, Any]:
                own = invoked[route_of(body, tasks)]
                return own, own.make_reply(body, options, own_id)

            own, reply = await self._answering.read(request, make)
            return own.write(request, reply)

        bodies = {body.name: body for row in rows if row.invoked is not None for body in row.bodies}
        return ApiRoute("/invocations", run, bodies=tuple(bodies.values()))

    def _completions(self, request: Request, reply: CompletionReply) -> ASGIApp:
        client, model = request.scope[CLIENT], reply.calls[0].model

        async def read_prompts() -> None:
            for prompt in reply.echo_of:
                reply.prompt_texts.append(await self._serving.echo(prompt, client, model))

        return self._text_answer(request, reply, read_prompts)

    def _text_answer(
        self, request: Request, reply: Reply, prepare: Callable[[], Awaitable[None]] | None = None
    ) -> TextAnswer:
        parts = self._answering.parts(request, reply)
        head = {**self._answering.head(reply), "system_fingerprint": self._fingerprint}
        return TextAnswer(**parts, writer=ChunkWriter(reply, head), prepare=prepare)

    def _event_answer(self, writer: type[NamedWriter], request: Request, reply: EventReply) -> TextAnswer:
        parts = self._answering.parts(request, reply)
        return TextAnswer(**parts, writer=writer(reply, self._answering.head(reply)))

    async def _read(self, request: Request, read: Callable[..., Made]) -> Made:
        ignored: list[str] = []
        found = await self._bodies.read(request, partial(read, policy=self._options.unknown_fields, ignored=ignored))
        self._answering.warn(request, ignored)
        return found

    async def count_tokens(self, request: Request) -> ASGIApp:
        call = replace(await self._read(request, count_call_of), client=request.scope[CLIENT])
        ids = await while_connected(request.receive, self._serving.tokenize(call))
        return json_response({"input_tokens": len(ids)})

    async def tokenize(self, request: Request) -> ASGIApp:
        call, wants_pieces = await self._read(request, tokenize_call_of)
        client = request.scope[CLIENT]
        ids = await while_connected(request.receive, self._serving.tokenize(replace(call, client=client)))
        tokenizer = await self._serving.tokenizer_of(call.model, client) if wants_pieces else None

        def write() -> Response:
            pieces = None if tokenizer is None else [tokenizer.token(token_id) for token_id in ids]
            return json_response(tokens_response(ids, self._serving.engine.model.max_model_len, pieces))

        return await self._bodies.run(write, len(ids) > _MANY_TOKENS, client)

    async def detokenize(self, request: Request) -> ASGIApp:
        model, ids = await self._read(request, detokenize_request_of)
        return json_response({"prompt": await self._serving.detokenize(ids, request.scope[CLIENT], model)})

    async def tokenizer_info(self, request: Request) -> ASGIApp:
        """Return the contents of tokenizer_config.json."""
        return json_response(await self._serving.tokenizer_info(request.scope[CLIENT]))

    async def drain(self, request: Request) -> ASGIApp:
        """Restart a replica once its requests have finished; answer when it serves again."""
        engine, number = self._serving.engine, request.query_params.get("replica", "")
        if not engine.drains_replicas:
            raise FeatureDisabledError("this server has one engine: SIGTERM drains it.", "replica")
        if not number.isdecimal():
            raise UserError(f"replica must be the number of a replica, got {number!r}.", "replica")
        await engine.drain_replica(int(number[:9]))
        return json_response({"replica": int(number[:9])})

    async def openapi(self, request: Request) -> ASGIApp:
        """Return the OpenAPI 3.1 description of these routes."""
        return Response(self._written_description, media_type="application/json")

    async def docs(self, request: Request) -> ASGIApp:
        """Show the API description as a page for trying the routes."""
        return self._page(docs_page.page_of)

    async def front_page(self, request: Request) -> ASGIApp:
        """List the API's paths, with a link to the page for trying them."""
        return self._page(docs_page.front_page)

    def _page(self, write: Callable[..., bytes]) -> Response:
        try:
            pools = "generate" not in self._serving.tasks
        except UnavailableError:
            pools = None
        key = write.__name__, pools
        if key not in self._pages:
            offered = [row for row in self.table if row.is_offered]
            served = {row.name for row in offered if pools is None or row.pools in (None, pools)}
            self._pages[key] = write(self._description, served)
        return Response(self._pages[key], media_type="text/html", headers=docs_page.HEADERS)

    @cached_property
    def _description(self) -> dict[str, Any]:
        return description_of(self.table, self._options.root_path)

    @cached_property
    def _written_description(self) -> bytes:
        return dumps(self._description)

    def _bounded(self, run: Run) -> Run:
        async def hold(request: Request) -> ASGIApp:
            async def answer(scope: Scope, receive: Receive, send: Send) -> None:
                with self._places.place(), self._serving.ledger.entry(scope[CLIENT]) as entry:
                    scope["jaxllm"]["entry"] = entry
                    response = await run(request)
                    await response(scope, receive, send)

            return answer

        return hold


def _counted(row: ApiRoute, run: Run) -> Run:
    async def count(request: Request) -> ASGIApp:
        request.scope["jaxllm"]["route"] = row.label or row.name
        return await run(request)

    return count
