"""A benchmark client for gRPC."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import grpc

from jaxllm.bench.outcome import Outcome
from jaxllm.bench.target import Target
from jaxllm.bench.workload import Job
from jaxllm.client import AsyncClient, Client, reading
from jaxllm.client.calls import Call
from jaxllm.client.channel import error_of
from jaxllm.client.requests import generate_request
from jaxllm.errors import EngineError, UserError

CHANNEL: Mapping[str, Any] = {
    "retries": False,  # refusals are outcomes
    # Processes must not share connections.
    "channel_options": (("grpc.use_local_subchannel_pool", 1),),
}


class GrpcClient(AsyncClient):
    """`AsyncClient` without result objects per message."""

    def __init__(self, target: Target) -> None:
        super().__init__(**endpoint_options(target))
        self._bench = target

    async def send(self, name: str, job: Job, outcome: Outcome) -> None:
        target = self._bench
        if target.embeds:
            await self._embed(name, job, outcome)
            return
        options = {"max_tokens": job.max_tokens, "request_id": f"{target.request_id_prefix}{name}"}
        options |= {"model": job.model or target.model, **target.fields, **target.extra}
        request = generate_request(job.prompt, options, is_stream=True)
        pieces: list[str] = []
        times = outcome.message_times
        usage: Any = None
        outcome.sent_at = time.perf_counter()
        try:
            async for message in self._start(Call("inference", "StreamGenerate", request, reading.read_nothing, None)):
                if message.deltas:
                    times.append(time.perf_counter())
                    pieces += [delta.text for delta in message.deltas]
                if message.HasField("usage"):
                    usage = message.usage
        except grpc.RpcError as failure:
            outcome.error = str(error_of(failure, self.target))
        finally:
            outcome.ended_at = time.perf_counter()
        outcome.text = "".join(pieces)
        if usage is not None:
            outcome.output_tokens, outcome.seen_prompt_tokens = usage.completion_tokens, usage.prompt_tokens
        if not times and not outcome.error:
            outcome.error = "the answer has no token"

    async def _embed(self, name: str, job: Job, outcome: Outcome) -> None:
        target = self._bench
        options = {"model": target.model, **target.fields, **target.extra}
        outcome.sent_at = time.perf_counter()
        try:
            if job.others:
                found = await self.stream_embed([job.prompt, *job.others], **options).result()
            else:
                found = [await self.embed(job.prompt, request_id=f"{target.request_id_prefix}{name}", **options)]
        except (UserError, EngineError) as error:
            outcome.error = str(error)
            return
        finally:
            outcome.ended_at = time.perf_counter()
        outcome.message_times.append(outcome.ended_at)
        outcome.output_tokens, outcome.num_vectors = 0, len(found)
        outcome.seen_prompt_tokens = sum(one.prompt_tokens for one in found)

    async def __aenter__(self) -> Self:
        return self


def endpoint_options(target: Target) -> dict[str, Any]:
    base, has_tls = target.base.removeprefix("https://"), target.base.startswith("https://")
    return {"target": base, "tls": has_tls, "metadata": target.headers, **CHANNEL}


def first_model(target: Target, timeout: float) -> str:
    return Client(**endpoint_options(target)).models(timeout=timeout)[0].name


def coding_of(
    target: Target, timeout: float
) -> tuple[Callable[[str, bool], list[int]], Callable[[Sequence[int]], str]]:
    client = Client(**endpoint_options(target))

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        return client.tokenize(text, model=target.model, add_special_tokens=add_special_tokens, timeout=timeout)

    def decode(ids: Sequence[int]) -> str:
        return client.detokenize(ids, model=target.model, timeout=timeout)

    return encode, decode


def context_of(target: Target, timeout: float) -> int | None:
    models = Client(**endpoint_options(target)).models(timeout=timeout)
    return next((model.max_model_len for model in models if target.model in (model.name, *model.aliases)), None)
