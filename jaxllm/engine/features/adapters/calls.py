"""Engine calls for adapters, by vLLM's names."""

from __future__ import annotations

from typing import cast

from jaxllm.engine.features.adapters.rows import AdapterTexts
from jaxllm.engine.features.adapters.store import Adapters
from jaxllm.engine.features.feature import Features
from jaxllm.engine.model_info import ModelInfo
from jaxllm.lora_request import LoRARequest


class AdapterCalls:
    """Adapter methods of an engine, which read on the calling thread."""

    features: Features
    model: ModelInfo

    @property
    def adapters(self) -> Adapters:
        return cast("AdapterTexts", self.features.by_name[AdapterTexts.name]).store

    def model_of(self, lora_request: LoRARequest | None) -> ModelInfo:
        """Return the model, with the adapter's tokenizer if any."""
        return self.model if lora_request is None else self.adapters.get(lora_request).language.model

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter in advance and return True; raise UserError if it is invalid."""
        self.adapters.get(lora_request)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter, which its running requests keep; return whether it was known."""
        return self.adapters.remove(lora_id)

    def list_loras(self) -> set[int]:
        """Return the `lora_int_id` of known adapters."""
        return self.adapters.ids()
