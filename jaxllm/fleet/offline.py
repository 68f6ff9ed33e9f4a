"""`FleetEngine`: a fleet without an event loop, for `LLM`."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Collection, Coroutine, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

from jaxllm import combinations
from jaxllm.config import EngineConfig
from jaxllm.engine.model_info import ModelInfo
from jaxllm.errors import UserError
from jaxllm.fleet.fleet_llm import FleetLLM
from jaxllm.fleet.node import NO_BOUND
from jaxllm.fleet.replica import RoutedRequest
from jaxllm.metrics import Load, Metrics
from jaxllm.outputs import CompletionOutput, FinishReason, RequestOutput
from jaxllm.runner.profiling import DEFAULT_STEPS, Profile

Result = TypeVar("Result")


class FleetEngine:
    """A fleet as a `SteppedEngine`: a step returns the next output."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="jaxllm-fleet", daemon=True)
        self._thread.start()
        self._told: queue.Queue[tuple[str, RequestOutput]] = queue.Queue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._live: set[str] = set()  # without a final output
        self._fleet = self._run(self._started())

    async def _started(self) -> FleetLLM:
        fleet = FleetLLM(self.config, max_queued_requests=NO_BOUND, max_queued_tokens=NO_BOUND)
        try:
            await fleet.start()
        except BaseException:
            await fleet.close()
            raise
        return fleet

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @property
    def model(self) -> ModelInfo:
        return self._fleet.model

    @property
    def metrics(self) -> Metrics:
        return self._fleet.metrics

    def model_of(self, lora_request: object) -> ModelInfo:
        if lora_request is not None:
            raise combinations.refusal("lora_request", combinations.FLEET)
        return self.model

    def load(self) -> Load:
        return self._fleet.get_load()

    def start_profile(self, folder: str | Path, num_steps: int = DEFAULT_STEPS) -> Profile:
        """Raise UserError: a trace covers one engine."""
        raise UserError("profile one engine: set data_parallel_size to 1.", "data_parallel_size")

    def program_texts(self, names: Collection[str]) -> dict[str, str]:
        return {}

    def add_request(self, request_id: str, prompt: Any, params: Any = None, priority: int = 0, **options: Any) -> None:
        self.add([self.accept(request_id, prompt, params, priority, **options)])

    def accept(
        self, request_id: str, prompt: Any, params: Any = None, priority: int = 0, **options: Any
    ) -> RoutedRequest:
        given = {name: value for name, value in options.items() if value is not None}
        return self._run(self._fleet.check_request(request_id, prompt, params, priority, given))

    def add(self, requests: Sequence[RoutedRequest]) -> None:
        async def add() -> None:
            for request in requests:
                task = self._tasks[request.request_id] = asyncio.ensure_future(self._answer(request))
                task.add_done_callback(lambda task, name=request.request_id: self._forget(name, task))

        self._live |= {request.request_id for request in requests}
        self._run(add())

    async def _answer(self, accepted: RoutedRequest) -> None:
        request_id = accepted.request_id
        outputs = self._fleet.generate(accepted.prompt, accepted.sent, request_id, priority=accepted.priority)
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    self._told.put((request_id, output))
        except Exception as error:  # reported as by an engine: fails one request
            failed = CompletionOutput(0, "", [], finish_reason="error", stop_reason=str(error))
            ids = list(accepted.prompt_token_ids)
            self._told.put((request_id, RequestOutput(request_id, None, ids, [failed], finished=True)))

    def _forget(self, request_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(request_id) is task:
            del self._tasks[request_id]

    def has_unfinished_requests(self) -> bool:
        return bool(self._live)

    def step(self) -> list[RequestOutput]:
        while True:
            request_id, output = self._told.get()
            if request_id not in self._live:
                continue
            if output.finished:
                self._live.discard(request_id)
            return [output]

    def abort_request(self, request_ids: str, reason: FinishReason = "abort") -> RequestOutput | None:
        request_id = request_ids

        async def end() -> None:
            task = self._tasks.pop(request_id, None)
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)  # frees its id

        self._live.discard(request_id)
        self._run(end())

    def reset_prefix_cache(self) -> bool:
        return self._run(self._fleet.reset_prefix_cache())

    def close(self) -> None:
        if self._loop.is_running():
            self._run(self._fleet.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
