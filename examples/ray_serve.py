"""Serve a model on Ray Serve: replicas of an engine with the OpenAI API, scaled by the tokens of their requests.

    pip install 'jaxllm[ray]'
    serve run examples.ray_serve:app max_replicas=4 gpus=1 model=Qwen/Qwen2.5-0.5B-Instruct

JSON objects set further fields of `EngineConfig` and `ServerOptions`: engine='{"max_num_seqs": 64}' and
server='{"api_key": ["secret"]}'. Clients use http://localhost:8000/v1 in the same way as `jaxllm serve`.

The application has two deployments. An `Engine` is a replica, with `AsyncLLM` and the app of `jaxllm serve`. A `Front`
receives requests from Ray's proxy, tokenizes the prompt, and forwards the request; it is needed because the proxy
routes a request before it reads the body. Each Front has a `PrefixRouter`, which polls the prefix caches and loads of
the replicas ten times per second and chooses a replica with `jaxllm.fleet.choose`. `TokenPolicy` scales by the same
loads.

If a replica dies, its started streams end with an error event, and its other requests run again on another replica. A
replica that is removed finishes its streams first.
"""

# No `from __future__ import annotations`: `serve run` needs the class in the annotation of `app`.
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
from jaxllm.scheduler.state import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored
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
REPORT_SECONDS = 0.1  # interval of polling a replica, which takes about two milliseconds
REPLICA = b"x-jaxllm-replica"  # header with the id of the replica that answered
_REPLIES = {"/v1/completions": CompletionReply, "/v1/chat/completions": ChatReply}
_SCOPE = "type http_version method scheme path raw_path query_string headers client".split()  # picklable entries


class Settings(BaseModel):
    """Options of `serve run`, as name=value."""

    model: str | None = None
    engine: Json[dict[str, Any]] = {}  # further fields of EngineConfig
    server: Json[dict[str, Any]] = {}  # fields of ServerOptions, except addresses
    fronts: int = 1
    min_replicas: int = 1
    max_replicas: int = 1
    cpus: float = 1  # per replica …
    gpus: float = 0  # … equal to tensor_parallel_size
    tokens_per_replica: int = 16384  # in running and waiting requests; the target of a replica
    upscale_delay: float = 10.0  # seconds of more tokens before a replica is added …
    downscale_delay: float = 120.0  # … and of fewer before one is removed
    look_back: float = 10.0  # seconds over which the tokens are averaged


def app(settings: Settings) -> serve.Application:
    """Build the application; `serve run` calls it."""
    config = config_of(settings.model, {**settings.engine, "enable_kv_cache_events": True})
    # Clients use the proxy's address, not the replica's.
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
        # The engine's limits answer 429, while Ray would make clients wait without limit.
        max_ongoing_requests=2 * options.max_rpcs,
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        logging_config={"enable_access_log": False},  # omits ten reports per second; a Front logs the requests
        graceful_shutdown_timeout_s=options.shutdown_timeout,
        health_check_period_s=2.0,
    ).bind(config, options)
    return Front.options(num_replicas=settings.fronts, max_ongoing_requests=2 * options.max_rpcs).bind(
        engines, config, options
    )


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """Convert lists from JSON to the tuples that `ServerOptions` requires."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


@dataclass
class Call:
    """A request on its way from a Front to an Engine."""

    scope: dict[str, Any]  # the picklable part of ASGI's scope
    body: bytes
    digests: Sequence[bytes] = ()  # of the full blocks of its prompt
    num_tokens: int = 0  # of its prompt


@dataclass
class Report:
    """A replica's report to a router."""

    num_tokens: int  # in running and waiting requests
    next: int  # number of the next batch of events after this report
    events: list[BlockEvent]


@serve.deployment
class Engine:
    """One engine and its app."""

    async def __init__(self, config: EngineConfig, options: ServerOptions) -> None:
        server = new_server(config, options)
        self._engine = server.engine
        self._app = make_app(server.serving, options, server.observer, server.tracer)
        self._held: dict[bytes, None] = {}  # digests of the cached blocks
        self._next = 0  # number of the next batch of events
        self._name = serve.get_replica_context().replica_id.unique_id.encode()
        await self._engine.start()
        self._block_size = self._engine.model.block_size
        self._no_tokens = (0,) * self._block_size
        self._following = asyncio.ensure_future(self._follow())

    async def answer(self, call: Call) -> AsyncGenerator[list[dict[str, Any]]]:
        """Run a request through the app; yield lists of ASGI messages as they arrive."""
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        received = iter([{"type": "http.request", "body": call.body}])

        async def receive() -> dict[str, Any]:
            # The proxy detects that a client disconnects, and cancels the calls of its request.
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
        """Return the load and the changes of the prefix cache since batch `start`, or all blocks if None or too old."""
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
        return Report(self._num_tokens(), self._next, [AllBlocksCleared(), *map(self._stored, self._held)])

    async def describe(self) -> ModelInfo:
        """Return the model's limits."""
        return replace(self._engine.model, tokenizer=None)  # the tokenizer is not picklable

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load for Ray's controller, which calls this method by name."""
        return {"tokens": self._num_tokens()}

    async def check_health(self) -> None:
        """Raise if this replica must be replaced; Ray calls this method by name."""
        if self._engine.state in ("dead", "hung") or self._following.done():
            raise RuntimeError(f"the engine is {self._engine.state}")

    async def __del__(self) -> None:
        self._following.cancel()
        await self._engine.close()

    def _num_tokens(self) -> int:
        """Return the tokens of live requests: whole blocks of running requests, prompts of waiting ones."""
        load = self._engine.get_load()
        return load.kv_blocks_used * self._block_size + load.waiting_tokens

    def _stored(self, digest: bytes) -> BlockStored:
        """Return a block's event with dummy tokens: a router needs their number only, pickle writes a tuple once."""
        return BlockStored(digest, None, self._no_tokens)

    def _sent(self, event: BlockEvent) -> BlockEvent:
        return self._stored(event.digest) if isinstance(event, BlockStored) else event

    async def _follow(self) -> None:
        """Track the cached blocks, for new routers."""
        async for batch in self._engine.kv_events():
            for each in batch.events:
                if isinstance(each, BlockStored):
                    self._held[each.digest] = None
                elif isinstance(each, BlockRemoved):
                    self._held.pop(each.digest, None)
                else:
                    self._held.clear()
            self._next = batch.sequence + 1


