"""The methods of both clients: each returns a `Call` to execute."""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Generic, Literal, TypeVar, Unpack

from grpc_health.v1 import health_pb2

from jaxllm.client import reading, requests
from jaxllm.client.channel import Endpoint, read_health
from jaxllm.client.options import (
    ChatGenerateOptions,
    ChatOptions,
    ChatStreamOptions,
    ClassifyOptions,
    EmbedOptions,
    GenerateOptions,
    ScoreOptions,
    StreamEmbedOptions,
    StreamOptions,
)
from jaxllm.client.results import (
    Adapter,
    Classification,
    Completion,
    Embedding,
    ModelInfo,
    Scores,
    ServerInfo,
    WeightInfo,
)
from jaxllm.client.weight_requests import finish_request, sleep_request, update_requests, wake_up_request
from jaxllm.metrics import Load
from jaxllm.v1 import control_pb2, inference_pb2

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Call(Generic[Result]):
    """A call that has not been made yet."""

    service: Literal["inference", "control", "health"]
    method: str
    request: Any
    read: Callable[[Any], Result]
    timeout: float | None  # seconds; None: the client's timeout


class Calls(Endpoint):
    """All calls of the API."""

    def generate(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[GenerateOptions]
    ) -> Call[Completion]:
        """Generate from a text or token ids; return the completion."""
        request = requests.generate_request(prompt, options)
        return Call("inference", "Generate", request, reading.read_completion, timeout)

    def stream(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[StreamOptions]
    ) -> Call[None]:
        """Generate from a text or token ids; iterate over deltas."""
        return Call(
            "inference",
            "StreamGenerate",
            requests.generate_request(prompt, options, is_stream=True),
            reading.read_nothing,
            timeout,
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        timeout: float | None = None,
        **options: Unpack[ChatGenerateOptions],
    ) -> Call[Completion]:
        """Answer a conversation in OpenAI's form; append `Completion.message` to continue it."""
        request = requests.chat_request(messages, options)
        return Call("inference", "Generate", request, reading.read_completion, timeout)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        timeout: float | None = None,
        **options: Unpack[ChatStreamOptions],
    ) -> Call[None]:
        """Answer a conversation; iterate over deltas."""
        return Call(
            "inference",
            "StreamGenerate",
            requests.chat_request(messages, options, is_stream=True),
            reading.read_nothing,
            timeout,
        )

    def embed(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[EmbedOptions]
    ) -> Call[Embedding]:
        """Return the embedding of a text or token ids."""
        request = requests.embed_request(prompt, options)
        return Call("inference", "Embed", request, reading.read_embedding, timeout)

    def stream_embed(
        self,
        prompts: Iterable[str | Sequence[int]] | AsyncIterable[str | Sequence[int]],
        *,
        timeout: float | None = None,
        **options: Unpack[StreamEmbedOptions],
    ) -> Call[None]:
        """Embed any number of prompts; iterate over embeddings as they finish. `result()` restores the order.

        Reads prompts as the server accepts them; AsyncClient also takes asynchronous iterables.
        """
        sent = requests.EmbedRequests(prompts, options)
        return Call("inference", "StreamEmbed", sent, reading.read_nothing, timeout)

    def classify(
        self, prompt: str | Sequence[int], *, timeout: float | None = None, **options: Unpack[ClassifyOptions]
    ) -> Call[Classification]:
        """Classify a text or token ids."""
        request = requests.classify_request(prompt, options)
        return Call("inference", "Classify", request, reading.read_classification, timeout)

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        timeout: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> Call[Scores]:
        """Score pairs of texts: one with one, one with each of many, or equal lists pairwise."""
        request = requests.score_request(text_1, text_2, options)
        return Call("inference", "Score", request, reading.read_scores, timeout)

    def tokenize(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        timeout: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> Call[list[int]]:
        """Return the token ids that `generate` or `chat` would use."""
        request = requests.tokenize_request(prompt, model, add_special_tokens, options)
        return Call("inference", "Tokenize", request, reading.read_token_ids, timeout)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", timeout: float | None = None) -> Call[str]:
        """Return the text of token ids, including special tokens."""
        request = requests.detokenize_request(token_ids, model)
        return Call("inference", "Detokenize", request, reading.read_text, timeout)

    def models(self, *, timeout: float | None = None) -> Call[list[ModelInfo]]:
        """List the served models, with default options."""
        request = inference_pb2.ListModelsRequest()
        return Call("inference", "ListModels", request, reading.read_models, timeout)

    def server_info(self, *, timeout: float | None = None) -> Call[ServerInfo]:
        """Return the server's version, state and limits."""
        request = control_pb2.GetServerInfoRequest()
        return Call("control", "GetServerInfo", request, reading.read_server_info, timeout)

    def load(self, *, timeout: float | None = None) -> Call[Load]:
        """Return the server's load."""
        request = control_pb2.GetLoadRequest()
        return Call("control", "GetLoad", request, reading.read_load, timeout)

    def abort(self, request_ids: str | Sequence[str], *, timeout: float | None = None) -> Call[None]:
        """Abort requests of any client by id; each returns the tokens so far. Unknown ids are ignored."""
        request = requests.abort_request(request_ids)
        return Call("control", "Abort", request, reading.read_nothing, timeout)

    def pause(
        self, mode: str = "abort", *, clear_cache: bool | None = None, timeout: float | None = None
    ) -> Call[None]:
        """Stop generating; running requests end ("abort"), finish first ("wait") or stay for `resume` ("keep")."""
        request = requests.pause_request(mode, clear_cache)
        return Call("control", "PauseGeneration", request, reading.read_nothing, timeout)

    def resume(self, *, timeout: float | None = None) -> Call[None]:
        """Resume generating after `pause`."""
        request = control_pb2.ResumeGenerationRequest()
        return Call("control", "ResumeGeneration", request, reading.read_nothing, timeout)

    def sleep(
        self,
        level: int = 1,
        tags: Iterable[str] | None = None,
        *,
        mode: str = "abort",
        timeout: float | None = None,
    ) -> Call[None]:
        """Pause (level 0), and move the weights to the host (1) or drop them (2) with the KV cache; `mode` as `pause`.

        `tags` limits it to "weights" or "kv_cache".
        """
        return Call("control", "Sleep", sleep_request(level, tags, mode), reading.read_nothing, timeout)

    def wake_up(self, tags: Iterable[str] | None = None, *, timeout: float | None = None) -> Call[None]:
        """Bring `tags` back after `sleep`, by default all; resume if nothing sleeps."""
        return Call("control", "WakeUp", wake_up_request(tags), reading.read_nothing, timeout)

    def weight_info(self, *, timeout: float | None = None) -> Call[WeightInfo]:
        """Return the version of the weights, and whether the server sleeps or is paused."""
        return Call("control", "GetWeightInfo", control_pb2.GetWeightInfoRequest(), reading.read_weight_info, timeout)

    def start_weight_update(self, *, timeout: float | None = None) -> Call[None]:
        """Open an update of the weights in pieces; requests wait until `finish_weight_update`."""
        request = control_pb2.StartWeightUpdateRequest()
        return Call("control", "StartWeightUpdate", request, reading.read_nothing, timeout)

    def update_weights(
        self,
        weights: str | PathLike[str] | Mapping[str, Any],
        *,
        weight_version: str | None = None,
        timeout: float | None = None,
    ) -> Iterator[Call[str]]:
        """Replace weights, and return their version.

        `weights` is a folder below the server's --weights-root, or, after `start_weight_update`, NumPy or JAX arrays by
        checkpoint name, sent in parts with `timeout` for each and without `weight_version`.
        """
        for request in update_requests(weights, weight_version):
            yield Call("control", "UpdateWeights", request, reading.read_weight_version, timeout)

    def finish_weight_update(self, weight_version: str | None = None, *, timeout: float | None = None) -> Call[str]:
        """End an update in pieces; return the version, by default the number of updates."""
        request = finish_request(weight_version)
        return Call("control", "FinishWeightUpdate", request, reading.read_weight_version, timeout)

    def reset_prefix_cache(self, *, timeout: float | None = None) -> Call[bool]:
        """Clear the prefix cache; return False, clearing nothing, while requests run."""
        request = control_pb2.ResetPrefixCacheRequest()
        return Call("control", "ResetPrefixCache", request, reading.read_was_reset, timeout)

    def load_adapter(
        self, name: str, source: str, *, load_inplace: bool = False, timeout: float | None = None
    ) -> Call[None]:
        """Load an adapter from a folder below the server's --lora-root; `load_inplace` replaces a namesake."""
        request = control_pb2.LoadAdapterRequest(name=name, source=source, load_inplace=load_inplace)
        return Call("control", "LoadAdapter", request, reading.read_nothing, timeout)

    def unload_adapter(self, name: str, *, timeout: float | None = None) -> Call[None]:
        """Unload an adapter; running requests finish with it."""
        request = control_pb2.UnloadAdapterRequest(name=name)
        return Call("control", "UnloadAdapter", request, reading.read_nothing, timeout)

    def adapters(self, *, timeout: float | None = None) -> Call[list[Adapter]]:
        """List the loaded adapters."""
        return Call("control", "ListAdapters", control_pb2.ListAdaptersRequest(), reading.read_adapters, timeout)

    def health(self, service: str = "", *, timeout: float | None = None) -> Call[str]:
        """Return the health of the server or a service: serving, not_serving, service_unknown or unknown."""
        request = health_pb2.HealthCheckRequest(service=service)
        return Call("health", "Check", request, read_health, timeout)
