"""Serve a model on Ray: replicas of an engine, the OpenAI API in front of them, as many as the tokens ask for.

    pip install 'jaxllm[ray]'
    serve run examples.ray_serve:app max_replicas=4 gpus=1 model=Qwen/Qwen2.5-0.5B-Instruct

Further fields of `EngineConfig` and of `ServerOptions` are JSON objects: engine='{"max_num_seqs": 64}' and
server='{"api_key": ["secret"]}'. Clients then use http://localhost:8000/v1 as they use `jaxllm serve`.

Two deployments. An `Engine` is a replica: `AsyncLLM` and the app of `jaxllm serve`, unchanged. A `Front` takes what
Ray's proxy has accepted, makes the prompt's token ids, and passes the request on; it is there because Ray's proxy
routes a request before its body is read. `PrefixRouter`, which lives in each Front, asks `jaxllm.fleet.choose`; it
follows the replicas' prefix caches and loads by asking each of them ten times a second. `TokenPolicy` scales by the
same loads.

A replica that dies loses what it was answering: a stream that has begun ends with an error event, any other request is
run again on another replica. A replica that is taken away ends its streams first.
"""

# No `from __future__ import annotations`: `serve run` looks at the class with which `app` annotates its argument.
import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel, Json
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from jaxllm.checkpoints.weights import resolve
from jaxllm.config import EngineConfig, config_of
from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.engine.model_info import ModelInfo
from jaxllm.errors import OutOfRangeError, UnavailableError
from jaxllm.fleet import PrefixIndex, choose, digests_of
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.state import BlockEvent, Cleared, Removed, Stored
from jaxllm.text.tokenizer import load_tokenizer
from jaxllm_server.access.auth import Keys, only_header
from jaxllm_server.access.client_quota import client_of
from jaxllm_server.http.app import make_app
from jaxllm_server.http.error_bodies import answer_of, body_too_large
from jaxllm_server.http.sse import DONE, event
from jaxllm_server.launch import new_server
from jaxllm_server.openai.chat import ChatReply
from jaxllm_server.openai.completions import CompletionReply
from jaxllm_server.openai.replies import error_body_of
from jaxllm_server.serving import Serving
from jaxllm_server.shared import strict_json
from jaxllm_server.shared.options import ServerOptions

_log = logging.getLogger("ray.serve")
REPORT_SECONDS = 0.1  # between two looks at a replica; its answer takes about two milliseconds
REPLICA = b"x-jaxllm-replica"  # the header of an answer that names who gave it
_REPLIES = {"/v1/completions": CompletionReply, "/v1/chat/completions": ChatReply}
_SCOPE = "type http_version method scheme path raw_path query_string headers client".split()  # what is plain data


class Settings(BaseModel):
    """What `serve run` takes, as name=value."""

    model: str | None = None
    engine: Json[dict[str, Any]] = {}  # further fields of EngineConfig
    server: Json[dict[str, Any]] = {}  # fields of ServerOptions, apart from addresses
    fronts: int = 1
    min_replicas: int = 1
    max_replicas: int = 1
    cpus: float = 1  # of a replica …
    gpus: float = 0  # … as many as its tensor_parallel_size
    tokens_per_replica: int = 16384  # running and waiting: with more of them there are more replicas
    upscale_delay: float = 10.0  # seconds that more tokens last before a replica is added …
    downscale_delay: float = 120.0  # … and fewer before one is taken away
    look_back: float = 10.0  # seconds over which the tokens are averaged


