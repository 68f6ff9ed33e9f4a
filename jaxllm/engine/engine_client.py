"""`EngineClient`: the interface through which servers use an engine, a fleet of engines, or several of another kind.

`AsyncLLM` and `FleetLLM` implement it, and `SteppedEngine` is its counterpart for callers without an event loop.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from jaxllm.config import EngineConfig
from jaxllm.engine.features.table import ClientCalls, SteppedClientCalls
from jaxllm.engine.kv_events import BlockBatch
from jaxllm.engine.life_cycle import EngineState
from jaxllm.engine.model_info import ModelInfo
from jaxllm.engine.prompts import Prompt
from jaxllm.metrics import DeviceReport, Load, Metrics, Observer
from jaxllm.outputs import FinishReason, RequestOutput
from jaxllm.request_params import RequestParams
from jaxllm.runner.profiling import DEFAULT_STEPS, Profile

Result = TypeVar("Result")
PauseMode = Literal["abort", "wait", "keep"]


class EngineView(Protocol):
    """One engine, as metrics and status pages read it; nothing here waits."""

    @property
    def config(self) -> EngineConfig:
        """Its settings."""
        ...

    @property
    def metrics(self) -> Metrics:
        """Its counters."""
        ...

    @property
    def model(self) -> ModelInfo:
        """The model's tokenizer, limits and defaults; UnavailableError while it is being loaded."""
        ...

    @property
    def state(self) -> EngineState:
        """The state of its life cycle."""
        ...

    def get_load(self) -> Load:
        """Return how busy it is."""
        ...

    def device_report(self) -> DeviceReport | None:
        """Return the compiled programs and the devices' memory; None where they are unknown."""
        ...


class EngineClient(EngineView, ClientCalls, Protocol):
    """An engine, or several with one interface. All methods belong to the event loop that called `start`.

    The calls of features are in features/table.py.
    """

    max_queued_requests: int | None
    max_queued_tokens: int | None

    @property
    def drains_replicas(self) -> bool:
        """Whether `drain_replica` does anything."""
        ...

    @property
    def engines(self) -> Sequence[EngineView]:
        """The engines by their numbers; a single engine has itself."""
        ...

    @property
    def is_paused(self) -> bool:
        """Whether `pause` holds it."""
        ...

    @property
    def num_live(self) -> int:
        """The number of requests that have not ended."""
        ...

    async def start(self) -> None:
        """Load the model; a problem with it is raised here."""

    async def close(self, timeout: float = 30.0) -> bool:
        """Stop; requests that still run fail. Return whether everything has ended within `timeout` seconds."""
        ...

    async def wait_dead(self) -> BaseException:
        """Wait until the engine dies, and return the cause."""
        ...

    def add_observer(self, observer: Observer, number: int = 0) -> None:
        """Call an observer with each step and each end of a request of one of `engines`."""

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
        """Stream a request's outputs; to close the iterator aborts the request."""
        ...

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End the requests of these ids."""

    async def check_health(self) -> None:
        """Raise EngineDeadError or UnavailableError unless requests are accepted."""

    def check_room(self) -> None:
        """Raise OverloadedError or UnavailableError if no request would be accepted."""

    def check_queue(self, num_sequences: int, num_tokens: int, num_prompts: int = 1) -> None:
        """Raise OverloadedError if the queue would be longer than its bounds."""

    def preparing(self, num_sequences: int) -> AbstractContextManager[None]:
        """Count a request into the queue while its prompt is made."""
        ...

    async def off_loop(
        self,
        function: Callable[..., Result],
        *arguments: Any,
        client: str | None = None,
        language: bytes | None = None,
    ) -> Result:
        """Run something slow in a thread; clients take turns.

        `language` is the `confined` of the tokenizer that works there; b"" is to read an adapter.
        """
        ...

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prompts; False where requests run."""
        ...

    async def start_profile(self, folder: str, num_steps: int) -> None:
        """Begin a trace of the next `num_steps` steps."""

    def kv_events(self, start_sequence: int = 0) -> AsyncGenerator[BlockBatch]:
        """Stream the blocks that enter and leave the prefix cache."""
        ...

    async def pause(self, mode: PauseMode = "abort", clear_cache: bool | None = None) -> None:
        """Take no more work and stop computing, until `resume`."""

    async def resume(self) -> None:
        """Go on after `pause`."""

    def announce_drain(self) -> None:
        """Report "not ready" but accept requests until `drain`."""

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait for the running ones; return whether all have finished."""
        ...

    async def drain_replica(self, number: int) -> None:
        """Restart one of `engines` when it has no more work; FeatureDisabledError without `drains_replicas`."""


class SteppedEngine(SteppedClientCalls, Protocol):
    """An engine, or a fleet of them, that one thread adds to, steps and aborts; see `LLMEngine`."""

    config: EngineConfig

    @property
    def metrics(self) -> Metrics:
        """Its counters."""
        ...

    @property
    def model(self) -> ModelInfo:
        """The model's tokenizer, limits and defaults."""
        ...

    def load(self) -> Load:
        """Return how busy it is."""
        ...

    def accept(
        self, request_id: str, prompt: Prompt, params: RequestParams | None = None, priority: int = 0, **options: Any
    ) -> Any:
        """Check a request and return it for `add`; nothing is queued. `options` are those of features."""
        ...

    def add_request(
        self, request_id: str, prompt: Prompt, params: RequestParams | None = None, priority: int = 0, **options: Any
    ) -> None:
        """Queue a request; a problem with it is a UserError. `options` are those of features."""

    def add(self, requests: Sequence[Any]) -> None:
        """Queue requests that `accept` returned."""

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        ...

    def step(self) -> list[RequestOutput]:
        """Wait for outputs and return them."""
        ...

    def abort_request(self, request_ids: str, reason: FinishReason = "abort") -> RequestOutput | None:
        """Drop a request; return its last output, if any."""
        ...

    def start_profile(self, folder: str | Path, num_steps: int = DEFAULT_STEPS) -> Profile:
        """Begin a trace of the next `num_steps` steps."""
        ...

    def program_texts(self, names: Collection[str]) -> dict[str, str]:
        """Return the HLO texts of programs, as a trace names them."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prompts; False where requests run."""
        ...

    def close(self) -> None:
        """Free the devices' memory."""
