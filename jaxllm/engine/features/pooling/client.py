"""`PoolingClient`: the pooling call of engines and fleets."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from jaxllm.engine.prompts import Prompt
from jaxllm.outputs import PoolingRequestOutput, RequestOutput, pooled_output
from jaxllm.pooling_params import PoolingParams


class PoolingClient(Protocol):
    """The pooling call of `EngineClient`."""

    def generate(self, prompt: Prompt, *arguments: Any, **options: Any) -> AsyncGenerator[RequestOutput]:
        """See `EngineClient.generate`."""
        ...

    async def encode(
        self, prompt: Prompt, pooling_params: PoolingParams | None = None, request_id: str | None = None, **options: Any
    ) -> AsyncGenerator[PoolingRequestOutput]:
        """Yield the one output of a prompt to embed, classify or score."""
        outputs = self.generate(prompt, pooling_params or PoolingParams(), request_id, **options)
        async with aclosing(outputs):
            async for output in outputs:
                yield pooled_output(output)
