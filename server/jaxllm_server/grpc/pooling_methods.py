"""Embed, classify and score in `jaxllm.v1.InferenceService`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from uuid import uuid4

from grpc.aio import ServicerContext

from jaxllm.errors import RequestIdInUseError
from jaxllm.v1 import inference_pb2
from jaxllm_server.access.ledger import REQUESTS
from jaxllm_server.grpc import pooling_messages
from jaxllm_server.grpc.error_details import failure_of
from jaxllm_server.grpc.servicer import REQUEST_ID, Servicer, Writer, first
from jaxllm_server.pooling.pool_calls import PoolCall, PoolResult


class PoolingMethods(Servicer):
    """`InferenceService`'s pooling methods."""

    async def Embed(self, request: inference_pb2.EmbedRequest, context: ServicerContext) -> inference_pb2.EmbedResponse:
        request_id, model, (result,) = await self._pooled(request, context)
        return pooling_messages.embedding_of(request_id, model, result)

    async def StreamEmbed(self, requests: AsyncIterator[inference_pb2.EmbedRequest], context: ServicerContext) -> None:
        """Stream each request's embedding or error, in any order; read requests as the queue has room."""
        client, model = self._client_of(context), self._serving.names[0]

        async def read(request: inference_pb2.EmbedRequest) -> PoolCall:
            given = request.request_id or None
            return replace(await self._read(client, request, pooling_messages.pool_call_of, given), client=client)

        answers = await self._serving.pooling.stream(requests, read, client)
        # At once; nor does a failed text end the stream: a grpc.aio client that writes while its call is refused gets
        # no reason (grpc/grpc#36066).
        request_id = first(context.invocation_metadata(), REQUEST_ID) or uuid4().hex
        await context.send_initial_metadata(((REQUEST_ID, request_id),))
        async with aclosing(answers), Writer(context, self._stall_timeout) as writer:
            async for index, request, outcome in answers:
                if isinstance(outcome, Exception):
                    status = failure_of(outcome, request, request.request_id).status.SerializeToString()
                    own = inference_pb2.EmbedResponse(request_id=request.request_id, index=index, error=status)
                else:
                    own = pooling_messages.embedding_of(request.request_id, model, outcome, index)
                await writer.write(own)

    async def Classify(
        self, request: inference_pb2.ClassifyRequest, context: ServicerContext
    ) -> inference_pb2.ClassifyResponse:
        request_id, model, (result,) = await self._pooled(request, context)
        pooler = self._serving.engine.model.pooler
        assert pooler is not None
        return pooling_messages.classification_of(request_id, model, result, pooler.labels)

    async def Score(self, request: inference_pb2.ScoreRequest, context: ServicerContext) -> inference_pb2.ScoreResponse:
        return pooling_messages.scores_of(*await self._pooled(request, context))

    async def _pooled(
        self, request: pooling_messages.PoolRequest, context: ServicerContext
    ) -> tuple[str, str, list[PoolResult]]:
        request_id, is_hint, client = self._admit(request, context)
        call = replace(await self._read(client, request, pooling_messages.pool_call_of, request_id), client=client)

        async def pool(call: PoolCall) -> list[PoolResult]:
            with self._serving.ledger.entry(client) as entry:
                entry.charge(REQUESTS, 2 * request.ByteSize())
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
