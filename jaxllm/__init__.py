"""jaxllm: an inference engine for large language models on JAX.

The names below are loaded when they are first used, so that `import jaxllm` costs milliseconds and a client of the
server does not pay for JAX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.async_engine import AsyncLLM, AsyncLLMEngine
    from jaxllm.client import AsyncClient, Client
    from jaxllm.config import AsyncEngineArgs, EngineArgs, EngineConfig
    from jaxllm.engine import LLMEngine
    from jaxllm.errors import EngineError, UserError
    from jaxllm.llm import LLM
    from jaxllm.types import (
        CompletionOutput,
        Logprob,
        RepetitionDetectionParams,
        RequestOutput,
        RequestOutputKind,
        SamplingParams,
    )

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "Client",
    "CompletionOutput",
    "EngineArgs",
    "EngineConfig",
    "EngineError",
    "LLMEngine",
    "Logprob",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "UserError",
]

_HOMES = {
    "LLM": "llm",
    "AsyncLLM": "async_engine",
    "AsyncLLMEngine": "async_engine",
    "AsyncClient": "client",
    "Client": "client",
    "AsyncEngineArgs": "config",
    "EngineArgs": "config",
    "EngineConfig": "config",
    "EngineError": "errors",
    "LLMEngine": "engine",
    "UserError": "errors",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
    return getattr(import_module(f"jaxllm.{_HOMES.get(name, 'types')}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
