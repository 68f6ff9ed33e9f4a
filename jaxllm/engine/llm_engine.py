"""`LLMEngine`: the engine as its callers use it, with vLLM's methods. Its loop is in engine_core.py."""

from __future__ import annotations

from typing import Any

from jaxllm.config import EngineConfig, config_of
from jaxllm.engine.accepted import Accepted, Params
from jaxllm.engine.engine_core import EngineCore
from jaxllm.engine.features.adapters.calls import AdapterCalls
from jaxllm.engine.prompts import Prompt
from jaxllm.lora_request import LoRARequest


class LLMEngine(AdapterCalls, EngineCore):
    """Continuous batching over one model. Not thread-safe: one thread adds, steps and aborts.

    engine = LLMEngine.from_engine_args("path/or/hub-id", dtype="bfloat16")
    engine.add_request("1", "Once upon a time", SamplingParams(max_tokens=64))
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(output.outputs[0].text)
    """

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineConfig | str | None = None, *, progress: bool = False, **settings: Any
    ) -> LLMEngine:
        """Make an engine of `EngineArgs`, or of the arguments of `LLM`: a model and fields of `EngineConfig`."""
        return cls(config_of(engine_args, settings), progress=progress)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Queue a request; a problem with it is a UserError and leaves the engine as it was."""
        self.add([self.accept(request_id, prompt, params, priority, lora_request)])

    def accept(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> Accepted:
        """Check a request and make its token ids, see `InputProcessor.accept`; nothing is queued.

        An adapter that is not in memory is read.
        """
        if lora_request is not None:
            options["lora_request"] = lora_request
        return super().accept(request_id, prompt, params, priority, **options)
