"""`StreamingEngine`: readers of outputs and bounds of the queue, for `AsyncLLM` and `FleetLLM`."""

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
from jaxllm.engine.fair_threads import FairThreads
from jaxllm.engine.language_threads import LanguageThreads
from jaxllm.engine.life_cycle import NOT_STARTED, EngineState, LifeCycle, PauseMode
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
LEAST_SECONDS = 1e-9  # gRPC's durations have nanoseconds
MAX_SECONDS = 10**9  # 30 years, the limit of timers
_MOST_THREADS = 4  # more would wait for Python's lock
# Default bounds, the larger of two: 90 MB with 4,000 prompts of 256 tokens.
LEAST_QUEUED = 4096
QUEUED_PER_SLOT = 4
LEAST_QUEUED_TOKENS = 2**20  # or 16 contexts


class Queue(Protocol):
    """The queue of accepted requests."""

    def add(self, accepted: Any, /) -> None:
        """Queue a request."""

    def abort(self, internal_id: str, reason: FinishReason) -> None:
        """End a request."""

    def set_paused(self, is_paused: bool) -> None:
        """Pause or resume the computation."""

    def stop(self) -> None:
        """Refuse further requests."""


class StreamingEngine:
    """The part of an `EngineClient` without the computation."""

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
        self._num_preparing = 0  # sequences
        self._life = LifeCycle()
        self._num_resumed = 0
        self._tokenizing: FairThreads | None = None
        self._of_adapters: LanguageThreads | None = None

    @property
    def model(self) -> ModelInfo:
        raise UnavailableError(NOT_STARTED)

    @property
    def state(self) -> EngineState:
        return self._life.state(self._is_hung)

    @property
    def _is_hung(self) -> bool:
        return False

    def get_load(self) -> Load:
        return Load()

    async def reset_prefix_cache(self) -> bool:
        return False

    async def _begin(self) -> None:
        """Start loading the model; set `_started` when it is loaded."""

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
        """Check a request; return a dataclass with prompt_token_ids, num_sequences and params for `_queue`."""
        raise UnavailableError(NOT_STARTED)

    def _needs(self, accepted: Any) -> asyncio.Future[Any] | None:
        """Begin the work that precedes queuing; the result is None or a request to queue instead."""

    async def start(self) -> None:
        """Load the model and wait for it; raise an error if it cannot be loaded."""
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
        except BaseException:  # `close` is not called then
            self._life.on("stop")
            self._queue.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, timeout: float = 30.0) -> bool:
        """Stop the engine and fail unfinished requests; return whether it ended within `timeout` seconds."""
        self._life.on("stop")
        self._streams.fail_all(EngineDeadError("The engine was closed."))
        self._queue.stop()
        for threads in (self._tokenizing, self._of_adapters):
            if threads is not None:
                threads.shutdown()
        return True

    @property
    def is_paused(self) -> bool:
        return self._life.work == "paused"

    @property
    def num_live(self) -> int:
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
        """Stream a request's outputs; closing the iterator aborts the request.

        Unread outputs are merged. After `time_limit` seconds the request ends with its output so far; after `timeout`
        it fails with DeadlineError. The first iteration raises UserError for an invalid request, OverloadedError if the
        queue is full, UnavailableError or EngineDeadError.

        Running requests of an `owner` have unique ids; preparation serves `client`s in turn. `arrival` is on the
        monotonic clock, by default now; `name` is for logs and recordings. `options` are those of features, for example
        `lora_request`.
        """
        arrival = self._clock() if arrival is None else arrival
        for limit, seconds in (("time_limit", time_limit), ("timeout", timeout)):
            is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            if seconds is not None and not (is_number and LEAST_SECONDS <= seconds <= MAX_SECONDS):
                raise UserError(f"{limit} must be a number of seconds above 0, at most {MAX_SECONDS}.", limit)
        self._check_serving()
        request_id = uuid.uuid4().hex if request_id is None else request_id
        if self._streams.has(request_id, owner):
            raise RequestIdInUseError(f"request id {request_id!r} is in use; choose another.", "request_id")
        given = {option: value for option, value in options.items() if value is not None}
        with self.preparing(1):
            accepted: Any = await self._accept(
                request_id, prompt, sampling_params, priority, given, client=client, timeout=timeout
            )
        if self._streams.has(request_id, owner):
            raise RequestIdInUseError(f"request id {request_id!r} is in use; choose another.", "request_id")
        self._check_serving()
        num_sequences = accepted.num_sequences
        self.check_queue(num_sequences, num_sequences * len(accepted.prompt_token_ids))
        stream = self._streams.open(request_id, owner, accepted.params, arrival)
        assert self._loop is not None
        timers = []
        try:
            if timeout is not None:
                seconds = max(0.0, arrival + timeout - self._clock())
                timers.append(self._loop.call_later(seconds, stream.fail, late(timeout)))
            if time_limit is not None:
                timers.append(self._loop.call_later(time_limit, self._end, stream, "time_limit"))
            queued = replace(accepted, internal_id=stream.internal_id, name=name or request_id)
            needed = self._needs(queued)
            if needed is not None:
                queued = await self._wait_for(needed, queued, stream)
            self._queue.add(queued)
            if stream.end_reason is not None:
                self._queue.abort(stream.internal_id, stream.end_reason)
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
        """Abort requests by id, of all owners; unknown ids are ignored."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            self.end(request_id, "abort")

    def end(self, request_id: str, reason: FinishReason) -> None:
        for stream in self._streams.of_id(request_id):
            self._end(stream, reason)

    def _end(self, stream: Stream, reason: FinishReason) -> None:
        if stream.needs is None:
            self._queue.abort(stream.internal_id, reason)
        else:
            stream.end_reason = reason
            stream.needs.cancel()

    async def _wait_for(self, needed: asyncio.Future[Any], queued: Any, stream: Stream) -> Any:
        """Wait for `needed` or the request's end; return its result, else `queued`; raise the stream's error."""
        stream.needs = needed
        self._num_preparing += queued.num_sequences
        try:
            await asyncio.wait([needed])
            if stream.error is not None:
                raise stream.error
            return queued if needed.cancelled() else needed.result() or queued
        finally:
            stream.needs = None
            self._num_preparing -= queued.num_sequences
            needed.cancel()

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine died, UnavailableError if it hangs or refuses requests."""
        self._check_serving()

    def check_room(self) -> None:
        """Raise an error if `generate` would refuse every request; cheap, even in an overload."""
        self._check_serving()
        self.check_queue(1, 0)

    def check_queue(self, num_sequences: int, num_tokens: int, num_prompts: int = 1) -> None:
        """Raise OverloadedError if sequences would exceed the queue's bounds, UserError if an empty queue could not
        hold them.

        Numbers are sums over `num_prompts`.
        """
        load = self.get_load()
        most = most_queued(self.max_queued_requests, load.max_running)
        room = most + load.max_running
        if num_sequences > room:
            n = num_sequences // num_prompts
            name = "n" if num_prompts == 1 else "n times the number of prompts"
            asked = n if num_prompts == 1 else f"{n} times {num_prompts}"
            message = f"{name} must be at most {room}, the number that can run and wait on this server; got {asked}."
            raise UserError(message, "n" if n > 1 else "prompt")
        most_tokens = most_queued_tokens(self.max_queued_tokens, self.model.max_model_len)
        waiting = load.waiting + self._num_preparing
        if waiting + num_sequences > most + load.max_running - load.running:
            raise OverloadedError(f"The queue is full: {waiting} requests wait; retry later.", retry_after=1.0)
        if load.waiting_tokens and load.waiting_tokens + num_tokens > most_tokens:
            raise OverloadedError(
                f"The queue is full: {load.waiting_tokens} tokens of prompts wait; retry later.", retry_after=1.0
            )

    @contextmanager
    def preparing(self, num_sequences: int) -> Iterator[None]:
        """Count a request as queued while its prompt is prepared; raise OverloadedError if the queue is full."""
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
        """Run a slow function, for example tokenization, in a thread.

        Clients take turns. `language` is the `confined` of the function's tokenizer, or b"" to read an adapter.
        """
        if language is not None:
            if self._of_adapters is None:
                self._of_adapters = LanguageThreads()
            return await self._of_adapters.run(language, client, function, *arguments)
        if self._tokenizing is None:
            self._tokenizing = FairThreads(min(_MOST_THREADS, max(2, os.cpu_count() or 1)), "jaxllm-tokenize")
        return await self._tokenizing.run(client, function, *arguments)

    async def pause(self, mode: PauseMode = "abort", clear_cache: bool | None = None) -> None:
        """Refuse requests and stop computing until `resume`.

        Running requests are aborted, awaited ("wait") or suspended ("keep"). The cache is cleared by default unless
        these need it.
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
                return  # `resume` or `drain` was called
        self._queue.set_paused(True)
        if mode != "keep" and clear_cache is not False:
            await self.reset_prefix_cache()

    async def resume(self) -> None:
        await self._continue()

    async def _continue(self) -> None:
        self._life.on("resume")
        self._num_resumed += 1
        self._queue.set_paused(False)

    def announce_drain(self) -> None:
        """Report "not ready" but accept requests until `drain`."""
        self._life.on("announce_drain")

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait for running ones; return whether all finished.

        Requests that exceed `timeout` fail with DrainingError. A drained engine cannot serve again.
        """
        self._life.on("drain")
        await self._continue()
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
        """Wait until the engine dies, and return the cause; raise UnavailableError if it was never started."""
        if self._death is None:
            raise UnavailableError(NOT_STARTED)
        return await asyncio.shield(self._death)

    def _unavailable(self) -> Exception | None:
        return self._life.unavailable(self._is_hung, self._started is not None)

    def _check_serving(self) -> None:
        error = self._unavailable()
        if error is not None:
            raise error

    def _close(self, stream: Stream) -> None:
        """Remove a stream and abort its request if unfinished. Must not wait: runs while a task is cancelled."""
        try:
            if not stream.is_finished:
                self._queue.abort(stream.internal_id, "abort")
        finally:
            self._streams.close(stream)

    def _died(self, error: BaseException) -> None:
        self._life.on("die")
        assert self._started is not None and self._death is not None
        if not self._started.done():
            self._started.set_exception(error)
            self._started.exception()  # else asyncio logs it if `start` was cancelled
        set_result(self._death, error)
        self._streams.fail_all(EngineDeadError("The engine has died; this request is lost."))


def most_queued(bound: int | None, num_slots: int) -> int:
    return max(LEAST_QUEUED, QUEUED_PER_SLOT * num_slots) if bound is None else bound


def most_queued_tokens(bound: int | None, max_model_len: int) -> int:
    return max(LEAST_QUEUED_TOKENS, 16 * max_model_len) if bound is None else bound


def set_result(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)
