"""`AsyncLLM`: one engine in a thread of its own, and async iterators of outputs for any number of readers.

Owns what the engine is doing (loading, serving, paused, draining …), the readers and the bounds of the queue. The
thread is in engine_thread.py; everything about a request is decided behind `LLMEngine`; protocols are in front of this
(jaxllm_server). All methods belong to the event loop that called `start`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal, TypeVar

from jaxllm.config import EngineConfig, config_of
from jaxllm.engine.engine_thread import EngineThread, Listeners
from jaxllm.engine.fair_threads import FairThreads
from jaxllm.engine.inbox import Inbox
from jaxllm.engine.input_processor import Prompt
from jaxllm.engine.kv_events import BlockBatch, BlockLog
from jaxllm.engine.llm_engine import Accepted, LLMEngine
from jaxllm.engine.loader import Parts
from jaxllm.engine.output_streams import Stream, StreamTable
from jaxllm.errors import (
    DrainingError,
    EngineDeadError,
    EngineError,
    FeatureDisabledError,
    OverloadedError,
    RequestFailedError,
    RequestIdInUseError,
    UnavailableError,
    UserError,
    late,
)
from jaxllm.metrics import Load, Metrics, Observer, StepReport
from jaxllm.outputs import RequestOutput
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.recorded import Recorder
from jaxllm.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
Result = TypeVar("Result")
EngineState = Literal["loading", "serving", "paused", "draining", "hung", "dead", "stopped"]
PauseMode = Literal["abort", "wait", "keep"]
NOT_STARTED = "The engine was not started: use `async with AsyncLLM(...)` or `await engine.start()`."
MAX_SECONDS = 10**9  # of a request: 30 years, which timers can hold
_MOST_THREADS = 4  # for slow work beside the event loop, one for each core: more would wait for Python's lock
LONG_TEXT = 4096  # characters from which on a prompt is tokenized off the event loop: about a millisecond
QUEUED_PER_SLOT = 4  # samples that may wait where nobody says otherwise, for each that runs …
LEAST_QUEUED_TOKENS = 65536  # … and tokens of their prompts: this, or 16 contexts where that is more


class AsyncLLM:
    """A model that many can stream from at once. Without a name it is the small one that ships with jaxllm.

    Keyword arguments are the fields of `EngineConfig`, and the bounds of the queue.

        async with AsyncLLM("path/or/hub-id") as engine:
            async for output in engine.generate("Once upon a time", SamplingParams(output_kind=1)):
                print(output.outputs[0].text, end="")
    """

    thread_type: type[EngineThread] = EngineThread  # a simulation has one of its own, which is no thread

    def __init__(
        self,
        model: str | EngineConfig | None = None,
        *,
        progress: bool = False,
        max_queued_requests: int | None = None,  # samples waiting for a slot; None: four for each slot
        max_queued_tokens: int | None = None,  # of their prompts; None: 16 contexts, at least 65,536
        hang_timeout: float = 8.0,  # seconds that a step may take before the engine counts as hung
        observer: Observer | None = None,
        recorder: Recorder | None = None,
        parts: Parts | None = None,  # what the engine is made of, its clock too; None: loaded from the model
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
        self._clock = time.monotonic if parts is None else parts.clock
        self._engine: LLMEngine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: EngineThread | None = None
        self._inbox = Inbox()
        self._blocks = BlockLog()
        self._streams = StreamTable()
        self._started: asyncio.Future[None] | None = None
        self._death: asyncio.Future[BaseException] | None = None
        self._num_preparing = 0  # samples whose prompts are being made
        self._failure: BaseException | None = None
        self._is_paused = self._is_leaving = self._is_draining = self._is_stopped = False
        self._num_resumed = 0  # times that pauses were ended, those that still waited included
        self._tokenizing: FairThreads | None = None

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig, **bounds: Any) -> AsyncLLM:
        """Make one of `AsyncEngineArgs`; it is to be started like any other."""
        return cls(engine_args, **bounds)

    async def start(self) -> None:
        """Load the model in the engine's thread and wait for it; what is wrong with it is raised here."""
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
            self._thread = self.thread_type(
                self.config,
                self._progress,
                self.metrics,
                self._recorder,
                self._inbox,
                self._loop,
                listeners,
                self._parts,
            )
            self._thread.start()
        await asyncio.shield(self._started)

    async def __aenter__(self) -> AsyncLLM:
        try:
            await self.start()
        except BaseException:  # cancelled, perhaps: nobody will close what is being loaded
            self._is_stopped = True
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
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.engine.tokenizer

    @property
    def default_params(self) -> SamplingParams:
        """What holds for a request without parameters."""
        return self.engine.default_params

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        return self.engine.max_model_len

    @property
    def vocab_size(self) -> int:
        """Ids that the model can read and write."""
        return self.engine.vocab_size

    @property
    def state(self) -> EngineState:
        """What the engine is doing; never waits for it."""
        if self._failure is not None:
            return "dead"
        if self._is_stopped:
            return "stopped"
        if self._is_draining or self._is_leaving:
            return "draining"
        return self._working_state()

    def _working_state(self) -> EngineState:
        """What the engine is doing, whoever is leaving."""
        if self._engine is None:
            return "loading"
        since = self._thread.step_since if self._thread is not None else None
        if since is not None and self._clock() - since > self.hang_timeout:
            return "hung"
        return "paused" if self._is_paused else "serving"

    @property
    def is_paused(self) -> bool:
        """Whether `pause` holds the engine."""
        return self._is_paused

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        owner: str = "",
        priority: int = 0,
        time_limit: float | None = None,
        timeout: float | None = None,
        arrival: float | None = None,
        name: str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Stream a request's outputs, of the kind that its parameters name. To close the iterator aborts the request.

        What a slow reader has not taken is merged into one output. After `time_limit` seconds the request ends with
        what it has; after `timeout` it fails with DeadlineError. What is wrong with the request is raised by the first
        step of the iterator: UserError, OverloadedError where the queue is full, UnavailableError, EngineDeadError.
        An id is one request's at a time, of each `owner`.
        `arrival`, of the monotonic clock, is when the request came, if that was before this call;
        `name` is what logs and recordings call it, where that is more than its id.
        """
        arrival = self._clock() if arrival is None else arrival
        for limit, seconds in (("time_limit", time_limit), ("timeout", timeout)):
            is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            if seconds is not None and not (is_number and 0.0 < seconds <= MAX_SECONDS):
                raise UserError(f"{limit} must be a number of seconds above 0, at most {MAX_SECONDS}.", limit)
        self._check_serving()
        request_id = uuid.uuid4().hex if request_id is None else request_id
        if self._streams.has(request_id, owner):
            raise RequestIdInUseError(f"request id {request_id!r} is in use.", "request_id")
        with self.preparing(1):
            accepted = await self._accept(request_id, prompt, sampling_params, priority)
        if self._streams.has(request_id, owner):
            raise RequestIdInUseError(f"request id {request_id!r} is in use.", "request_id")
        self._check_serving()
        self.check_queue(accepted.params.n, accepted.params.n * len(accepted.prompt_token_ids))
        stream = self._streams.open(request_id, owner, accepted.params, arrival)
        assert self._loop is not None
        timers = []
        try:
            self._inbox.add(replace(accepted, request_id=stream.key, name=name or request_id))
            if timeout is not None:
                seconds = max(0.0, arrival + timeout - self._clock())
                timers.append(self._loop.call_later(seconds, stream.fail, late(timeout)))
            if time_limit is not None:
                timers.append(self._loop.call_later(time_limit, self._inbox.abort, stream.key, "time_limit"))
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

        Their readers get what there is, with the finish reason "abort".
        """
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            for stream in self._streams.of_id(request_id):
                self._inbox.abort(stream.key, "abort")

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine has died, UnavailableError if it makes no progress or takes no work."""
        self._check_serving()

    def check_room(self) -> None:
        """Refuse what no request could pass now, as `generate` would; asked before anything of one is read.

        A call that is one too many must cost little, or those that are many times too many leave no time for others.
        """
        self._check_serving()
        self.check_queue(1, 0)

    def check_queue(self, num_samples: int, num_tokens: int, num_prompts: int = 1) -> None:
        """Refuse what would make the queue longer than its bounds, without asking the engine.

        `num_samples` and `num_tokens` are those of all `num_prompts` together. More samples than the slots and the
        queue could ever hold are a UserError: to try again would not help.
        """
        load = self.get_load()
        most, most_tokens = self.max_queued_requests, self.max_queued_tokens
        most = QUEUED_PER_SLOT * load.max_running if most is None else most
        room = most + load.max_running
        if num_samples > room:
            n = num_samples // num_prompts
            name = "n" if num_prompts == 1 else "n times the number of prompts"
            asked = n if num_prompts == 1 else f"{n} times {num_prompts}"
            message = f"{name} may be at most {room}, so many can run and wait on this server, got {asked}."
            raise UserError(message, "n" if n > 1 else "prompt")
        most_tokens = max(LEAST_QUEUED_TOKENS, 16 * self.max_model_len) if most_tokens is None else most_tokens
        waiting = load.waiting + self._num_preparing
        if waiting + num_samples > most + load.max_running - load.running:
            raise OverloadedError(f"The queue is full: {waiting} requests wait.", retry_after=1.0)
        if load.waiting_tokens and load.waiting_tokens + num_tokens > most_tokens:
            raise OverloadedError(f"The queue is full: {load.waiting_tokens} tokens of prompts wait.", retry_after=1.0)

    @contextmanager
    def preparing(self, num_samples: int) -> Iterator[None]:
        """Count a request into the queue while its prompt is made; OverloadedError if there is no room for it."""
        self.check_queue(num_samples, 0)
        self._num_preparing += num_samples
        try:
            yield
        finally:
            self._num_preparing -= num_samples

    async def off_loop(self, function: Callable[..., Result], *arguments: Any, client: str | None = None) -> Result:
        """Run something slow, as tokenizing a long text, in a thread beside the event loop.

        `client` names whose work it is, where clients are to take turns; one never has all threads.
        """
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

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prompts; False while requests run, because they hold some of the blocks."""
        return await self._call(lambda engine: engine.reset_prefix_cache())

    async def start_profile(self, folder: str, num_steps: int) -> None:
        """Begin a trace of the next `num_steps` steps. Its place is logged; streams wait while it is written."""
        await self._call(lambda engine: engine.start_profile(folder, num_steps))

    async def kv_events(self, start_sequence: int = 0) -> AsyncGenerator[BlockBatch]:
        """Tell what enters and leaves the prefix cache, from a batch's number on.

        FeatureDisabledError without `enable_kv_cache_events`; OutOfRangeError for a batch that is kept no more.
        """
        if not self.config.enable_kv_cache_events:
            raise FeatureDisabledError("start the engine with enable_kv_cache_events.", "enable_kv_cache_events")
        async with aclosing(self._blocks.read(start_sequence)) as batches:
            async for batch in batches:
                yield batch

    async def pause(self, mode: PauseMode = "abort", clear_cache: bool | None = None) -> None:
        """Take no more work and stop computing, until `resume`.

        What runs is aborted, or awaited ("wait"), or kept as it is ("keep"). The cache is cleared unless one says
        otherwise or what runs needs it.
        """
        if mode not in ("abort", "wait", "keep"):
            raise UserError(f"mode must be abort, wait or keep, got {mode!r}.", "mode")
        if mode == "keep" and clear_cache:
            raise UserError("The requests that are kept need the cache: leave clear_cache off.", "clear_cache")
        if self.state not in ("serving", "paused"):
            self._check_serving()
        self._is_paused, resumed = True, self._num_resumed
        if mode == "abort":
            await self.abort(self._streams.ids())
        if mode != "keep":
            await self._streams.wait_quiet()
            if self._num_resumed > resumed:
                return  # somebody has resumed meanwhile, or drains; there may be another pause already
        self._inbox.set_paused(True)
        if mode != "keep" and clear_cache is not False:
            await self.reset_prefix_cache()

    async def resume(self) -> None:
        """Go on after `pause`."""
        self._is_paused = False
        self._num_resumed += 1
        self._inbox.set_paused(False)

    def announce_drain(self) -> None:
        """Say "not ready" from now on, but take work until `drain`: load balancers need a moment to notice."""
        self._is_leaving = True

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no more work and wait for what there is; what is not through in time fails with DrainingError.

        Returns whether everything was through. There is no way back.
        """
        self._is_draining = True
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
        return is_through and self._failure is None and not self._is_stopped

    async def wait_dead(self) -> BaseException:
        """Wait until the engine dies, and return of what; UnavailableError if it was never started."""
        if self._death is None:
            raise UnavailableError(NOT_STARTED)
        return await asyncio.shield(self._death)

    async def close(self, timeout: float = 30.0) -> bool:
        """Stop the engine and let go of the device's memory; what still runs fails.

        Returns whether the engine's thread has ended within `timeout` seconds: a step that hangs is not waited for.
        """
        self._is_stopped = True
        closed = EngineDeadError("The engine was closed.")
        self._streams.fail_all(closed)
        self._blocks.end(closed)
        self._inbox.stop()
        if self._tokenizing is not None:
            self._tokenizing.shutdown()
        if self._thread is None:
            return True
        has_ended = await asyncio.to_thread(self._thread.join, timeout)
        assert self._death is not None
        _set_result(self._death, closed)
        return has_ended

    # On the event loop.

    def _unavailable(self) -> EngineError | None:
        """Return why no work is taken now, None if it is."""
        if self._is_draining and self._failure is None:
            return DrainingError("The server is shutting down.")
        match self.state if self._failure or self._is_stopped else self._working_state():
            case "serving":
                return None
            case "dead" | "stopped":
                return EngineDeadError("The engine has stopped.")
            case "paused":
                return UnavailableError("The engine is paused.")
            case "hung":
                return UnavailableError("The engine makes no progress.")
            case _ if self._started is None:
                return UnavailableError(NOT_STARTED)
            case _:
                return UnavailableError("The model is still being loaded.")

    def _check_serving(self) -> None:
        error = self._unavailable()
        if error is not None:
            raise error

    async def _accept(self, request_id: str, prompt: Prompt, params: SamplingParams | None, priority: int) -> Accepted:
        """Check a request; a long text is tokenized off the event loop."""
        text = prompt.get("prompt") if isinstance(prompt, Mapping) and "prompt_token_ids" not in prompt else prompt
        if not isinstance(text, str) or len(text) <= LONG_TEXT:
            return self.engine.accept(request_id, prompt, params, priority)
        return await self.off_loop(self.engine.accept, request_id, prompt, params, priority)

    def _close(self, stream: Stream) -> None:
        """Forget a stream; a request that has not ended is aborted. Never waits: it runs while a task is cancelled."""
        try:
            if not stream.is_finished:
                self._inbox.abort(stream.key, "abort")
        finally:
            self._streams.close(stream)

    async def _call(self, function: Callable[[LLMEngine], Result]) -> Result:
        """Run a function on the engine's thread between two steps."""
        if self._working_state() in ("loading", "hung") or self.state in ("dead", "stopped"):
            raise self._unavailable() or EngineDeadError("The engine has stopped.")
        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        thread = self._thread
        assert thread is not None

        def run(engine: LLMEngine) -> None:
            try:
                result = function(engine)
            except Exception as error:
                thread.tell(_set_exception, answer, error)
            else:
                thread.tell(_set_result, answer, result)

        assert self._death is not None
        self._inbox.call(run)
        await asyncio.wait([answer, self._death], return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise EngineDeadError("The engine has stopped.")
        return answer.result()

    def _ready(self, engine: LLMEngine) -> None:
        self._engine = engine
        assert self._started is not None
        _set_result(self._started, None)

    def _deliver(self, outputs: list[RequestOutput], report: StepReport | None) -> None:
        """Hand a step's outputs to their readers."""
        now = self._clock()
        told = []
        for output in outputs:
            key = output.request_id
            try:
                stream = self._streams.of_key(key)
                if stream is None:
                    continue  # its reader has gone
                told.append((stream, stream.put(output, now), output if output.finished else None))
                if output.finished:
                    self._streams.note_over(stream)
            except Exception:  # the others of the step are none of its business
                _log.exception("an output could not be handed over")
                self._refused(key, "An output of the request was lost; others go on.")
        if self.observer is None:
            return
        try:
            if report is not None:
                self.observer.step(report)
            for stream, taken, last in told:
                for seconds, count, is_first in taken:
                    self.observer.tokens(seconds, count, is_first)
                if last is not None:
                    self.observer.finished(stream.summary(last), stream.params)
        except Exception:  # statistics are no reason to fail anybody
            _log.exception("the observer failed")

    def _refused(self, key: str, why: str = "The engine could not take the request in; others go on.") -> None:
        """Fail a request that the engine could not take in, or whose output could not be handed over."""
        stream = self._streams.of_key(key)
        if stream is not None:
            self._streams.fail(stream, RequestFailedError(why))

    def _died(self, error: BaseException) -> None:
        """Tell everybody that the engine has died."""
        self._failure = error
        assert self._started is not None and self._death is not None
        if not self._started.done():
            self._started.set_exception(error)
            self._started.exception()  # whoever waits sees it; if nobody does, asyncio need not complain
        _set_result(self._death, error)
        lost = EngineDeadError("The engine has died; this request is lost.")
        self._streams.fail_all(lost)
        self._blocks.end(lost)


def _set_result(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


AsyncLLMEngine = AsyncLLM  # its name in vLLM