def app(settings: Settings) -> serve.Application:
    """Build the application; `serve run` calls it."""
    config = config_of(settings.model, {**settings.engine, "enable_kv_cache_events": True})
    # The proxy's address, not the replica's, is what names a host.
    options = ServerOptions(**{"host": "0.0.0.0", **_tuples(settings.server)})
    policy = AutoscalingPolicy(
        policy_function=TokenPolicy, policy_kwargs={"tokens_per_replica": settings.tokens_per_replica}
    )
    scaling = AutoscalingConfig(
        min_replicas=settings.min_replicas,
        max_replicas=settings.max_replicas,
        upscale_delay_s=settings.upscale_delay,
        downscale_delay_s=settings.downscale_delay,
        look_back_period_s=settings.look_back,
        policy=policy,
    )
    engines = Engine.options(
        autoscaling_config=scaling,
        # The engine has bounds of its own, and says 429 where Ray would let clients wait without one.
        max_ongoing_requests=2 * options.max_rpcs,
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        logging_config={"enable_access_log": False},  # of ten reports a second; that of a Front has the requests
        graceful_shutdown_timeout_s=options.shutdown_timeout,
        health_check_period_s=2.0,
    ).bind(config, options)
    return Front.options(num_replicas=settings.fronts, max_ongoing_requests=2 * options.max_rpcs).bind(
        engines, config, options
    )


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """Return settings with JSON's lists as the tuples that `ServerOptions` has."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


@dataclass
class Call:
    """A request on its way from a Front to an Engine."""

    scope: dict[str, Any]  # ASGI's, as far as it is plain data
    body: bytes
    digests: Sequence[bytes] = ()  # of the full blocks of its prompt
    num_tokens: int = 0  # of its prompt


@dataclass
class Report:
    """What a router learns of a replica."""

    num_tokens: int  # running and waiting
    next: int  # number of the first batch of events that is not in here
    events: list[BlockEvent]


@serve.deployment
class Engine:
    """One engine and its app."""

    async def __init__(self, config: EngineConfig, options: ServerOptions) -> None:
        server = new_server(config, options)
        self._engine = server.engine
        self._app = make_app(server.serving, options, server.observer, server.tracer)
        self._held: dict[bytes, None] = {}  # digests of the blocks that can be hit
        self._next = 0  # number of the next batch of events
        self._name = serve.get_replica_context().replica_id.unique_id.encode()
        await self._engine.start()
        self._block_size = self._engine.model.block_size
        self._no_tokens = (0,) * self._block_size
        self._following = asyncio.ensure_future(self._follow())

    async def answer(self, call: Call) -> AsyncGenerator[list[dict[str, Any]]]:
        """Run a request through the app; yield ASGI messages as they come, those of one moment together."""
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        received = iter([{"type": "http.request", "body": call.body}])

        async def receive() -> dict[str, Any]:
            # A client that goes is seen by the proxy, which cancels the calls behind its request.
            return next(received, None) or await asyncio.Future()

        async def run() -> None:
            try:
                await self._app(call.scope, receive, messages.put)
            finally:
                messages.put_nowait(None)

        running = asyncio.ensure_future(run())
        try:
            is_over = False
            while not is_over:
                ready = [await messages.get()]
                while not messages.empty():
                    ready.append(messages.get_nowait())
                is_over = ready[-1] is None
                ready = [message for message in ready if message is not None]
                for message in ready:
                    if message["type"] == "http.response.start":
                        message["headers"] = [*message["headers"], (REPLICA, self._name)]
                if ready:
                    yield ready
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def report(self, start: int | None) -> Report:
        """Return the load and the changes of the prefix cache since batch `start`; None, or lost: all that it holds."""
        events: list[BlockEvent] = []
        if start is not None and start < self._next:
            with suppress(OutOfRangeError):
                async with aclosing(self._engine.kv_events(start)) as batches:
                    async for batch in batches:
                        events += [self._sent(each) for each in batch.events]
                        if batch.sequence + 1 >= self._next:
                            return Report(self._num_tokens(), batch.sequence + 1, events)
        if start == self._next:
            return Report(self._num_tokens(), start, [])
        return Report(self._num_tokens(), self._next, [Cleared(), *map(self._stored, self._held)])

    async def describe(self) -> ModelInfo:
        """Return the model's limits."""
        return replace(self._engine.model, tokenizer=None)  # which cannot be sent

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Tell Ray's controller the load; by this name it asks for it."""
        return {"tokens": self._num_tokens()}

    async def check_health(self) -> None:
        """Raise if this replica is to be replaced; by this name Ray asks."""
        if self._engine.state in ("dead", "hung") or self._following.done():
            raise RuntimeError(f"the engine is {self._engine.state}")

    async def __del__(self) -> None:
        self._following.cancel()
        await self._engine.close()

    def _num_tokens(self) -> int:
        """Return the tokens of live requests: whole blocks of those that run, prompts of those that wait."""
        load = self._engine.get_load()
        return load.kv_blocks_used * self._block_size + load.waiting_tokens

    def _stored(self, digest: bytes) -> Stored:
        """Return a block's event without its tokens: a router needs their number, and pickles write one tuple once."""
        return Stored(digest, None, self._no_tokens)

    def _sent(self, event: BlockEvent) -> BlockEvent:
        return self._stored(event.digest) if isinstance(event, Stored) else event

    async def _follow(self) -> None:
        """Keep what can be hit, for routers that begin."""
        async for batch in self._engine.kv_events():
            for each in batch.events:
                if isinstance(each, Stored):
                    self._held[each.digest] = None
                elif isinstance(each, Removed):
                    self._held.pop(each.digest, None)
                else:
                    self._held.clear()
            self._next = batch.sequence + 1


