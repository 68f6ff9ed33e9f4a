"""`StreamingEngine`: the readers of outputs and the bounds of the queue, the same for `AsyncLLM` and `FleetLLM`.

A subclass starts whatever computes, checks requests, and hands outputs to `_streams`. All methods belong to the event
loop that called `start`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Protocol, Self, TypeVar

from jaxllm.config import EngineConfig
from jaxllm.engine.engine_client import PauseMode
from jaxllm.engine.fair_threads import FairThreads
from jaxllm.engine.language_threads import LanguageThreads
from jaxllm.engine.life_cycle import NOT_STARTED, EngineState, LifeCycle
from jaxllm.engine.model_info import ModelInfo
from jaxllm.engine.output_streams import Stream, StreamTable
from jaxllm.engine.prompts import Prompt
from jaxllm.errors import (
    DrainingError,
    EngineDeadError,
    OverloadedError,
    RequestIdInUseError,
    UnavailableError,
    UserError,
    late,
)
from jaxllm.metrics import Load, Metrics
from jaxllm.outputs import FinishReason, RequestOutput
from jaxllm.request_params import RequestParams

_log = logging.getLogger(__name__)
Result = TypeVar("Result")
LEAST_SECONDS = 1e-9  # of a request: gRPC's durations count nanoseconds
MAX_SECONDS = 10**9  # of a request: 30 years, which timers can hold
_MOST_THREADS = 4  # for slow work off the event loop, one for each core: more would wait for Python's lock
# Default bounds of the queue: 90 MB (measured with 4,000 prompts of 256 tokens).
LEAST_QUEUED = 4096  # sequences: this, or …
QUEUED_PER_SLOT = 4  # … this for each that runs, if that is more
LEAST_QUEUED_TOKENS = 2**20  # tokens of their prompts: this, or 16 contexts where that is more


class Queue(Protocol):
    """The queue of accepted requests."""

    def add(self, accepted: Any, /) -> None:
        """Queue a request."""

    def abort(self, internal_id: str, reason: FinishReason) -> None:
        """End a request."""

    def set_paused(self, is_paused: bool) -> None:
        """Pause or resume the computation."""

    def stop(self) -> None:
        """Accept no more requests."""


class StreamingEngine:
    """The part of an `EngineClient` that does not depend on how tokens are computed."""

    drains_replicas = False

    def __init__(
        self,
        config: EngineConfig,
        queue: Queue,
        clock: Callable[[], float],
        *,
        max_queued_requests: int | None,
        max_queued_tokens: int | None,
        hang_timeout: float,
    ) -> None:
        self.config = config
        self.metrics = Metrics()
        self.max_queued_requests = max_queued_requests
        self.max_queued_tokens = max_queued_tokens
        self.hang_timeout = hang_timeout
        self._queue = queue
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams = StreamTable()
        self._started: asyncio.Future[None] | None = None
        self._death: asyncio.Future[BaseException] | None = None
        self._num_preparing = 0  # sequences with prompts that are being made
        self._life = LifeCycle()
        self._num_resumed = 0  # calls of `resume`
        self._tokenizing: FairThreads | None = None
        self._of_adapters: LanguageThreads | None = None

    # For a subclass to define.

    @property
    def model(self) -> ModelInfo:
        """The model's tokenizer, limits and defaults; UnavailableError while it is being loaded."""
        raise UnavailableError(NOT_STARTED)

    @property
    def state(self) -> EngineState:
        """The state of the engine; never waits for it."""
        return self._life.state(self._is_hung)

    @property
    def _is_hung(self) -> bool:
        return False

    def get_load(self) -> Load:
        """Return how busy the engine is."""
        return Load()

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prompts; False while requests run, because they hold some of the blocks."""
        return False

    async def _begin(self) -> None:
        """Start loading the model; `_started` is set when it is loaded."""

    async def _accept(
        self,
        request_id: str,
        prompt: Prompt,
        params: RequestParams | None,
        priority: int,
        options: Mapping[str, Any],
        *,
        client: str | None,
        timeout: float | None,
    ) -> Any:
        """Check a request; return it for `_queue`: a dataclass with prompt_token_ids, num_sequences and params."""
        raise UnavailableError(NOT_STARTED)

    # Life cycle.

    async def start(self) -> None:
        """Load the model and wait for it; a problem with it is raised here."""
        if self._started is None:
            self._loop = asyncio.get_running_loop()
            self._started = self._loop.create_future()
            self._death = self._loop.create_future()
            try:
                await self._begin()
            except BaseException:  # the next call tries again
                self._started = self._death = None
                raise
        await asyncio.shield(self._started)

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:  # cancelled, perhaps: `close` will not be called
            self._life.on("stop")
            self._queue.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, timeout: float = 30.0) -> bool:
        """Stop the engine; requests that still run fail. Return whether it has ended within `timeout` seconds."""
        self._life.on("stop")
        self._streams.fail_all(EngineDeadError("The engine was closed."))
        self._queue.stop()
        for threads in (self._tokenizing, self._of_adapters):
            if threads is not None:
                threads.shutdown()
        return True

    @property
    def is_paused(self) -> bool:
        """Whether `pause` holds the engine."""
        return self._life.work == "paused"

    @property
    def num_live(self) -> int:
        """The number of requests that have not ended."""
        return len(self._streams)

    async def generate(
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
        """Stream a request's outputs, of the kind that its parameters name. To close the iterator aborts the request.

        Outputs that a slow reader has not taken are merged into one. After `time_limit` seconds the request ends with
        its output; after `timeout` it fails with DeadlineError. A problem with the request is raised by the first
        step of the iterator: UserError, OverloadedError if the queue is full, UnavailableError, EngineDeadError.
        Among the running requests of an `owner` an id must be unique. Slow preparation is shared out among
        `client`s, by their names.
        `arrival`, of the monotonic clock, is the time of the request, if that was before this call;
        `name` is its name in logs and recordings, if that is more than its id. `options` are those of features, as
        `lora_request`, the adapter.
        """
        arrival = self._clock() if arrival is None else arrival
        for limit, seconds in (("time_limit", time_limit), ("timeout", timeout)):
            is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            if seconds is not None and not (is_number and LEAST_SECONDS <= seconds <= MAX_SECONDS):
                raise UserError(f"{limit} must be a number of seconds above 0, at most {MAX_SECONDS}.", limit)
        self._check_serving()
        request_id = uuid.uuid4().hex if request_id is None else request_id
        if self._streams.has(request_id, owner):
            raise RequestIdInUseError(f"request id {request_id!r} is in use.", "request_id")
        given = {option: value for option, value in options.items() if value is not None}
        with self.preparing(1):
            accepted: Any = await self._accept(
                request_id, prompt, sampling_params, priority, given, client=client, timeout=timeout
            )
        if self._streams.has(request_id, owner):
            raise RequestIdInUseError(f"request id {request_id!r} is in use.", "request_id")
        self._check_serving()
        num_sequences = accepted.num_sequences
        self.check_queue(num_sequences, num_sequences * len(accepted.prompt_token_ids))
        stream = self._streams.open(request_id, owner, accepted.params, arrival)
        assert self._loop is not None
        timers = []
        try:
            self._queue.add(replace(accepted, internal_id=stream.internal_id, name=name or request_id))
            if timeout is not None:
                seconds = max(0.0, arrival + timeout - self._clock())
                timers.append(self._loop.call_later(seconds, stream.fail, late(timeout)))
            if time_limit is not None:
                timers.append(self._loop.call_later(time_limit, self._queue.abort, stream.internal_id, "time_limit"))
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            for timer in timers:
                timer.cancel()
            self._close(stream)

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End the requests of these ids, of all owners; unknown ids change nothing.

        Their readers get the output so far, with the finish reason "abort".
        """
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            self.end(request_id, "abort")

    def end(self, request_id: str, reason: FinishReason) -> None:
        """End the requests of an id, of all owners, for a reason that their last outputs give."""
        for stream in self._streams.of_id(request_id):
            self._queue.abort(stream.internal_id, reason)

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine has died, UnavailableError if it makes no progress or takes no work."""
        self._check_serving()

    def check_room(self) -> None:
        """Raise an error if `generate` would refuse any request now; called before a request's body is read.

        To refuse a call must cost little, or an overload leaves no time for the calls that are accepted.
        """
        self._check_serving()
        self.check_queue(1, 0)

    def check_queue(self, num_sequences: int, num_tokens: int, num_prompts: int = 1) -> None:
        """Refuse sequences that would make the queue longer than its bounds, without a call of the engine.

        `num_sequences` and `num_tokens` are those of all `num_prompts` together. More sequences than the slots and
        the queue could ever hold are a UserError: to try again would not help.
        """
        load = self.get_load()
        most = most_queued(self.max_queued_requests, load.max_running)
        room = most + load.max_running
        if num_sequences > room:
            n = num_sequences // num_prompts
            name = "n" if num_prompts == 1 else "n times the number of prompts"
            asked = n if num_prompts == 1 else f"{n} times {num_prompts}"
            message = f"{name} may be at most {room}, so many can run and wait on this server, got {asked}."
            raise UserError(message, "n" if n > 1 else "prompt")
        most_tokens = most_queued_tokens(self.max_queued_tokens, self.model.max_model_len)
        waiting = load.waiting + self._num_preparing
        if waiting + num_sequences > most + load.max_running - load.running:
            raise OverloadedError(f"The queue is full: {waiting} requests wait.", retry_after=1.0)
        if load.waiting_tokens and load.waiting_tokens + num_tokens > most_tokens:
            raise OverloadedError(f"The queue is full: {load.waiting_tokens} tokens of prompts wait.", retry_after=1.0)

    @contextmanager
    def preparing(self, num_sequences: int) -> Iterator[None]:
        """Count a request into the queue while its prompt is made; OverloadedError if the queue is full."""
        self.check_queue(num_sequences, 0)
        self._num_preparing += num_sequences
        try:
            yield
        finally:
            self._num_preparing -= num_sequences

    async def off_loop(
        self,
        function: Callable[..., Result],
        *arguments: Any,
        client: str | None = None,
        language: bytes | None = None,
    ) -> Result:
        """Run something slow, as tokenizing a long text, in a thread off the event loop.

        Clients take turns by their names, `client`; one client never has all threads. `language` is the `confined` of
        the tokenizer that works there; b"" is to read an adapter.
        """
        if language is not None:
            if self._of_adapters is None:
                self._of_adapters = LanguageThreads()
            return await self._of_adapters.run(language, client, function, *arguments)
        if self._tokenizing is None:
            self._tokenizing = FairThreads(min(_MOST_THREADS, max(2, os.cpu_count() or 1)), "jaxllm-tokenize")
        return await self._tokenizing.run(client, function, *arguments)

    async def pause(self, mode: PauseMode = "abort", clear_cache: bool | None = None) -> None:
        """Take no more work and stop computing, until `resume`.

        Running requests are aborted, or awaited ("wait"), or kept as they are ("keep"). The cache is cleared unless
        `clear_cache` is False or kept requests need it.
        """
        if mode not in ("abort", "wait", "keep"):
            raise UserError(f"mode must be abort, wait or keep, got {mode!r}.", "mode")
        if mode == "keep" and clear_cache:
            raise UserError("The requests that are kept need the cache: leave clear_cache off.", "clear_cache")
        if self.state not in ("serving", "paused"):
            self._check_serving()
        self._life.on("pause")
        resumed = self._num_resumed
        if mode == "abort":
            await self.abort(self._streams.ids())
        if mode != "keep":
            await self._streams.wait_quiet()
            if self._num_resumed > resumed:
                return  # `resume` or `drain` was called during the wait, and perhaps `pause` again
        self._queue.set_paused(True)
        if mode != "keep" and clear_cache is not False:
            await self.reset_prefix_cache()

    async def resume(self) -> None:
        """Go on after `pause`."""
        self._life.on("resume")
        self._num_resumed += 1
        self._queue.set_paused(False)

    def announce_drain(self) -> None:
        """Report "not ready" but accept requests until `drain`: load balancers need a moment to notice."""
        self._life.on("announce_drain")

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait for the running ones; those that need longer fail with DrainingError.

        Returns whether all have finished. A drained engine cannot serve again.
        """
        self._life.on("drain")
        await self.resume()
        is_through = True
        try:
            async with asyncio.timeout(timeout):
                await self._streams.wait_idle()
        except TimeoutError:
            is_through = False
            self._streams.fail_all(
                DrainingError("The server is shutting down and could not finish this request in time.")
            )
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._streams.wait_idle()
        return is_through and not self._life.has_ended

    async def wait_dead(self) -> BaseException:
        """Wait until the engine dies, and return the cause; UnavailableError if it was never started."""
        if self._death is None:
            raise UnavailableError(NOT_STARTED)
        return await asyncio.shield(self._death)

    def _unavailable(self) -> Exception | None:
        """Return why new requests are refused now; None if they are accepted."""
        return self._life.unavailable(self._is_hung, self._started is not None)

    def _check_serving(self) -> None:
        error = self._unavailable()
        if error is not None:
            raise error

    def _close(self, stream: Stream) -> None:
        """Forget a stream; a request that has not ended is aborted. Never waits: it runs while a task is cancelled."""
        try:
            if not stream.is_finished:
                self._queue.abort(stream.internal_id, "abort")
        finally:
            self._streams.close(stream)

    def _died(self, error: BaseException) -> None:
        """Fail all that wait for the engine, which has died."""
        self._life.on("die")
        assert self._started is not None and self._death is not None
        if not self._started.done():
            self._started.set_exception(error)
            self._started.exception()  # else asyncio logs an error if `start` was cancelled
        set_result(self._death, error)
        self._streams.fail_all(EngineDeadError("The engine has died; this request is lost."))


def most_queued(bound: int | None, num_slots: int) -> int:
    """Return how many sequences may wait for a slot: the bound that was given, or the default."""
    return max(LEAST_QUEUED, QUEUED_PER_SLOT * num_slots) if bound is None else bound


def most_queued_tokens(bound: int | None, max_model_len: int) -> int:
    """Return how many tokens the prompts that wait may have: the bound that was given, or the default."""
    return max(LEAST_QUEUED_TOKENS, 16 * max_model_len) if bound is None else bound


def set_result(future: asyncio.Future[Any], result: Any) -> None:
    """Set a future's result unless it has one."""
    if not future.done():
        future.set_result(result)
