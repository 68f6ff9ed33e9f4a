"""The two services of `jaxllm.v1`: what their calls do.

`grpc_messages` reads the requests, `grpc_replies` writes the answers; errors are raised, and the server's interceptor
turns them into statuses. Knows no socket; of keys, whose a call has. Whatever ends a call (its result, a cancelled
client, a deadline, a failed write) closes the iterator of `Serving`, and that aborts the request in any phase.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from grpc.aio import ServicerContext

from jaxllm.errors import (
    DeadlineError,
    EngineError,
    RequestIdInUseError,
    SlowConsumerError,
    UserError,
)
from jaxllm.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2
from jaxllm.version import __version__
from jaxllm_server.access.client_quota import client_of, host_of_peer, peer_of
from jaxllm_server.access.ledger import REQUESTS
from jaxllm_server.grpc import messages, replies
from jaxllm_server.grpc.error_details import failure_of

if TYPE_CHECKING:
    from jaxllm.engine.engine_client import PauseMode
    from jaxllm_server.access.auth import Keys
    from jaxllm_server.generation.calls import Call, Chunk
    from jaxllm_server.pooling.pool_calls import PoolCall, PoolResult
    from jaxllm_server.serving import Serving

Asked = TypeVar("Asked", "Call", "PoolCall")
Item = TypeVar("Item")
REQUEST_ID = "x-request-id"
_LARGE_REQUEST = 1 << 13  # bytes
_LEAST_REMAINING = 0.001  # seconds before its deadline at which a call can still be answered
_MAX_METADATA_CHARS = 256
_FILES = [each.DESCRIPTOR for each in (types_pb2, inference_pb2, control_pb2)]
_API_REVISION = (  # the methods, fields and enum values of jaxllm.v1
    sum(len(each.methods) for file in _FILES for each in file.services_by_name.values())
    + sum(len(each.fields) for file in _FILES for each in file.message_types_by_name.values())
    + sum(len(each.values) for file in _FILES for each in file.enum_types_by_name.values())
)
_ADAPTER_FIELDS = {"lora_name": "name", "lora_path": "source"}
_PAUSE_MODES: Mapping[int, PauseMode] = {
    control_pb2.PAUSE_MODE_UNSPECIFIED: "abort",
    control_pb2.PAUSE_MODE_ABORT: "abort",
    control_pb2.PAUSE_MODE_WAIT: "wait",
    control_pb2.PAUSE_MODE_KEEP: "keep",
}


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Generation, pooling, tokenization and the list of models."""

    def __init__(self, serving: Serving, stall_timeout: float, keys: Keys) -> None:
        self._serving = serving
        self._stall_timeout = stall_timeout
        self._keys = keys

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: ServicerContext
    ) -> inference_pb2.GenerateResponse:
        """Answer once every sequence has ended."""
        chunks, reply = await self._begin(request, context, stream=False)
        async with aclosing(chunks):
            chunk = await anext(chunks)
            await context.send_initial_metadata(((REQUEST_ID, chunk.request_id),))
            return reply.response(chunk)

    async def StreamGenerate(self, request: inference_pb2.GenerateRequest, context: ServicerContext) -> None:
        """Send what is new as it comes; nothing, headers included, before the first tokens, so that retries work."""
        chunks, reply = await self._begin(request, context, stream=True)
        is_first = True
        async with aclosing(chunks), Writer(context, self._stall_timeout) as writer:
            async for chunk in chunks:
                message = reply.delta(chunk)
                if message is None:
                    continue
                if is_first:
                    is_first = False
                    await context.send_initial_metadata(((REQUEST_ID, chunk.request_id),))
                await writer.write(message)

    async def Embed(self, request: inference_pb2.EmbedRequest, context: ServicerContext) -> inference_pb2.EmbedResponse:
        """Answer with the vector of one text."""
        request_id, model, (result,) = await self._pooled(request, context)
        return replies.embedding_of(request_id, model, result)

    async def StreamEmbed(self, requests: AsyncIterator[inference_pb2.EmbedRequest], context: ServicerContext) -> None:
        """Answer each request as soon as its vector is there; read on as room comes."""
        client, model = self._client_of(context), self._serving.names[0]

        def read(request: inference_pb2.EmbedRequest) -> PoolCall:
            return replace(messages.pool_call_of(request, request.request_id or None), client=client)

        answers = await self._serving.pooling.stream(requests, read, client)
        # At once: a client of grpc.aio that writes while its call is refused does not learn why (grpc/grpc#36066), so
        # it may wait for this. For the same reason, failures of single texts do not end the stream.
        request_id = first(context.invocation_metadata(), REQUEST_ID) or uuid4().hex
        await context.send_initial_metadata(((REQUEST_ID, request_id),))
        async with aclosing(answers), Writer(context, self._stall_timeout) as writer:
            async for index, request, outcome in answers:
                if isinstance(outcome, Exception):
                    status = failure_of(outcome, request, request.request_id).status.SerializeToString()
                    own = inference_pb2.EmbedResponse(request_id=request.request_id, index=index, error=status)
                else:
                    own = replies.embedding_of(request.request_id, model, outcome, index)
                await writer.write(own)

    async def Classify(
        self, request: inference_pb2.ClassifyRequest, context: ServicerContext
    ) -> inference_pb2.ClassifyResponse:
        """Answer with a number for each label."""
        request_id, model, (result,) = await self._pooled(request, context)
        pooler = self._serving.engine.model.pooler
        assert pooler is not None
        return replies.classification_of(request_id, model, result, pooler.labels)

    async def Score(self, request: inference_pb2.ScoreRequest, context: ServicerContext) -> inference_pb2.ScoreResponse:
        """Answer with the scores of all pairs."""
        return replies.scores_of(*await self._pooled(request, context))

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        """Turn text or a conversation into token ids."""
        most = self._serving.options.max_json_depth
        client = self._client_of(context)
        call = await self._read(client, request, messages.tokenize_call_of, max_json_depth=most)
        ids = await self._serving.tokenize(replace(call, client=client))
        return inference_pb2.TokenizeResponse(token_ids=ids, max_model_len=self._serving.engine.model.max_model_len)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: ServicerContext
    ) -> inference_pb2.DetokenizeResponse:
        """Turn token ids into text."""
        ids = await self._read(self._client_of(context), request, messages.detokenize_ids_of)
        self._serving.check_model(request.model)
        text = await self._serving.detokenize(ids, self._client_of(context), request.model)
        return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        """Name the model, its sizes and its defaults."""
        engine, options = self._serving.engine, self._serving.options
        params, pooler = engine.model.default_params, engine.model.pooler
        name, *aliases = self._serving.names
        model = inference_pb2.Model(
            name=name,
            aliases=aliases,
            tasks=self._serving.tasks,
            max_model_len=engine.model.max_model_len,
            vocab_size=engine.model.vocab_size,
            eos_token_ids=sorted(engine.model.eos_ids),
            has_chat=options.chat_template is not None or engine.model.tokenizer.has_chat_template,
            has_tool_calls=options.tool_call_parser is not None,
            has_reasoning=options.reasoning_parser is not None,
        )
        if pooler is None:
            most = engine.model.generation_config.get("max_new_tokens")
            model.default_sampling.CopyFrom(replies.default_sampling_of(params))
            model.default_stop.CopyFrom(replies.default_stop_of(params, most))
        else:
            model.pooling.CopyFrom(replies.pooling_of(pooler, engine.model.pooled_size))
        return inference_pb2.ListModelsResponse(models=[model, *self._adapters(model)])

    def _adapters(self, parent: inference_pb2.Model) -> Iterator[inference_pb2.Model]:
        """Describe each adapter: its model, less the names, but for what its tokenizer changes."""
        for served in self._serving.adapters:
            known = self._serving.adapters.known(served)
            if known is None:
                continue
            model = inference_pb2.Model()
            model.CopyFrom(parent)
            model.name, model.parent = served.name, parent.name
            del model.aliases[:], model.eos_token_ids[:]
            model.eos_token_ids.extend(sorted(known.eos_ids))
            model.has_chat = self._serving.options.chat_template is not None or known.has_chat_template
            yield model

    async def _begin(
        self, request: inference_pb2.GenerateRequest, context: ServicerContext, *, stream: bool
    ) -> tuple[AsyncGenerator[Chunk, None], replies.Reply]:
        """Return the chunks that answer a request, of which none is computed yet, and how to write them."""
        request_id, is_hint, client = self._admit(request, context)
        most = self._serving.options.max_json_depth
        call = await self._read(client, request, messages.call_of, request_id, stream=stream, max_json_depth=most)
        call = replace(call, client=client, num_bytes=request.ByteSize())
        model = self._serving.check_model(request.model, request.adapter)
        generate = self._serving.generate
        chunks = self._hinted(generate, call) if is_hint else generate(call)
        return chunks, replies.reply_of(request, model)

    async def _pooled(
        self, request: messages.PoolRequest, context: ServicerContext
    ) -> tuple[str, str, list[PoolResult]]:
        """Compute all that a call asks for; return its id and the model's name as well."""
        request_id, is_hint, client = self._admit(request, context)
        call = replace(await self._read(client, request, messages.pool_call_of, request_id), client=client)

        async def pool(call: PoolCall) -> list[PoolResult]:
            with self._serving.ledger.entry(client) as entry:
                entry.charge(REQUESTS, 2 * request.ByteSize())  # the message, and the call that was made from it
                async with aclosing(self._serving.pooling.pool(call)) as results:
                    return [result async for result in results]

        try:
            results = await pool(call)
        except RequestIdInUseError:
            if not is_hint:
                raise
            request_id = self._unique(request_id)
            results = await pool(replace(call, request_id=request_id))
        await context.send_initial_metadata(((REQUEST_ID, request_id),))
        return request_id, self._serving.names[0], results

    def _admit(
        self, request: inference_pb2.GenerateRequest | messages.PoolRequest, context: ServicerContext
    ) -> tuple[str, bool, str]:
        """Return a request's id, if the metadata proposed it, and whose it is; refuse what finds no time or room."""
        remaining = context.time_remaining()
        if remaining is not None and remaining < _LEAST_REMAINING:
            raise DeadlineError("The deadline of this call was over before it began.")
        client = self._client_of(context)
        self._serving.check_room(client)
        hint = "" if request.request_id else first(context.invocation_metadata(), REQUEST_ID) or ""
        request_id = request.request_id or hint or uuid4().hex
        # So that a failure, too, can be found in the log: the interceptor reads it from here.
        if _can_be_metadata(request_id):
            context.set_trailing_metadata(((REQUEST_ID, request_id),))
        return request_id, bool(hint), client

    async def _read(self, client: str, request: Message, read: Callable[..., Item], *given: Any, **named: Any) -> Item:
        """Read a request; a large one, of which every part is looked at, beside the event loop."""
        if request.ByteSize() <= _LARGE_REQUEST:
            return read(request, *given, **named)
        return await self._serving.off_loop(client, partial(read, request, *given, **named))

    def _client_of(self, context: ServicerContext) -> str:
        key = self._keys.check(first(context.invocation_metadata(), "authorization"))  # the gate has let it in
        return client_of(key, host_of_peer(peer_of(context.peer())))

    async def _hinted(
        self, answer: Callable[[Asked], AsyncGenerator[Item, None]], call: Asked
    ) -> AsyncGenerator[Item, None]:
        """Answer under the id that the metadata propose, or one made from it while that is in use."""
        try:
            async with aclosing(answer(call)) as items:
                async for item in items:
                    yield item
        except RequestIdInUseError:
            unique = self._unique(call.request_id or "")
            async with aclosing(answer(replace(call, request_id=unique))) as items:
                async for item in items:
                    yield item

    def _unique(self, request_id: str) -> str:
        """Make another id of one that is in use."""
        ending = f"-{uuid4().hex[:8]}"
        return f"{request_id[: max(0, self._serving.options.max_request_id_chars - len(ending))]}{ending}"


