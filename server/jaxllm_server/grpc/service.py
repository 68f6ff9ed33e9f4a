"""The services of `jaxllm.v1`.

However a call ends, the iterator of `Serving` is closed, which aborts the request.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING
from uuid import uuid4

from google.protobuf.timestamp_pb2 import Timestamp
from grpc.aio import ServicerContext

from jaxllm.errors import EngineError, RequestIdInUseError, UserError
from jaxllm.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2
from jaxllm.version import __version__
from jaxllm_server.grpc import pooling_messages, reading, replies
from jaxllm_server.grpc.pooling_methods import PoolingMethods
from jaxllm_server.grpc.servicer import REQUEST_ID, Writer
from jaxllm_server.grpc.weight_methods import WeightMethods, pause_mode_of

if TYPE_CHECKING:
    from jaxllm_server.generation.calls import Call, Chunk
    from jaxllm_server.serving import Serving

_FILES = [each.DESCRIPTOR for each in (types_pb2, inference_pb2, control_pb2)]
_API_REVISION = (
    sum(len(each.methods) for file in _FILES for each in file.services_by_name.values())
    + sum(len(each.fields) for file in _FILES for each in file.message_types_by_name.values())
    + sum(len(each.values) for file in _FILES for each in file.enum_types_by_name.values())
)
_ADAPTER_FIELDS = {"lora_name": "name", "lora_path": "source"}


class InferenceService(PoolingMethods, inference_pb2_grpc.InferenceServiceServicer):
    """Generation, pooling, tokens and models."""

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: ServicerContext
    ) -> inference_pb2.GenerateResponse:
        chunks, reply = await self._begin(request, context, stream=False)
        async with aclosing(chunks):
            chunk = await anext(chunks)
            await context.send_initial_metadata(((REQUEST_ID, chunk.request_id),))
            return reply.response(chunk)

    async def StreamGenerate(self, request: inference_pb2.GenerateRequest, context: ServicerContext) -> None:
        """Stream new output; send nothing, headers included, before the first tokens: clients can retry."""
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

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        most = self._serving.options.max_json_depth
        client = self._client_of(context)
        call = await self._read(client, request, reading.tokenize_call_of, max_json_depth=most)
        ids = await self._serving.tokenize(replace(call, client=client))
        return inference_pb2.TokenizeResponse(token_ids=ids, max_model_len=self._serving.engine.model.max_model_len)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: ServicerContext
    ) -> inference_pb2.DetokenizeResponse:
        ids = await self._read(self._client_of(context), request, reading.detokenize_ids_of)
        self._serving.check_model(request.model)
        text = await self._serving.detokenize(ids, self._client_of(context), request.model)
        return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: ServicerContext
    ) -> inference_pb2.ListModelsResponse:
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
            model.pooling.CopyFrom(pooling_messages.pooling_of(pooler, engine.model.pooled_size))
        return inference_pb2.ListModelsResponse(models=[model, *self._adapters(model)])

    def _adapters(self, parent: inference_pb2.Model) -> Iterator[inference_pb2.Model]:
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
        request_id, is_hint, client = self._admit(request, context)
        most = self._serving.options.max_json_depth
        call = await self._read(client, request, reading.call_of, request_id, stream=stream, max_json_depth=most)
        call = replace(call, client=client, num_bytes=request.ByteSize())
        model = self._serving.check_model(request.model, request.adapter)
        chunks = self._hinted(call) if is_hint else self._serving.generate(call)
        return chunks, replies.reply_of(request, model)

    async def _hinted(self, call: Call) -> AsyncGenerator[Chunk, None]:
        """Generate under the metadata's id, or a derived one while that is in use."""
        try:
            async with aclosing(self._serving.generate(call)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except RequestIdInUseError:
            unique = self._unique(call.request_id or "")
            async with aclosing(self._serving.generate(replace(call, request_id=unique))) as chunks:
                async for chunk in chunks:
                    yield chunk


class ControlService(WeightMethods, control_pb2_grpc.ControlServiceServicer):
    """State, load and control."""

    def __init__(self, serving: Serving, stall_timeout: float) -> None:
        super().__init__(serving)
        self._stall_timeout = stall_timeout
        self._instance_id = uuid4().hex
        self._start_time = _now()

    async def GetServerInfo(
        self, request: control_pb2.GetServerInfoRequest, context: ServicerContext
    ) -> control_pb2.GetServerInfoResponse:
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
            return info
        info.max_model_len = model.max_model_len
        info.max_num_seqs = model.max_num_seqs
        info.max_num_batched_tokens = model.max_num_batched_tokens
        info.block_size = model.block_size
        info.kv_blocks_total = model.num_kv_blocks
        info.dtype = model.dtype
        info.device_kind = model.device_kind
        info.mesh["tp"] = engine.config.tensor_parallel_size
        if engine.config.pipeline_parallel_size > 1:
            info.mesh["pp"] = engine.config.pipeline_parallel_size
        return info

    async def GetLoad(
        self, request: control_pb2.GetLoadRequest, context: ServicerContext
    ) -> control_pb2.GetLoadResponse:
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
        await self._serving.engine.abort(request.request_ids)
        return control_pb2.AbortResponse()

    async def ResetPrefixCache(
        self, request: control_pb2.ResetPrefixCacheRequest, context: ServicerContext
    ) -> control_pb2.ResetPrefixCacheResponse:
        return control_pb2.ResetPrefixCacheResponse(was_reset=await self._serving.engine.reset_prefix_cache())

    async def PauseGeneration(
        self, request: control_pb2.PauseGenerationRequest, context: ServicerContext
    ) -> control_pb2.PauseGenerationResponse:
        mode = pause_mode_of(request.mode)
        if mode == "keep" and request.clear_cache:
            raise UserError("requests that are kept need the cache: leave clear_cache out or false.", "clear_cache")
        clear = request.clear_cache if request.HasField("clear_cache") else mode != "keep"
        await self._serving.engine.pause(mode, clear)
        return control_pb2.PauseGenerationResponse()

    async def ResumeGeneration(
        self, request: control_pb2.ResumeGenerationRequest, context: ServicerContext
    ) -> control_pb2.ResumeGenerationResponse:
        await self._serving.engine.resume()
        return control_pb2.ResumeGenerationResponse()

    async def StreamKvEvents(self, request: control_pb2.StreamKvEventsRequest, context: ServicerContext) -> None:
        events = self._serving.engine.kv_events(request.start_sequence)
        async with aclosing(events) as batches, Writer(context, self._stall_timeout) as writer:
            async for batch in batches:
                await writer.write(replies.kv_events_of(batch))

    async def LoadAdapter(
        self, request: control_pb2.LoadAdapterRequest, context: ServicerContext
    ) -> control_pb2.LoadAdapterResponse:
        with _by_fields():
            await self._serving.adapters.load(request.name, request.source, in_place=request.load_inplace)
        return control_pb2.LoadAdapterResponse()

    async def UnloadAdapter(
        self, request: control_pb2.UnloadAdapterRequest, context: ServicerContext
    ) -> control_pb2.UnloadAdapterResponse:
        with _by_fields():
            self._serving.adapters.unload(request.name)
        return control_pb2.UnloadAdapterResponse()

    async def ListAdapters(
        self, request: control_pb2.ListAdaptersRequest, context: ServicerContext
    ) -> control_pb2.ListAdaptersResponse:
        adapters = self._serving.adapters
        found = [(served, adapters.known(served)) for served in adapters]
        return control_pb2.ListAdaptersResponse(
            adapters=[
                control_pb2.Adapter(name=served.name, source=served.source, rank=0 if known is None else known.rank)
                for served, known in found
            ]
        )


@contextmanager
def _by_fields() -> Iterator[None]:
    try:
        yield
    except UserError as error:
        error.parameter = _ADAPTER_FIELDS.get(error.parameter or "", error.parameter)
        raise


def _now() -> Timestamp:
    now = Timestamp()
    now.FromNanoseconds(time.time_ns())
    return now
