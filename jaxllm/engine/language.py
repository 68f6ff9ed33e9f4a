"""The tokenizer of a request, and the compiler of grammars."""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.engine.model_info import ModelInfo
from jaxllm.structured_output.grammars import Grammars


@dataclass(frozen=True, eq=False, kw_only=True)
class Language:
    """The language of the model, or of an adapter."""

    model: ModelInfo
    grammars: Grammars

    @classmethod
    def of(cls, model: ModelInfo) -> Language:
        return cls(model=model, grammars=Grammars(model.tokenizer, model.vocab_size, model.eos_ids))
