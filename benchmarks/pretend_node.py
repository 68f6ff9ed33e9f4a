"""A replica whose engine sleeps instead of computing: `python -m benchmarks.pretend_node`, run by a front end."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from jaxllm import RequestOutputKind, SamplingParams
from jaxllm.engine.model_info import ModelInfo
from jaxllm.fleet import node, wire
from jaxllm.metrics import Load, Metrics
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.text.tokenizer import NoTokenizer

ROWS, STEP, NEW = 64, 0.015, 128
PROMPT = list(range(3, 67))
DELTAS = SamplingParams(max_tokens=NEW, output_kind=RequestOutputKind.DELTA)


class PretendEngine:
    """An engine that sleeps during steps, with the part of `AsyncLLM` that a node uses."""

    state, observer = "serving", None

    def __init__(self) -> None:
        self.config = SimpleNamespace(enable_kv_cache_events=False)
        self.metrics = Metrics()
        self.model = ModelInfo(
            tokenizer=NoTokenizer("none"),
            generation_config={},
            default_params=DELTAS,
            eos_ids=frozenset(),
            vocab_size=1000,
            max_model_len=4096,
        )
        self._rows: dict[str, asyncio.Queue[RequestOutput]] = {}

    async def start(self) -> None:
        """Start stepping."""
        self._stepping = asyncio.ensure_future(self._step())

    async def _step(self) -> None:
        due = time.monotonic()
        while True:
            due = max(due + STEP, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            for name, row in list(self._rows.items())[:ROWS]:
                self.metrics.generated_tokens += 1
                row.put_nowait(RequestOutput(name, None, PROMPT, [CompletionOutput(0, "word ", [7])]))

    async def generate(self, prompt: Any, params: Any, name: str, **_: Any) -> AsyncIterator[RequestOutput]:
        """Stream a request's tokens."""
        row = self._rows[name] = asyncio.Queue()
        try:
            for number in range(NEW):
                output = await row.get()
                output.finished = number == NEW - 1
                yield output
        finally:
            del self._rows[name]

    def get_load(self) -> Load:
        """Return the load."""
        return Load(running=min(len(self._rows), ROWS), max_running=ROWS)

    def device_report(self) -> None:
        """Return no device report."""

    async def close(self, timeout: float) -> None:
        """Stop stepping."""
        self._stepping.cancel()


if __name__ == "__main__":
    pretended: Any = PretendEngine()
    asyncio.run(node.run(node.Settings(**wire.unpack(sys.stdin.buffer.read())), pretended))
