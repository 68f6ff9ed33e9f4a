"""`EngineClient`: the interface of `AsyncLLM` and `FleetLLM` to servers; `SteppedEngine`: one without an event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from jaxllm.config import EngineConfig
from jaxllm.engine.features.table import ClientCalls, SteppedClientCalls
from jaxllm.engine.kv_events import BlockBatch
from jaxllm.engine.life_cycle import EngineState, PauseMode
from jaxllm.engine.model_info import ModelInfo
from jaxllm.engine.prompts import Prompt
from jaxllm.metrics import DeviceReport, Load, Metrics, Observer
from jaxllm.outputs import FinishReason, RequestOutput
from jaxllm.request_params import RequestParams
from jaxllm.runner.profiling import DEFAULT_STEPS, Profile

Result = TypeVar("Result")


class EngineView(Protocol):
    """One engine, for metrics and status pages."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def metrics(self) -> Metrics: ...

    @property
    def model(self) -> ModelInfo: ...

    @property
    def state(self) -> EngineState: ...

    def get_load(self) -> Load: ...

    def device_report(self) -> DeviceReport | None: ...


class EngineClient(EngineView, ClientCalls, Protocol):
    """An engine or a fleet; all methods belong to the event loop that called `start`."""

    max_queued_requests: int | None
    max_queued_tokens: int | None

    @property
    def drains_replicas(self) -> bool: ...

    @property
    def engines(self) -> Sequence[EngineView]:
        """The engines by number; a single engine returns itself."""
        ...

    @property
    def is_paused(self) -> bool: ...

    @property
    def num_live(self) -> int: ...

    async def start(self) -> None:
        """Load the model."""

    async def close(self, timeout: float = 30.0) -> bool:
        """Stop; return whether all threads or processes ended within `timeout` seconds."""
        ...

    async def wait_dead(self) -> BaseException: ...

    def add_observer(self, observer: Observer, number: int = 0) -> None:
        """Call an observer after each step and finished request."""

    def generate(
        self,
        prompt: Prompt,
        sampling_params: RequestParams | None = None,
        request_id: str | None = None,
        *,
        owner: str = "",
        client: str | None = None,
        priority: int = 0,
        time_limit: float | None = None,
        timeout: float | None = None,
        arrival: float | None = None,
        name: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput]:
        """See `StreamingEngine.generate`."""
        ...

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """Abort requests."""

    async def check_health(self) -> None:
        """Raise EngineDeadError or UnavailableError unless requests are accepted."""

    def check_room(self) -> None:
        """Raise OverloadedError or UnavailableError if it would refuse every request."""

    def check_queue(self, num_sequences: int, num_tokens: int, num_prompts: int = 1) -> None:
        """Raise OverloadedError if the queue would exceed its bounds."""

    def preparing(self, num_sequences: int) -> AbstractContextManager[None]: ...

    async def off_loop(
        self,
        function: Callable[..., Result],
        *arguments: Any,
        client: str | None = None,
        language: bytes | None = None,
    ) -> Result: ...

    async def reset_prefix_cache(self) -> bool: ...

    async def start_profile(self, folder: str, num_steps: int) -> None:
        """Trace the next `num_steps` steps."""

    def kv_events(self, start_sequence: int = 0) -> AsyncGenerator[BlockBatch]: ...

    async def pause(self, mode: PauseMode = "abort", clear_cache: bool | None = None) -> None:
        """Refuse requests and stop computing until `resume`."""

    async def resume(self) -> None:
        """Continue after `pause`."""

    def announce_drain(self) -> None:
        """Report "not ready" but accept requests until `drain`."""

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait for others; return whether all finished."""
        ...

    async def drain_replica(self, number: int) -> None:
        """Restart one of `engines` when it is idle."""


class SteppedEngine(SteppedClientCalls, Protocol):
    """An engine or a fleet that one thread steps; see `LLMEngine`."""

    config: EngineConfig

    @property
    def metrics(self) -> Metrics: ...

    @property
    def model(self) -> ModelInfo: ...

    def load(self) -> Load: ...

    def accept(
        self, request_id: str, prompt: Prompt, params: RequestParams | None = None, priority: int = 0, **options: Any
    ) -> Any:
        """Validate a request for `add`."""
        ...

    def add_request(
        self, request_id: str, prompt: Prompt, params: RequestParams | None = None, priority: int = 0, **options: Any
    ) -> None:
        """Queue a request."""

    def add(self, requests: Sequence[Any]) -> None:
        """Queue requests from `accept`."""

    def has_unfinished_requests(self) -> bool: ...

    def step(self) -> list[RequestOutput]: ...

    def abort_request(self, request_ids: str, reason: FinishReason = "abort") -> RequestOutput | None: ...

    def start_profile(self, folder: str | Path, num_steps: int = DEFAULT_STEPS) -> Profile: ...

    def program_texts(self, names: Collection[str]) -> dict[str, str]: ...

    def reset_prefix_cache(self) -> bool: ...

    def close(self) -> None:
        """Free the devices' memory."""
