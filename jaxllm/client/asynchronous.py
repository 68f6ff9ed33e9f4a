"""The client for event loops. What it sends and returns is made in `requests` and `reading`; `blocking` is its twin."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Self, TypeVar, Unpack

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxllm.client import reading, requests
from jaxllm.client.channel import Endpoint, error_of, read_health
from jaxllm.client.options import ChatGenerateOptions, ChatOptions, ChatStreamOptions, GenerateOptions, StreamOptions
from jaxllm.client.results import Completion, Delta, ModelInfo, ServerInfo
from jaxllm.errors import DeadlineError, UnavailableError
from jaxllm.metrics import Load
from jaxllm.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

Response = TypeVar("Response")
Result = TypeVar("Result")


class AsyncClient(Endpoint):
    """A connection to a server for the event loop of its first call. Options are those of `Endpoint`.

    Every method raises `UserError` for what is wrong with the call, and `EngineError` for what is wrong with the server
    (`OverloadedError`, `UnavailableError`, `DeadlineError` … in `jaxllm.errors`).
    """

    def _open(self) -> None:
        self._open_channel: grpc.aio.Channel | None = None

    @property
    def _channel(self) -> grpc.aio.Channel:
        """Made late, because gRPC binds it to the event loop that runs then."""
        if self._open_channel is None:
            credentials = self._credentials
            self._open_channel = (
                grpc.aio.insecure_channel(self.target, self._options)
                if credentials is None
                else grpc.aio.secure_channel(self.target, credentials, self._options)
            )
        return self._open_channel

    @cached_property
    def _inference(self) -> Any:
        return inference_pb2_grpc.InferenceServiceStub(self._channel)

    @cached_property
    def _control(self) -> Any:
        return control_pb2_grpc.ControlServiceStub(self._channel)

    @cached_property
    def _health(self) -> Any:
        return health_pb2_grpc.HealthStub(self._channel)

    async def generate(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Generate from a text, or from token ids, and return everything."""
        request = requests.generate_request(prompt, options)
        return await self._call(self._inference.Generate, request, reading.read_completion, timeout)

    def stream(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[StreamOptions]
    ) -> AsyncStream:
        """Generate and iterate over what is new; no `await` before the call."""
        return self._stream(requests.generate_request(prompt, options, is_stream=True), timeout)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        timeout: float | None = None,
        **options: Unpack[ChatGenerateOptions],
    ) -> Completion:
        """Answer a conversation, given as OpenAI's `messages`; append the answer's `message` to go on."""
        request = requests.chat_request(messages, options)
        return await self._call(self._inference.Generate, request, reading.read_completion, timeout)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        timeout: float | None = None,
        **options: Unpack[ChatStreamOptions],
    ) -> AsyncStream:
        """Answer a conversation and iterate over what is new; no `await` before the call."""
        return self._stream(requests.chat_request(messages, options, is_stream=True), timeout)

    async def tokenize(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[int]:
        """Return the token ids of a text, or of a conversation, as `generate` and `chat` would make them."""
        request = requests.tokenize_request(prompt, model, add_special_tokens, options)
        return await self._call(self._inference.Tokenize, request, reading.read_token_ids, timeout)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout: float | None = None) -> str:
        """Return the text of token ids, special tokens shown."""
        request = requests.detokenize_request(token_ids, model)
        return await self._call(self._inference.Detokenize, request, reading.read_text, timeout)

    async def models(self, *, timeout: float | None = None) -> list[ModelInfo]:
        """List the models that are served, with the values of options that a call leaves open."""
        request = inference_pb2.ListModelsRequest()
        return await self._call(self._inference.ListModels, request, reading.read_models, timeout)

    async def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Tell what the server is."""
        request = control_pb2.GetServerInfoRequest()
        return await self._call(self._control.GetServerInfo, request, reading.read_server_info, timeout)

    async def load(self, *, timeout: float | None = None) -> Load:
        """Tell how busy the server is."""
        request = control_pb2.GetLoadRequest()
        return await self._call(self._control.GetLoad, request, reading.read_load, timeout)

    async def abort(self, request_ids: str | Sequence[str], *, timeout: float | None = None) -> None:
        """End requests by id, whoever sent them; they return what there is. Unknown ids are no error."""
        request = requests.abort_request(request_ids)
        return await self._call(self._control.Abort, request, reading.read_nothing, timeout)

    async def pause(
        self, mode: str = "abort", *, clear_cache: bool | None = None, timeout: float | None = None
    ) -> None:
        """Stop generating; running requests end ("abort"), finish first ("wait") or stay for `resume` ("keep")."""
        request = requests.pause_request(mode, clear_cache)
        return await self._call(self._control.PauseGeneration, request, reading.read_nothing, timeout)

    async def resume(self, *, timeout: float | None = None) -> None:
        """Generate again."""
        request = control_pb2.ResumeGenerationRequest()
        return await self._call(self._control.ResumeGeneration, request, reading.read_nothing, timeout)

    async def reset_prefix_cache(self, *, timeout: float | None = None) -> bool:
        """Forget cached prefixes; False, and nothing is forgotten, while requests run."""
        request = control_pb2.ResetPrefixCacheRequest()
        return await self._call(self._control.ResetPrefixCache, request, reading.read_was_reset, timeout)

    async def health(self, service: str = "", *, timeout: float | None = None) -> str:
        """Return the health of the server, or of one of its services: "serving", "not_serving" or "unknown"."""
        request = health_pb2.HealthCheckRequest(service=service)
        return await self._call(self._health.Check, request, read_health, timeout)

    async def wait_until_ready(self, timeout: float = 60.0) -> None:
        """Wait until the server is healthy: it may not have been started yet, or be loading its model.

        Raises:
            UnavailableError: after `timeout` seconds.
        """
        end = time.monotonic() + timeout
        state = ""
        while state != "serving":
            left = end - time.monotonic()
            if left <= 0:
                raise UnavailableError(f"{self.target} was not ready within {timeout:g} s: {state or 'no answer'}")
            try:
                state = await self.health(timeout=min(left, 1.0))
            except (UnavailableError, DeadlineError) as error:
                state = str(error)
            if state != "serving":
                await asyncio.sleep(0.1)

    async def close(self) -> None:
        """End the connection, and with it the calls that are under way."""
        if self._open_channel is not None:
            await self._open_channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(
        self,
        rpc: Callable[..., Awaitable[Response]],
        request: object,
        read: Callable[[Response], Result],
        timeout: float | None,
    ) -> Result:
        try:
            response = await rpc(request, timeout=self.timeout if timeout is None else timeout, metadata=self._metadata)
        except grpc.RpcError as failure:
            raise error_of(failure, self.target) from None
        return read(response)

    def _stream(self, request: inference_pb2.GenerateRequest, timeout: float | None) -> AsyncStream:
        deadline = self.timeout if timeout is None else timeout
        call = self._inference.StreamGenerate(request, timeout=deadline, metadata=self._metadata)
        return AsyncStream(call, self.target)


class AsyncStream(reading.Received):
    """Iterates over what is new of a call's sequences: each `Delta` belongs to the sequence of its `index`.

    Leaving an `async with` block, or `close`, ends the call on the server too. After an exception, what came before is
    still valid: `so_far` has it.
    """

    def __init__(self, call: Any, target: str) -> None:
        super().__init__()
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._messages = call.__aiter__()
        self._target = target
        self._is_closed = False

    async def result(self) -> Completion:
        """Wait for the rest and return everything."""
        async for _ in self:
            pass
        return self.so_far

    async def close(self) -> None:
        """End the call, if it has not ended."""
        self._is_closed = True
        self._call.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            try:
                message = await anext(self._messages)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if self._is_closed and not (task and task.cancelling()):
                    raise StopAsyncIteration from None  # the call was cancelled by `close`, not the task
                raise
            except grpc.RpcError as failure:
                raise error_of(failure, self._target) from None
            self._take(message)
        return self._deltas.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __del__(self) -> None:
        # `break` out of `async for` ends nothing by itself, and a call that runs is kept alive by gRPC's own tasks.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._call.cancel)
