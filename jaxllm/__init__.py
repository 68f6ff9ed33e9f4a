"""jaxllm: an inference engine for large language models on JAX.

The names below are loaded when they are first used, so that `import jaxllm` costs milliseconds and a client of the
server does not pay for JAX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.config import EngineConfig
    from jaxllm.engine import LLMEngine
    from jaxllm.llm import LLM
    from jaxllm.types import CompletionOutput, EngineError, Logprob, RequestOutput, SamplingParams, UserError

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "EngineError",
    "LLMEngine",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "UserError",
]

_HOMES = {"LLM": "llm", "LLMEngine": "engine", "EngineConfig": "config"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
    return getattr(import_module(f"jaxllm.{_HOMES.get(name, 'types')}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
