"""What an engine of a test needs that has no adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.engine.adapters import Adapters, Language
from jaxllm.engine.model_info import ModelInfo
from jaxllm.text.tokenizer import Tokenizer


def without_adapters(config: EngineConfig, model: ModelInfo, grammars: Any) -> Adapters:
    """Return a store of adapters from which none can be had."""

    def read(folder: Path) -> Any:
        raise NotImplementedError

    def eos_ids(tokenizer: Tokenizer) -> frozenset[int]:
        raise NotImplementedError

    return Adapters(config, Language(model=model, grammars=grammars), read, eos_ids)