@dataclass
class _Known:
    """A router's view of a replica."""

    number: int
    num_tokens: int = 0  # in its last report
    sent: dict[str, int] = field(default_factory=dict)  # tokens of requests sent since, by Ray's ids
    following: asyncio.Task[None] | None = None

    @property
    def load(self) -> int:
        return self.num_tokens + sum(self.sent.values())


class PrefixRouter(RequestRouter):
    """Route a call of `Engine.answer` with `choose`, and any other call to the least loaded replica."""

    def initialize_state(self, **_: Any) -> None:
        """Initialize without replicas; Ray calls it first."""
        self._index = PrefixIndex()
        self._known: dict[ReplicaID, _Known] = {}
        self._num_known = 0

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Rank the replicas: the chosen one first; the others are used if it died or accepts no more requests."""
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
        """Update the set of replicas; called by Ray."""
        super().update_replicas(replicas)
        for replica_id in self._known.keys() - {each.replica_id for each in replicas}:
            self._forget(replica_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Remove a dead replica; called by Ray."""
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
        """Poll a replica, with calls whose metadata is a modified copy of a request's `metadata`."""
        start = None
        while True:
            noted = list(known.sent)
            own = replace(metadata, internal_request_id=uuid.uuid4().hex, call_method="report", is_streaming=False)
            asked = replica.try_send_request(PendingRequest([start], {}, own), with_rejection=False)
            try:
                report = await asked.get_async()
            except RayActorError:
                return  # died or unreachable; the next request retries if the replica still exists
            start = report.next
            self._index.apply(known.number, report.events)
            known.num_tokens = report.num_tokens
            for request_id in noted:
                known.sent.pop(request_id, None)
            await asyncio.sleep(REPORT_SECONDS)


class TokenPolicy:
    """Scale to the replicas needed for the running and waiting tokens. Ray applies delays and bounds."""

    def __init__(self, tokens_per_replica: int) -> None:
        self._tokens_per_replica = tokens_per_replica

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Return the target number of replicas, and no state."""
        tokens = sum((context.aggregated_metrics or {}).get("tokens", {}).values())
        return tokens / self._tokens_per_replica, {}


class _Reader(AsyncLLM):
    """Replaces an engine where only prompts are parsed: it is never started, and has the model's description."""

    def __init__(self, config: EngineConfig, model: ModelInfo) -> None:
        super().__init__(config)
        source = config.tokenizer or resolve(config.model, config.revision, tokenizer_only=True)
        self._model = replace(model, tokenizer=load_tokenizer(source))

    @property
    def model(self) -> ModelInfo:
        return self._model


@serve.deployment
class Front:
    """Forwards requests to the best replica."""

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
            # Wait for the first messages: until they are sent, another replica can answer.
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
        """Add the digests and tokens for routing; unchanged without a prompt, or if the replica will refuse it."""
        make_reply = _REPLIES.get(call.scope["path"])
        if make_reply is None:
            return call
        try:
            sent = [value.decode("latin-1") for name, value in call.scope["headers"] if name == b"authorization"]
            client = client_of(self._keys.check(only_header(sent)), (call.scope["client"] or ("",))[0])
            reply = make_reply(strict_json.read(call.body, self._options.max_json_depth), self._options, "front")
            first = replace(reply.calls[0], client=client)
            if first.model and first.model not in self._serving.names:
                return call  # an adapter: the root of its blocks is unknown here
            prompt = await self._serving.prompt_of(first, SamplingParams())
        except Exception:  # the replica responds with the error
            return call
        ids = prompt["prompt_token_ids"]
        salt = prompt.get("cache_salt", "").encode()
        return replace(call, digests=digests_of(ids, salt, self._block_size), num_tokens=len(ids))


async def _bodies(stream: Any, messages: list[dict[str, Any]], headers: Any) -> AsyncGenerator[bytes]:
    """Yield the body of an answer that has started; `messages` are its first ones."""
    try:
        while True:
            if body := b"".join(message.get("body", b"") for message in messages):
                yield body
            messages = await anext(stream)
    except StopAsyncIteration:
        return
    except RayActorError:
        if not any(value.startswith(b"text/event-stream") for name, value in headers if name == b"content-type"):
            raise  # a partial answer must not look complete
        error = UnavailableError("The replica that answered has died; this request is lost.")
        yield event(error_body_of(error)) + DONE
    finally:
        with suppress(Exception):
            stream.cancel()


def _whole(status: int, headers: Any, body: bytes) -> Response:
    response = Response(body, status)
    response.raw_headers = headers
    return response
