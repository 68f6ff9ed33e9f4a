"""`LLMEngine`: the engine with vLLM's methods."""

from __future__ import annotations

from typing import Any

from jaxllm.config import EngineConfig, config_of
from jaxllm.engine.engine_core import EngineCore
from jaxllm.engine.features.table import SteppedCalls
from jaxllm.engine.prompts import Prompt
from jaxllm.request_params import RequestParams


class LLMEngine(EngineCore, SteppedCalls):
    """Continuous batching for one model. Not thread-safe.

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
        """Make an engine from `EngineArgs`, or from the arguments of `LLM`."""
        return cls(config_of(engine_args, settings), progress=progress)

    def add_request(
        self, request_id: str, prompt: Prompt, params: RequestParams | None = None, priority: int = 0, **options: Any
    ) -> None:
        """Queue a request; raise UserError, leaving the engine unchanged, if it is invalid."""
        self.add([self.accept(request_id, prompt, params, priority, **options)])
