"""`AsyncLLM`: one engine in a thread of its own, and async iterators of outputs for any number of readers.

Owns the readers and the bounds of the queue. Its states are in life_cycle.py, its thread in engine_thread.py; what a
request becomes is decided behind `LLMEngine`; protocols are in jaxllm_server. All methods belong to the event loop that
called `start`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal, TypeVar

from jaxllm.config import EngineConfig, config_of
from jaxllm.engine.adapter_threads import AdapterThreads
from jaxllm.engine.engine_thread import EngineThread, Listeners
from jaxllm.engine.fair_threads import FairThreads
from jaxllm.engine.inbox import Inbox
from jaxllm.engine.input_processor import Accepted, Params, Prompt
from jaxllm.engine.kv_events import BlockBatch, BlockLog
from jaxllm.engine.life_cycle import NOT_STARTED, EngineState, LifeCycle
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.engine.loader import Parts
from jaxllm.engine.model_info import ModelInfo
from jaxllm.engine.output_streams import Stream, StreamTable
from jaxllm.errors import (
    DrainingError,
    EngineDeadError,
    FeatureDisabledError,
    OverloadedError,
    RequestFailedError,
    RequestIdInUseError,
    UnavailableError,
    UserError,
    late,
)
from jaxllm.lora_request import LoRARequest
from jaxllm.metrics import DeviceReport, Load, Metrics, Observer, StepReport
from jaxllm.outputs import FinishReason, PoolingRequestOutput, RequestOutput, pooled_output
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.recorded import Recorder

_log = logging.getLogger(__name__)
Result = TypeVar("Result")
PauseMode = Literal["abort", "wait", "keep"]
LEAST_SECONDS = 1e-9  # of a request: gRPC's durations count nanoseconds
MAX_SECONDS = 10**9  # of a request: 30 years, which timers can hold
_MOST_THREADS = 4  # for slow work beside the event loop, one for each core: more would wait for Python's lock
LONG_TEXT = 4096  # characters from which on a prompt is tokenized off the event loop: about a millisecond
# What may wait by default: 90 MB (measured with 4,000 prompts of 256 tokens).
LEAST_QUEUED = 4096  # sequences: this, or …
QUEUED_PER_SLOT = 4  # … so many for each that runs, where that is more
LEAST_QUEUED_TOKENS = 2**20  # tokens of their prompts: this, or 16 contexts where that is more


class AsyncLLM:
    """A model that many readers can stream from at once. Without a name it is the small one that ships with jaxllm.

    Keyword arguments are the fields of `EngineConfig`, and the bounds of the queue.

        async with AsyncLLM("path/or/hub-id") as engine:
            async for output in engine.generate("Once upon a time", SamplingParams(output_kind=1)):
                print(output.outputs[0].text, end="")
    """

    def __init__(
        self,
        model: str | EngineConfig | None = None,
        *,
        progress: bool = False,
        max_queued_requests: int | None = None,  # sequences waiting for a slot; None: see `most_queued`
        max_queued_tokens: int | None = None,  # of their prompts; None: see `most_queued_tokens`
        hang_timeout: float = 8.0,  # seconds that a step may take before the engine counts as hung
        observer: Observer | None = None,
        recorder: Recorder | None = None,
        adapters: Sequence[LoRARequest] = (),  # read before the engine is ready; what is wrong with one ends the start
        parts: Parts | None = None,  # what the engine is made of, its clock too; None: loaded from the model
        thread_type: type[EngineThread] = EngineThread,
        **engine_args: Any,
    ) -> None:
        self.config = config_of(model, engine_args)
        self.observer = observer
        self._recorder = recorder
        self.metrics = Metrics()
        self.max_queued_requests = max_queued_requests
        self.max_queued_tokens = max_queued_tokens
        self.hang_timeout = hang_timeout
        self._progress = progress
        self._parts = parts
        self._adapters = tuple(adapters)
        self._clock = time.monotonic if parts is None else parts.clock
        self._engine: LLMEngine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: EngineThread | None = None
        self._thread_type = thread_type
        self._inbox = Inbox()
        self._blocks = BlockLog(lambda number: self.engine.adapters.name_of(number))
        self._streams = StreamTable()
        self._started: asyncio.Future[None] | None = None
        self._death: asyncio.Future[BaseException] | None = None
        self._num_preparing = 0  # sequences whose prompts are being made
        self._life = LifeCycle()
        self._num_resumed = 0  # calls of `resume`
        self._tokenizing: FairThreads | None = None
        self._of_adapters: AdapterThreads | None = None

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig, **bounds: Any) -> AsyncLLM:
        """Make one of `AsyncEngineArgs`; it is to be started like any other."""
        return cls(engine_args, **bounds)

    async def start(self) -> None:
        """Load the model in the engine's thread and wait for it; a problem with it is raised here."""
        if self._started is None:
            self._loop = asyncio.get_running_loop()
            self._started = self._loop.create_future()
            self._death = self._loop.create_future()
            listeners = Listeners(
                ready=self._ready,
                deliver=self._deliver,
                refused=self._refused,
                block_events=self._blocks.append,
                died=self._died,
            )
            self._thread = self._thread_type(
                config=self.config,
                progress=self._progress,
                metrics=self.metrics,
                recorder=self._recorder,
                inbox=self._inbox,
                loop=self._loop,
                listeners=listeners,
                parts=self._parts,
                adapters=self._adapters,
            )
            self._thread.start()
        await asyncio.shield(self._started)

    async def __aenter__(self) -> AsyncLLM:
        try:
            await self.start()
        except BaseException:  # cancelled, perhaps: `close` will not be called
            self._life.on("stop")
            self._inbox.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def engine(self) -> LLMEngine:
        """The engine, for what never changes in it; everything else belongs to its thread."""
        if self._engine is None:
            raise self._unavailable() or UnavailableError("The model is still being loaded.")
        return self._engine

    @property
    def model(self) -> ModelInfo:
        """The model's tokenizer, limits and defaults; UnavailableError while it is being loaded."""
        return self.engine.model

    @property
    def state(self) -> EngineState:
        """What the engine is doing; never waits for it."""
        return self._life.state(self._is_hung)

    @property
    def _is_hung(self) -> bool:
        since = self._thread.step_since if self._thread is not None else None
        return since is not None and self._clock() - since > self.hang_timeout

    @property
    def is_paused(self) -> bool:
        """Whether `pause` holds the engine."""
        return self._life.work == "paused"

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        request_id: str | None = None,
        *,
        owner: str = "",
        client: str | None = None,
        priority: int = 0,
        time_limit: float | None = None,
        timeout: float | None = None,
        arrival: float | None = None,
        name: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Stream a request's outputs, of the kind that its parameters name. To close the iterator aborts the request.

        Outputs that a slow reader has not taken are merged into one. After `time_limit` seconds the request ends with
        what it has; after `timeout` it fails with DeadlineError. A problem with the request is raised by the first
        step of the iterator: UserError, OverloadedError if the queue is full, UnavailableError, EngineDeadError.
        Among the running requests of an `owner` an id must be unique. What is slow to prepare is shared out among
        `client`s, by their names.
        `arrival`, of the monotonic clock, is when the request came, if that was before this call;
        `name` is its name in logs and recordings, if that is more than its id. `lora_request` names its adapter.
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
        with self.preparing(1):
            accepted = await self._accept(
                request_id, prompt, sampling_params, priority, lora_request, client=client, timeout=timeout
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
            self._inbox.add(replace(accepted, internal_id=stream.internal_id, name=name or request_id))
            if timeout is not None:
                seconds = max(0.0, arrival + timeout - self._clock())
                timers.append(self._loop.call_later(seconds, stream.fail, late(timeout)))
            if time_limit is not None:
                timers.append(self._loop.call_later(time_limit, self._inbox.abort, stream.internal_id, "time_limit"))
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            for timer in timers:
                timer.cancel()
            self._close(stream)

    async def encode(
        self, prompt: Prompt, pooling_params: PoolingParams | None = None, request_id: str | None = None, **options: Any
    ) -> AsyncGenerator[PoolingRequestOutput]:
        """Yield the one output of a prompt that is embedded, classified or scored; options as of `generate`."""
        outputs = self.generate(prompt, pooling_params or PoolingParams(), request_id, **options)
        async with aclosing(outputs):
            async for output in outputs:
                yield pooled_output(output)

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End the requests of these ids, of all owners; unknown ids change nothing.

        Their readers get what there is, with the finish reason "abort".
        """
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            self.end(request_id, "abort")

    def end(self, request_id: str, reason: FinishReason) -> None:
        """End the requests of an id, of all owners, for a reason that their last outputs give."""
        for stream in self._streams.of_id(request_id):
            self._inbox.abort(stream.internal_id, reason)

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine has died, UnavailableError if it makes no progress or takes no work."""
        self._check_serving()

    def check_room(self) -> None:
        """Refuse now what `generate` would refuse whatever the request is; called before a request's body is read.

        To refuse a call must cost little, or an overload leaves no time for the calls that are accepted.
        """
        self._check_serving()
        self.check_queue(1, 0)

    def check_queue(self, num_sequences: int, num_tokens: int, num_prompts: int = 1) -> None:
        """Refuse what would make the queue longer than its bounds, without asking the engine.

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
        """Count a request into the queue while its prompt is made; OverloadedError if there is no room for it."""
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
        """Run something slow, as tokenizing a long text, in a thread beside the event loop.

        Clients take turns by their names, `client`; one client never has all threads. `language` is the `confined` of
        the tokenizer that works there; b"" is to read an adapter.
        """
        if language is not None:
            if self._of_adapters is None:
                self._of_adapters = AdapterThreads()
            return await self._of_adapters.run(language, client, function, *arguments)
        if self._tokenizing is None:
            self._tokenizing = FairThreads(min(_MOST_THREADS, max(2, os.cpu_count() or 1)), "jaxllm-tokenize")
        return await self._tokenizing.run(client, function, *arguments)

    def get_load(self) -> Load:
        """Say how busy the engine was after its last step, and what has come since."""
        load = self._thread.load if self._thread is not None else Load()
        num_new, num_tokens = self._inbox.counts()
        speed = load.generated_tokens_per_second if load.running else 0.0
        return load._replace(
            waiting=load.waiting + num_new,
            waiting_tokens=load.waiting_tokens + num_tokens,
            generated_tokens_per_second=speed,
        )

    def device_report(self) -> DeviceReport | None:
        """Say what is compiled and how much memory the devices use; None while the model is being loaded."""
        return None if self._engine is None else self._engine.runner.report()

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prompts; False while requests run, because they hold some of the blocks."""
        return await self._call(lambda engine: engine.reset_prefix_cache())

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter ahead of the requests that name it; what is wrong with it is a UserError."""
        return await self.off_loop(self.engine.add_lora, lora_request, language=b"")

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; whether it was known. Requests that have it end with it."""
        return self.engine.remove_lora(lora_id)

    async def list_loras(self) -> set[int]:
        """Return the `lora_int_id` of adapters that were read and not removed."""
        return self.engine.list_loras()

    async def start_profile(self, folder: str, num_steps: int) -> None:
        """Begin a trace of the next `num_steps` steps. Its path is logged; streams wait while it is written."""
        await self._call(lambda engine: engine.start_profile(folder, num_steps))

    async def kv_events(self, start_sequence: int = 0) -> AsyncGenerator[BlockBatch]:
        """Stream what enters and leaves the prefix cache, from a batch's number on.

        FeatureDisabledError without `enable_kv_cache_events`; OutOfRangeError for a batch that is no longer kept.
        """
        if not self.config.enable_kv_cache_events:
            raise FeatureDisabledError("start the engine with enable_kv_cache_events.", "enable_kv_cache_events")
        async with aclosing(self._blocks.read(start_sequence)) as batches:
            async for batch in batches:
                yield batch

    async def pause(self, mode: PauseMode = "abort", clear_cache: bool | None = None) -> None:
        """Take no more work and stop computing, until `resume`.

        What runs is aborted, or awaited ("wait"), or kept as it is ("keep"). The cache is cleared unless
        `clear_cache` is False or what runs needs it.
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
                return  # `resume` or `drain` was called meanwhile, and perhaps `pause` again
        self._inbox.set_paused(True)
        if mode != "keep" and clear_cache is not False:
            await self.reset_prefix_cache()

    async def resume(self) -> None:
        """Go on after `pause`."""
        self._life.on("resume")
        self._num_resumed += 1
        self._inbox.set_paused(False)

    def announce_drain(self) -> None:
        """Report "not ready" but accept requests until `drain`: load balancers need a moment to notice."""
        self._life.on("announce_drain")

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait for the running ones; those that need longer fail with DrainingError.

        Returns whether all have finished. There is no way back.
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
        """Wait until the engine dies, and return of what; UnavailableError if it was never started."""
        if self._death is None:
            raise UnavailableError(NOT_STARTED)
        return await asyncio.shield(self._death)

    async def close(self, timeout: float = 30.0) -> bool:
        """Stop the engine and free the device's memory; requests that still run fail.

        Returns whether the engine's thread has ended within `timeout` seconds: a step that hangs is not waited for.
        """
        self._life.on("stop")
        closed = EngineDeadError("The engine was closed.")
        self._streams.fail_all(closed)
        self._blocks.end(closed)
        self._inbox.stop()
        for threads in (self._tokenizing, self._of_adapters):
            if threads is not None:
                threads.shutdown()
        if self._thread is None:
            return True
        has_ended = await asyncio.to_thread(self._thread.join, timeout)
        assert self._death is not None
        _set_result(self._death, closed)
        return has_ended

    # On the event loop.

    def _unavailable(self) -> Exception | None:
        """Return why new requests are refused now; None if they are accepted."""
        return self._life.unavailable(self._is_hung, self._started is not None)

    def _check_serving(self) -> None:
        error = self._unavailable()
        if error is not None:
            raise error

    async def _accept(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params | None,
        priority: int,
        lora_request: LoRARequest | None,
        *,
        client: str | None,
        timeout: float | None,
    ) -> Accepted:
        """Check a request; off the event loop a long text is tokenized, a grammar compiled, and an adapter read."""
        text = prompt.get("prompt") if isinstance(prompt, Mapping) and "prompt_token_ids" not in prompt else prompt
        is_slow = isinstance(text, str) and len(text) > LONG_TEXT
        is_slow |= isinstance(params, SamplingParams) and params.structured_outputs is not None
        language = None
        if lora_request is not None:
            adapter = self.engine.adapters.find(lora_request)
            language = b"" if adapter is None else adapter.language.model.tokenizer.confined
            is_slow |= language is not None
        given = request_id, prompt, params, priority, lora_request
        if not is_slow:
            return self.engine.accept(*given)
        try:
            async with asyncio.timeout(timeout):
                return await self.off_loop(self.engine.accept, *given, client=client, language=language)
        except TimeoutError as error:
            assert timeout is not None
            raise late(timeout) from error

    def _close(self, stream: Stream) -> None:
        """Forget a stream; a request that has not ended is aborted. Never waits: it runs while a task is cancelled."""
        try:
            if not stream.is_finished:
                self._inbox.abort(stream.internal_id, "abort")
        finally:
            self._streams.close(stream)

    async def _call(self, function: Callable[[LLMEngine], Result]) -> Result:
        """Run a function on the engine's thread between two steps."""
        if not self._life.is_responsive(self._is_hung):
            raise self._unavailable() or EngineDeadError("The engine has stopped.")
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        thread = self._thread
        assert thread is not None

        def run(engine: LLMEngine) -> None:
            try:
                result = function(engine)
            except Exception as error:
                thread.call_back(_set_exception, answer, error)
            else:
                thread.call_back(_set_result, answer, result)

        assert self._death is not None
        self._inbox.call(run)
        await asyncio.wait([answer, self._death], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise EngineDeadError("The engine has stopped.")
        return answer.result()

    def _ready(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._life.on("ready")
        assert self._started is not None
        _set_result(self._started, None)

    def _deliver(self, outputs: list[RequestOutput], report: StepReport | None) -> None:
        """Hand a step's outputs to their readers, and the numbers to the observer."""
        now = self._clock()
        delivered = []
        for output in outputs:
            try:
                stream = self._streams.of_internal_id(output.internal_id)
                if stream is None:
                    continue  # its reader has gone
                delivered.append((stream, stream.put(output, now), output if output.finished else None))
                if output.finished:
                    self._streams.note_over(stream)
            except Exception:  # on behalf of one request: the others of the step are unaffected
                _log.exception("an output could not be handed over")
                self._refused(output.internal_id, "An output of the request was lost; others go on.")
        if self.observer is None:
            return
        try:
            if report is not None:
                self.observer.step(report)
            for stream, taken, last in delivered:
                for seconds, count, is_first in taken:
                    self.observer.tokens(seconds, count, is_first)
                if last is not None:
                    self.observer.finished(stream.summary(last), stream.params)
        except Exception:  # statistics must not fail a request
            _log.exception("the observer failed")

    def _refused(self, internal_id: str, why: str = "The engine could not take the request in; others go on.") -> None:
        """Fail a request that the engine could not take in, or whose output could not be handed over."""
        stream = self._streams.of_internal_id(internal_id)
        if stream is not None:
            self._streams.fail(stream, RequestFailedError(why))

    def _died(self, error: BaseException) -> None:
        """Fail all that wait for the engine, which has died."""
        self._life.on("die")
        assert self._started is not None and self._death is not None
        if not self._started.done():
            self._started.set_exception(error)
            self._started.exception()  # else asyncio logs an error if `start` was cancelled
        _set_result(self._death, error)
        lost = EngineDeadError("The engine has died; this request is lost.")
        self._streams.fail_all(lost)
        self._blocks.end(lost)


def most_queued(bound: int | None, num_slots: int) -> int:
    """Return how many sequences may wait for a slot: the bound that was given, or the default."""
    return max(LEAST_QUEUED, QUEUED_PER_SLOT * num_slots) if bound is None else bound


def most_queued_tokens(bound: int | None, max_model_len: int) -> int:
    """Return how many tokens the prompts that wait may have: the bound that was given, or the default."""
    return max(LEAST_QUEUED_TOKENS, 16 * max_model_len) if bound is None else bound


def _set_result(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


AsyncLLMEngine = AsyncLLM  # its name in vLLM
