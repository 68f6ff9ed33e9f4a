"""A client of the server, blocking and asynchronous. Imports no JAX.

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

from jaxllm.client.asynchronous import AsyncClient, AsyncStream
from jaxllm.client.blocking import Client, Stream
from jaxllm.client.errors import AuthError
from jaxllm.client.results import (
    Completion,
    Delta,
    ModelInfo,
    Output,
    ServerInfo,
    Timing,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
)

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "AuthError",
    "Client",
    "Completion",
    "Delta",
    "ModelInfo",
    "Output",
    "ServerInfo",
    "Stream",
    "Timing",
    "TokenLogprob",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
]
