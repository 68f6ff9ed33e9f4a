"""`LoRARequest`: the adapter of a request."""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.errors import UserError


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter in PEFT's format, with vLLM's field names.

    `lora_int_id` is unique and above 0; `lora_path` a folder, hub id, or embedded adapter ("pirate", "tools").
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise UserError(f"{name} must be a text that is not empty, got {value!r:.80}.", "lora_request")
        number = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise UserError(f"lora_int_id must be an integer above 0, got {number!r:.80}.", "lora_request")
