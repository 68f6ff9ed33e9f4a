"""The client that blocks. What it sends and returns is made in `requests` and `reading`; `asynchronous` is its twin."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar, Unpack

import grpc
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


class Client(Endpoint):
    """A connection to a server that any number of threads can share. Options are those of `Endpoint`.

    Every method raises `UserError` for what is wrong with the call, and `EngineError` for what is wrong with the server
    (`OverloadedError`, `UnavailableError`, `DeadlineError` … in `jaxllm.errors`).
    """

    def _open(self) -> None:
        credentials = self._credentials
        self._channel = (
            grpc.insecure_channel(self.target, self._options)
            if credentials is None
            else grpc.secure_channel(self.target, credentials, self._options)
        )
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._control = control_pb2_grpc.ControlServiceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    def generate(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Generate from a text, or from token ids, and return everything."""
        request = requests.generate_request(prompt, options)
        return self._call(self._inference.Generate, request, reading.read_completion, timeout)

    def stream(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[StreamOptions]
    ) -> Stream:
        """Generate and iterate over what is new."""
        return self._stream(requests.generate_request(prompt, options, is_stream=True), timeout)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        timeout: float | None = None,
        **options: Unpack[ChatGenerateOptions],
    ) -> Completion:
        """Answer a conversation, given as OpenAI's `messages`; append the answer's `message` to go on."""
        request = requests.chat_request(messages, options)
        return self._call(self._inference.Generate, request, reading.read_completion, timeout)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        timeout: float | None = None,
        **options: Unpack[ChatStreamOptions],
    ) -> Stream:
        """Answer a conversation and iterate over what is new."""
        return self._stream(requests.chat_request(messages, options, is_stream=True), timeout)

    def tokenize(
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
        return self._call(self._inference.Tokenize, request, reading.read_token_ids, timeout)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout: float | None = None) -> str:
        """Return the text of token ids, special tokens shown."""
        request = requests.detokenize_request(token_ids, model)
        return self._call(self._inference.Detokenize, request, reading.read_text, timeout)

    def models(self, *, timeout: float | None = None) -> list[ModelInfo]:
        """List the models that are served, with the values of options that a call leaves open."""
        request = inference_pb2.ListModelsRequest()
        return self._call(self._inference.ListModels, request, reading.read_models, timeout)

    def server_info(self, *, timeout: float | None = None) -> ServerInfo:
        """Tell what the server is."""
        request = control_pb2.GetServerInfoRequest()
        return self._call(self._control.GetServerInfo, request, reading.read_server_info, timeout)

    def load(self, *, timeout: float | None = None) -> Load:
        """Tell how busy the server is."""
        request = control_pb2.GetLoadRequest()
        return self._call(self._control.GetLoad, request, reading.read_load, timeout)

    def abort(self, request_ids: str | Sequence[str], *, timeout: float | None = None) -> None:
        """End requests by id, whoever sent them; they return what there is. Unknown ids are no error."""
        request = requests.abort_request(request_ids)
        return self._call(self._control.Abort, request, reading.read_nothing, timeout)

    def pause(self, mode: str = "abort", *, clear_cache: bool | None = None, timeout: float | None = None) -> None:
        """Stop generating; running requests end ("abort"), finish first ("wait") or stay for `resume` ("keep")."""
        request = requests.pause_request(mode, clear_cache)
        return self._call(self._control.PauseGeneration, request, reading.read_nothing, timeout)

    def resume(self, *, timeout: float | None = None) -> None:
        """Generate again."""
        request = control_pb2.ResumeGenerationRequest()
        return self._call(self._control.ResumeGeneration, request, reading.read_nothing, timeout)

    def reset_prefix_cache(self, *, timeout: float | None = None) -> bool:
        """Forget cached prefixes; False, and nothing is forgotten, while requests run."""
        request = control_pb2.ResetPrefixCacheRequest()
        return self._call(self._control.ResetPrefixCache, request, reading.read_was_reset, timeout)

    def health(self, service: str = "", *, timeout: float | None = None) -> str:
        """Return the health of the server, or of one of its services: "serving", "not_serving" or "unknown"."""
        request = health_pb2.HealthCheckRequest(service=service)
        return self._call(self._health.Check, request, read_health, timeout)

    def wait_until_ready(self, timeout: float = 60.0) -> None:
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
                state = self.health(timeout=min(left, 1.0))
            except (UnavailableError, DeadlineError) as error:
                state = str(error)
            if state != "serving":
                time.sleep(0.1)

    def close(self) -> None:
        """End the connection, and with it the calls that are under way."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(
        self, rpc: Callable[..., Response], request: object, read: Callable[[Response], Result], timeout: float | None
    ) -> Result:
        try:
            response = rpc(request, timeout=self.timeout if timeout is None else timeout, metadata=self._metadata)
        except grpc.RpcError as failure:
            raise error_of(failure, self.target) from None
        return read(response)

    def _stream(self, request: inference_pb2.GenerateRequest, timeout: float | None) -> Stream:
        deadline = self.timeout if timeout is None else timeout
        call = self._inference.StreamGenerate(request, timeout=deadline, metadata=self._metadata)
        return Stream(call, self.target)


class Stream(reading.Received):
    """Iterates over what is new of a call's sequences: each `Delta` belongs to the sequence of its `index`.

    Leaving a `with` block, or `close`, ends the call on the server too. After an exception, what came before is still
    valid: `so_far` has it.
    """

    def __init__(self, call: Any, target: str) -> None:
        super().__init__()
        self._call = call
        self._target = target
        self._is_closed = False

    def result(self) -> Completion:
        """Wait for the rest and return everything."""
        for _ in self:
            pass
        return self.so_far

    def close(self) -> None:
        """End the call, if it has not ended."""
        self._is_closed = True
        self._call.cancel()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        while not self._deltas:
            try:
                message = next(self._call)
            except grpc.RpcError as failure:
                if self._is_closed:
                    raise StopIteration from None
                raise error_of(failure, self._target) from None
            self._take(message)
        return self._deltas.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