@dataclass
class _Known:
    """A replica, as a router knows it."""

    number: int
    num_tokens: int = 0  # as it last reported
    sent: dict[str, int] = field(default_factory=dict)  # tokens of requests since, by Ray's ids
    following: asyncio.Task[None] | None = None

    @property
    def load(self) -> int:
        return self.num_tokens + sum(self.sent.values())


class PrefixRouter(RequestRouter):
    """Sends a call of `Engine.answer` where `choose` says, any other one to the least loaded replica."""

    def initialize_state(self, **_: Any) -> None:
        """Begin without replicas; Ray calls it first."""
        self._index = PrefixIndex()
        self._known: dict[ReplicaID, _Known] = {}
        self._num_known = 0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Rank the replicas: the chosen one, then the others, for when that one has gone or takes no more."""
        by_number = {self._known_as(each.replica_id).number: each for each in candidate_replicas}
        loads = {number: self._known[each.replica_id].load for number, each in by_number.items()}
        given = pending_request.args if pending_request is not None else ()
        call = given[0] if given and hasattr(given[0], "digests") else Call({}, b"")
        chosen = by_number.pop(choose(call.digests, loads, self._index))
        if pending_request is not None:
            known = self._known[chosen.replica_id]
            known.sent[pending_request.metadata.internal_request_id] = call.num_tokens
            for each in candidate_replicas:
                self._start_following(each, pending_request)
        return [[chosen], list(by_number.values())]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take note of which replicas there are; Ray calls it."""
        super().update_replicas(replicas)
        for replica_id in self._known.keys() - {each.replica_id for each in replicas}:
            self._forget(replica_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Take note of a death; Ray calls it."""
        super().on_replica_actor_died(replica_id)
        self._forget(replica_id)

    def _known_as(self, replica_id: ReplicaID) -> _Known:
        if replica_id not in self._known:
            self._known[replica_id] = _Known(self._num_known)
            self._num_known += 1
        return self._known[replica_id]

    def _forget(self, replica_id: ReplicaID) -> None:
        known = self._known.pop(replica_id, None)
        if known is not None:
            self._index.forget(known.number)
            if known.following is not None:
                known.following.cancel()

    def _start_following(self, replica: RunningReplica, request: PendingRequest) -> None:
        known = self._known[replica.replica_id]
        if known.following is None or known.following.done():
            known.following = asyncio.ensure_future(self._follow(replica, known, request.metadata))

    async def _follow(self, replica: RunningReplica, known: _Known, metadata: Any) -> None:
        """Ask a replica again and again. A request's `metadata` are the model of those that such a call has."""
        start = None
        while True:
            noted = list(known.sent)
            own = replace(metadata, internal_request_id=uuid.uuid4().hex, call_method="report", is_streaming=False)
            asked = replica.try_send_request(PendingRequest([start], {}, own), with_rejection=False)
            try:
                report = await asked.get_async()
            except RayActorError:
                return  # it has died or cannot be reached: begun again by the next request, if it is still there
            start = report.next
            self._index.apply(known.number, report.events)
            known.num_tokens = report.num_tokens
            for request_id in noted:
                known.sent.pop(request_id, None)
            await asyncio.sleep(REPORT_SECONDS)


class TokenPolicy:
    """As many replicas as hold the tokens that run and wait. Delays and bounds are applied by Ray."""

    def __init__(self, tokens_per_replica: int) -> None:
        self._tokens_per_replica = tokens_per_replica

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas that is wanted, and no state."""
        tokens = sum((context.aggregated_metrics or {}).get("tokens", {}).values())
        return tokens / self._tokens_per_replica, {}


class _Reader(AsyncLLM):
    """Stands for an engine where prompts are only read: it is never started, and knows its model."""

    def __init__(self, config: EngineConfig, model: ModelInfo) -> None:
        super().__init__(config)
        source = config.tokenizer or resolve(config.model, config.revision, tokenizer_only=True)
        self._model = replace(model, tokenizer=load_tokenizer(source))

    @property
    def model(self) -> ModelInfo:
        return self._model


@serve.deployment
class Front:
    """Passes requests on to the replica that is best for them."""

    async def __init__(self, engines: DeploymentHandle, config: EngineConfig, options: ServerOptions) -> None:
        self._options = options
        self._keys = Keys(options.api_key, options.admin_api_key)
        self._engines = engines
        model = await engines.describe.remote()
        self._serving = Serving(_Reader(config, model), options)
        self._block_size = model.block_size

    async def __call__(self, request: Request) -> Response:
        """Answer a request of the API."""
        most = self._options.max_body_bytes
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > most:
                return _whole(*answer_of(body_too_large(most)))
        scope = {name: request.scope.get(name) for name in _SCOPE} | {"root_path": ""}
        call = await self._with_prompt(Call(scope, bytes(body)))
        for _ in range(2):
            # An answer's first messages are awaited: until then nothing was sent, and another replica may give it.
            stream = self._engines.options(stream=True).answer.remote(call)
            try:
                messages = await anext(stream)
            except RayActorError:
                _log.warning("a replica died before it answered; the request is run again")
                continue
            start, *rest = messages
            response = StreamingResponse(_bodies(stream, rest, start["headers"]), start["status"])
            response.raw_headers = start["headers"]
            return response
        return _whole(*answer_of(UnavailableError("The replicas died before they could answer.")))

    async def _with_prompt(self, call: Call) -> Call:
        """Add what a request is routed by; nothing where it has no prompt, or one that its replica will refuse."""
        make_reply = _REPLIES.get(call.scope["path"])
        if make_reply is None:
            return call
        try:
            sent = [value.decode("latin-1") for name, value in call.scope["headers"] if name == b"authorization"]
            client = client_of(self._keys.check(only_header(sent)), (call.scope["client"] or ("",))[0])
            reply = make_reply(strict_json.read(call.body, self._options.max_json_depth), self._options, "front")
            first = replace(reply.calls[0], client=client)
            if first.model and first.model not in self._serving.names:
                return call  # an adapter, whose blocks have a root that is not known here
            prompt = await self._serving.prompt_of(first, SamplingParams())
        except Exception:  # the replica says what is wrong, and as what
            return call
        ids = prompt["prompt_token_ids"]
        salt = prompt.get("cache_salt", "").encode()
        return replace(call, digests=digests_of(ids, salt, self._block_size), num_tokens=len(ids))


async def _bodies(stream: Any, messages: list[dict[str, Any]], headers: Any) -> AsyncGenerator[bytes]:
    """Yield the body of an answer that has begun; `messages` are those that came with its beginning."""
    try:
        while True:
            if body := b"".join(message.get("body", b"") for message in messages):
                yield body
            messages = await anext(stream)
    except StopAsyncIteration:
        return
    except RayActorError:
        if not any(value.startswith(b"text/event-stream") for name, value in headers if name == b"content-type"):
            raise  # half of an answer must not look like a whole one
        error = UnavailableError("The replica that answered has died; this request is lost.")
        yield event(error_body_of(error)) + DONE
    finally:
        with suppress(Exception):
            stream.cancel()


def _whole(status: int, headers: Any, body: bytes) -> Response:
    response = Response(body, status)
    response.raw_headers = headers
    return response