class ControlService(control_pb2_grpc.ControlServiceServicer):
    """Facts, load, and what changes the server."""

    def __init__(self, serving: Serving, stall_timeout: float) -> None:
        self._serving = serving
        self._stall_timeout = stall_timeout
        self._instance_id = uuid4().hex
        self._start_time = _now()

    async def GetServerInfo(
        self, request: control_pb2.GetServerInfoRequest, context: ServicerContext
    ) -> control_pb2.GetServerInfoResponse:
        """Describe the server; the model's sizes once it is loaded."""
        engine = self._serving.engine
        state = "dead" if engine.state == "stopped" else engine.state
        info = control_pb2.GetServerInfoResponse(
            version=__version__,
            api_revision=_API_REVISION,
            instance_id=self._instance_id,
            start_time=self._start_time,
            state=f"SERVER_STATE_{state.upper()}",
            model_names=self._serving.names,
        )
        try:
            model = engine.model
        except EngineError:
            return info  # nothing is loaded yet
        info.max_model_len = model.max_model_len
        info.max_num_seqs = model.max_num_seqs
        info.max_num_batched_tokens = model.max_num_batched_tokens
        info.block_size = model.block_size
        info.kv_blocks_total = model.num_kv_blocks
        info.dtype = model.dtype
        info.device_kind = model.device_kind
        info.mesh["tp"] = engine.config.tensor_parallel_size
        return info

    async def GetLoad(
        self, request: control_pb2.GetLoadRequest, context: ServicerContext
    ) -> control_pb2.GetLoadResponse:
        """Say how busy the engine is."""
        load = self._serving.engine.get_load()
        return control_pb2.GetLoadResponse(
            running=load.running,
            waiting=load.waiting,
            waiting_prompt_tokens_uncached=load.waiting_tokens,
            kv_blocks_used=load.kv_blocks_used,
            kv_blocks_total=load.kv_blocks_total,
            max_running=load.max_running,
            generated_tokens_per_second=load.generated_tokens_per_second,
            prefix_hit_rate=load.prefix_hit_rate,
            step_time=replies.duration_of(load.step_seconds),
            adapters=[served.name for served in self._serving.adapters],
            running_adapters=load.running_adapters,
            waiting_adapters=load.waiting_adapters,
            snapshot_time=_now(),
        )

    async def Abort(self, request: control_pb2.AbortRequest, context: ServicerContext) -> control_pb2.AbortResponse:
        """End requests; ids that are not known change nothing."""
        await self._serving.engine.abort(request.request_ids)
        return control_pb2.AbortResponse()

    async def ResetPrefixCache(
        self, request: control_pb2.ResetPrefixCacheRequest, context: ServicerContext
    ) -> control_pb2.ResetPrefixCacheResponse:
        """Forget all cached prefixes, if no request is running."""
        return control_pb2.ResetPrefixCacheResponse(was_reset=await self._serving.engine.reset_prefix_cache())

    async def PauseGeneration(
        self, request: control_pb2.PauseGenerationRequest, context: ServicerContext
    ) -> control_pb2.PauseGenerationResponse:
        """Stop generating."""
        if request.mode not in _PAUSE_MODES:
            raise UserError(f"mode {request.mode} is not known.", "mode")
        mode = _PAUSE_MODES[request.mode]
        if mode == "keep" and request.clear_cache:
            raise UserError("requests that are kept need the cache: leave clear_cache out or false.", "clear_cache")
        clear = request.clear_cache if request.HasField("clear_cache") else mode != "keep"
        await self._serving.engine.pause(mode, clear)
        return control_pb2.PauseGenerationResponse()

    async def ResumeGeneration(
        self, request: control_pb2.ResumeGenerationRequest, context: ServicerContext
    ) -> control_pb2.ResumeGenerationResponse:
        """Generate again."""
        await self._serving.engine.resume()
        return control_pb2.ResumeGenerationResponse()

    async def StreamKvEvents(self, request: control_pb2.StreamKvEventsRequest, context: ServicerContext) -> None:
        """Send what enters and leaves the prefix cache."""
        events = self._serving.engine.kv_events(request.start_sequence)
        async with aclosing(events) as batches, Writer(context, self._stall_timeout) as writer:
            async for batch in batches:
                await writer.write(replies.kv_events_of(batch))

    async def LoadAdapter(
        self, request: control_pb2.LoadAdapterRequest, context: ServicerContext
    ) -> control_pb2.LoadAdapterResponse:
        """Load an adapter under a name."""
        with _by_fields():
            await self._serving.adapters.load(request.name, request.source, in_place=request.load_inplace)
        return control_pb2.LoadAdapterResponse()

    async def UnloadAdapter(
        self, request: control_pb2.UnloadAdapterRequest, context: ServicerContext
    ) -> control_pb2.UnloadAdapterResponse:
        """Take an adapter away."""
        with _by_fields():
            self._serving.adapters.unload(request.name)
        return control_pb2.UnloadAdapterResponse()

    async def ListAdapters(
        self, request: control_pb2.ListAdaptersRequest, context: ServicerContext
    ) -> control_pb2.ListAdaptersResponse:
        """Name the adapters."""
        adapters = self._serving.adapters
        found = [(served, adapters.known(served)) for served in adapters]
        return control_pb2.ListAdaptersResponse(
            adapters=[
                control_pb2.Adapter(name=served.name, source=served.source, rank=0 if known is None else known.rank)
                for served, known in found
            ]
        )


