"""Client library for the jaxllm server, blocking and asynchronous. Imports no JAX.

    with Client("localhost:50051") as client:
        print(client.generate("Once upon a time", max_tokens=64, temperature=0).text)

Exceptions are those of `jaxllm.errors`, and `AuthError`.
"""

from __future__ import annotations

try:
    import google.rpc.status_pb2  # noqa: F401
    import grpc_health.v1.health_pb2_grpc  # noqa: F401  # needs grpc and protobuf, as everything here does
except ModuleNotFoundError as error:
    raise ImportError(f"The client needs {error.name}: pip install 'jaxllm[client]'", name=error.name) from None

from jaxllm.client.asynchronous import AsyncClient, AsyncEmbeddingStream, AsyncStream
from jaxllm.client.blocking import Client, EmbeddingStream, Stream
from jaxllm.client.errors import AuthError
from jaxllm.client.results import (
    Adapter,
    Classification,
    Completion,
    Delta,
    Embedding,
    ModelInfo,
    Output,
    Scores,
    ServerInfo,
    Timing,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
    WeightInfo,
)

__all__ = [
    "Adapter",
    "AsyncClient",
    "AsyncEmbeddingStream",
    "AsyncStream",
    "AuthError",
    "Classification",
    "Client",
    "Completion",
    "Delta",
    "Embedding",
    "EmbeddingStream",
    "ModelInfo",
    "Output",
    "Scores",
    "ServerInfo",
    "Stream",
    "Timing",
    "TokenLogprob",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
    "WeightInfo",
]
