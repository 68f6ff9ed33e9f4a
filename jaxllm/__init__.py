"""jaxllm: an inference engine for large language models on JAX.

Names load on first use: clients do not import JAX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxllm.version import __version__

if TYPE_CHECKING:
    from jaxllm.beam_search_params import BeamSearchParams
    from jaxllm.client import AsyncClient, Client
    from jaxllm.config import AsyncEngineArgs, EngineArgs, EngineConfig
    from jaxllm.engine.async_llm import AsyncLLM, AsyncLLMEngine
    from jaxllm.engine.llm_engine import LLMEngine
    from jaxllm.errors import EngineError, UserError
    from jaxllm.llm import LLM
    from jaxllm.lora_request import LoRARequest
    from jaxllm.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )
    from jaxllm.pooling_params import PoolingParams
    from jaxllm.sampling_params import RepetitionDetectionParams, RequestOutputKind, SamplingParams
    from jaxllm.structured_outputs_params import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationRequestOutput",
    "Client",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineConfig",
    "EngineError",
    "LLMEngine",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "PoolingRequestOutput",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "UserError",
    "__version__",
]

_HOMES = {
    "LLM": "llm",
    "AsyncLLM": "engine.async_llm",
    "AsyncLLMEngine": "engine.async_llm",
    "AsyncClient": "client",
    "Client": "client",
    "AsyncEngineArgs": "config",
    "EngineArgs": "config",
    "EngineConfig": "config",
    "EngineError": "errors",
    "LLMEngine": "engine.llm_engine",
    "UserError": "errors",
    "CompletionOutput": "outputs",
    "LoRARequest": "lora_request",
    "Logprob": "outputs",
    "RequestOutput": "outputs",
    **dict.fromkeys(("ClassificationRequestOutput", "EmbeddingRequestOutput"), "outputs"),
    **dict.fromkeys(("BeamSearchOutput", "BeamSearchSequence"), "outputs"),
    "BeamSearchParams": "beam_search_params",
    **dict.fromkeys(("PoolingRequestOutput", "ScoringRequestOutput"), "outputs"),
    "PoolingParams": "pooling_params",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
    return getattr(import_module(f"jaxllm.{_HOMES.get(name, 'sampling_params')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