class Writer:
    """Writes a stream's messages; gives up on a client that does not read for `stall_timeout` seconds (0: never).

    Flow control alone bounds nothing: a client that never read took 4 MiB before a write blocked (measured). One timer
    for the stream, which looks at the write that is under way: a timeout around each write costs 7 microseconds.
    """

    def __init__(self, context: ServicerContext, stall_timeout: float) -> None:
        self._context = context
        self._stall_timeout = stall_timeout
        self._loop = asyncio.get_running_loop()
        self._since: float | None = None  # when the write under way began
        self._is_stalled = False
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Writer:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        if self._stall_timeout > 0:
            self._timer = self._loop.call_later(self._stall_timeout, self._look)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def write(self, message: Message) -> None:
        """Send a message; raise SlowConsumerError where it does not leave in time."""
        self._since = self._loop.time()
        try:
            await self._context.write(message)
        except asyncio.CancelledError:
            # If the client cancelled as well, that one stays: the call is over.
            if self._is_stalled and self._task.uncancel() == 0:
                raise SlowConsumerError(f"The stream was not read for {self._stall_timeout:g} seconds.") from None
            raise
        self._since = None

    def _look(self) -> None:
        now = self._loop.time()
        due = (now if self._since is None else self._since) + self._stall_timeout
        if due > now:
            self._timer = self._loop.call_at(due, self._look)
        else:
            self._is_stalled = True
            self._task.cancel()


@contextmanager
def _by_fields() -> Iterator[None]:
    """Have errors about adapters name the fields of these calls."""
    try:
        yield
    except UserError as error:
        error.parameter = _ADAPTER_FIELDS.get(error.parameter or "", error.parameter)
        raise


def first(metadata: Any, key: str) -> str | None:
    """Return the first value of a key of metadata as text."""
    return next((value for name, value in metadata or () if name == key and isinstance(value, str)), None)


def _can_be_metadata(value: str) -> bool:
    """Whether HTTP/2 headers can hold a value that was not checked yet."""
    return len(value) <= _MAX_METADATA_CHARS and value.isascii() and value.isprintable()


def _now() -> Timestamp:
    now = Timestamp()
    now.FromNanoseconds(time.time_ns())
    return now
