"""`PoolingClient`: the call of engines and fleets for a prompt that is pooled."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from jaxllm.engine.prompts import Prompt
from jaxllm.outputs import PoolingRequestOutput, RequestOutput, pooled_output
from jaxllm.pooling_params import PoolingParams


class PoolingClient(Protocol):
    """The part of `EngineClient` that is about pooling. Engines and fleets inherit it."""

    def generate(self, prompt: Prompt, *arguments: Any, **options: Any) -> AsyncGenerator[RequestOutput]:
        """Stream a request's outputs, as `EngineClient.generate`."""
        ...

    async def encode(
        self, prompt: Prompt, pooling_params: PoolingParams | None = None, request_id: str | None = None, **options: Any
    ) -> AsyncGenerator[PoolingRequestOutput]:
        """Yield the one output of a prompt that is embedded, classified or scored; options as of `generate`."""
        outputs = self.generate(prompt, pooling_params or PoolingParams(), request_id, **options)
        async with aclosing(outputs):
            async for output in outputs:
                yield pooled_output(output)
