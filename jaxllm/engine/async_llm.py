"""`AsyncLLM`: one engine in a thread; all methods belong to the event loop that called `start`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from jaxllm.config import EngineConfig, config_of
from jaxllm.engine.accepted import Accepted
from jaxllm.engine.engine_client import EngineView
from jaxllm.engine.engine_thread import EngineThread, Listeners
from jaxllm.engine.features.table import AsyncCalls
from jaxllm.engine.inbox import Inbox
from jaxllm.engine.kv_events import BlockBatch, BlockLog
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.engine.loader import Parts
from jaxllm.engine.model_info import ModelInfo
from jaxllm.engine.prompts import Prompt
from jaxllm.engine.streaming_engine import StreamingEngine, set_result
from jaxllm.errors import (
    DrainingError,
    EngineDeadError,
    FeatureDisabledError,
    RequestFailedError,
    UnavailableError,
    UserError,
    late,
)
from jaxllm.lora_request import LoRARequest
from jaxllm.metrics import DeviceReport, Load, Observer, StepReport
from jaxllm.outputs import RequestOutput
from jaxllm.request_params import RequestParams
from jaxllm.sampling_params import SamplingParams
from jaxllm.scheduler.recorded import Recorder

_log = logging.getLogger(__name__)
Result = TypeVar("Result")
_MANY_IDS = 2**16  # longer ones are checked in a thread: 5 ms
LONG_TEXT = 4096  # characters; longer prompts are tokenized in a thread: 1 ms


class AsyncLLM(StreamingEngine, AsyncCalls):
    """A model that many readers stream from at once; without a name, the small model included in jaxllm.

    Keyword arguments are the fields of `EngineConfig` and the bounds of the queue.

        async with AsyncLLM("path/or/hub-id") as engine:
            async for output in engine.generate("Once upon a time", SamplingParams(output_kind=1)):
                print(output.outputs[0].text, end="")
    """

    def __init__(
        self,
        model: str | EngineConfig | None = None,
        *,
        progress: bool = False,
        max_queued_requests: int | None = None,  # waiting sequences; None: see `most_queued`
        max_queued_tokens: int | None = None,  # of prompts; None: see `most_queued_tokens`
        hang_timeout: float = 8.0,  # seconds; a longer step counts as hung
        observer: Observer | None = None,
        recorder: Recorder | None = None,
        adapters: Sequence[LoRARequest] = (),  # read before the engine is ready
        parts: Parts | None = None,  # None: loaded from the model
        thread_type: Callable[..., EngineThread] = EngineThread,
        **engine_args: Any,
    ) -> None:
        self._inbox = Inbox()
        super().__init__(
            config_of(model, engine_args),
            self._inbox,
            time.monotonic if parts is None else parts.clock,
            max_queued_requests=max_queued_requests,
            max_queued_tokens=max_queued_tokens,
            hang_timeout=hang_timeout,
        )
        self._observers = [] if observer is None else [observer]
        self._recorder = recorder
        self._progress = progress
        self._parts = parts
        self._adapters = tuple(adapters)
        self._engine: LLMEngine | None = None
        self._thread: EngineThread | None = None
        self._thread_type = thread_type
        self._blocks = BlockLog(lambda number: self.engine.adapters.name_of(number))

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig, **bounds: Any) -> AsyncLLM:
        """Make an engine, not yet started, from `AsyncEngineArgs`."""
        return cls(engine_args, **bounds)

    async def _begin(self) -> None:
        assert self._loop is not None
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
            prepare=self._prepare,
        )
        try:
            self._thread.start()
        except RuntimeError:  # no thread is available
            self._thread = None
            raise

    def _prepare(self, engine: LLMEngine) -> None:
        for request in self._adapters:
            engine.add_lora(request)

    async def close(self, timeout: float = 30.0) -> bool:
        """Stop the engine, failing unfinished requests, and free the device's memory.

        Returns whether the thread ended within `timeout` seconds.
        """
        await super().close(timeout)
        closed = EngineDeadError("The engine was closed.")
        self._blocks.end(closed)
        if self._thread is None:
            return True
        has_ended = await asyncio.to_thread(self._thread.join, timeout)
        assert self._death is not None
        set_result(self._death, closed)
        return has_ended

    @property
    def engine(self) -> LLMEngine:
        """The engine, of which only constant attributes are safe outside its thread."""
        if self._engine is None:
            raise self._unavailable() or UnavailableError("The model is still being loaded.")
        return self._engine

    @property
    def model(self) -> ModelInfo:
        return self.engine.model

    @property
    def _is_hung(self) -> bool:
        since = self._thread.step_since if self._thread is not None else None
        return since is not None and self._clock() - since > self.hang_timeout

    @property
    def engines(self) -> Sequence[EngineView]:
        return (self,)

    def add_observer(self, observer: Observer, number: int = 0) -> None:
        """Call an observer after each step and each finished request."""
        self._observers.append(observer)

    async def drain_replica(self, number: int) -> None:
        """Raise FeatureDisabledError: one engine has no replicas."""
        raise FeatureDisabledError("this server has one engine, and no replica to drain.", "replica")

    def get_load(self) -> Load:
        """Return the load after the last step, plus the requests queued since."""
        load = self._thread.load if self._thread is not None else Load()
        num_new, num_tokens = self._inbox.counts()
        speed = load.generated_tokens_per_second if load.running else 0.0
        return load._replace(
            waiting=load.waiting + num_new,
            waiting_tokens=load.waiting_tokens + num_tokens,
            generated_tokens_per_second=speed,
        )

    def device_report(self) -> DeviceReport | None:
        """Return the compiled programs and the devices' memory; None while the model is loading."""
        return None if self._engine is None else self._engine.runner.report()

    async def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache; return False, without clearing, while requests run."""
        return await self._call(lambda engine: engine.reset_prefix_cache())

    async def resume(self) -> None:
        """Continue after `pause`; raise UserError if the engine sleeps."""
        if self._sleeps:
            raise UserError("the engine sleeps: wake_up resumes it.")
        await super().resume()

    async def drain(self, timeout: float | None = None) -> bool:
        """See `StreamingEngine.drain`; requests kept by a sleeping engine fail at once."""
        if self._sleeps:
            self._streams.fail_all(DrainingError("The server is shutting down while its engine sleeps."))
        return await super().drain(timeout)

    def _unavailable(self) -> Exception | None:
        error = super()._unavailable()
        is_asleep = self._sleeps and error is not None and self.state == "paused"
        return UnavailableError("The engine sleeps; call wake_up.") if is_asleep else error

    async def start_profile(self, folder: str, num_steps: int) -> None:
        """Trace the next `num_steps` steps and log the trace's path. Streams wait for it."""
        await self._call(lambda engine: engine.start_profile(folder, num_steps))

    async def kv_events(self, start_sequence: int = 0) -> AsyncGenerator[BlockBatch]:
        """Stream the changes of the prefix cache, from a batch's number on.

        Raises FeatureDisabledError without `enable_kv_cache_events`, OutOfRangeError for a discarded batch.
        """
        if not self.config.enable_kv_cache_events:
            raise FeatureDisabledError(
                "changes of the prefix cache are not logged; start the engine with enable_kv_cache_events.",
                "enable_kv_cache_events",
            )
        async with aclosing(self._blocks.read(start_sequence)) as batches:
            async for batch in batches:
                yield batch

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
    ) -> Accepted:
        text = prompt.get("prompt") if isinstance(prompt, Mapping) and "prompt_token_ids" not in prompt else prompt
        is_slow = isinstance(text, str) and len(text) > LONG_TEXT
        is_slow |= isinstance(params, SamplingParams) and params.structured_outputs is not None
        is_slow |= isinstance(params, SamplingParams) and len(params.allowed_token_ids or ()) > LONG_TEXT
        ids = prompt.get("prompt_token_ids", ()) if isinstance(prompt, Mapping) else prompt
        is_slow |= isinstance(ids, Sequence) and len(ids) > _MANY_IDS
        is_slow |= isinstance(prompt, Mapping) and not {"multi_modal_data", "decoder_prompt"}.isdisjoint(prompt)
        language = None
        for thread_of in self.engine.features.thread_of:
            language = thread_of(options) if language is None else language
        accept = partial(self.engine.accept, request_id, prompt, params, priority, **options)
        if not is_slow and language is None:
            return accept()
        try:
            async with asyncio.timeout(timeout):
                return await self.off_loop(accept, client=client, language=language)
        except TimeoutError as error:
            assert timeout is not None
            raise late(timeout) from error

    def _needs(self, accepted: Any) -> asyncio.Future[Any] | None:
        for needs in self.engine.features.needs:
            future = needs(accepted)
            if future is not None:
                ended = asyncio.wrap_future(future)
                return asyncio.ensure_future(_without_result(ended))
        return None

    async def _call(self, function: Callable[[LLMEngine], Result]) -> Result:
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
                thread.call_back(set_result, answer, result)

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
        set_result(self._started, None)

    def _deliver(self, outputs: list[RequestOutput], report: StepReport | None) -> None:
        now = self._clock()
        delivered = []
        for output in outputs:
            try:
                stream = self._streams.of_internal_id(output.internal_id)
                if stream is None:
                    continue
                delivered.append((stream, stream.put(output, now), output if output.finished else None))
                if output.finished:
                    self._streams.note_over(stream)
            except Exception:  # fails one request; the others of the step go on
                _log.exception("an output could not be handed over")
                self._refused(output.internal_id, "An output of the request was lost; others go on.")
        if not self._observers:
            return
        for observer in self._observers:
            try:
                if report is not None:
                    observer.step(report)
                for _, taken, _ in delivered:
                    for seconds, count, is_first in taken:
                        observer.tokens(seconds, count, is_first)
                for stream, _, last in delivered:
                    if last is not None:
                        observer.finished(stream.summary(last), stream.params)
            except Exception:  # statistics must not fail a request
                _log.exception("the observer failed")

    def _refused(self, internal_id: str, why: str = "The engine could not take the request in; others go on.") -> None:
        stream = self._streams.of_internal_id(internal_id)
        if stream is not None:
            self._streams.fail(stream, RequestFailedError(why))

    def _died(self, error: BaseException) -> None:
        super()._died(error)
        self._blocks.end(EngineDeadError("The engine has died; this request is lost."))


async def _without_result(future: asyncio.Future[Any]) -> None:
    await future


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


AsyncLLMEngine = AsyncLLM
