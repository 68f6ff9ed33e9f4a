"""The thread that runs the engine of an `AsyncLLM`."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.engine.accepted import Accepted
from jaxllm.engine.inbox import Inbox
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.engine.loader import Parts
from jaxllm.engine.ranks import engine_type
from jaxllm.metrics import Load, Metrics, StepReport
from jaxllm.outputs import FinishReason, RequestOutput
from jaxllm.scheduler.recorded import Recorder
from jaxllm.scheduler.state import BlockEvent

_log = logging.getLogger(__name__)
RATE_SECONDS = 2.0  # window of the speed in `Load`


@dataclass(frozen=True)
class Listeners:
    """Callbacks scheduled on the event loop."""

    ready: Callable[[LLMEngine], None]
    deliver: Callable[[list[RequestOutput], StepReport | None], None]
    refused: Callable[[str], None]
    block_events: Callable[[float, int, tuple[BlockEvent, ...]], None]  # Unix time, block size, changes
    died: Callable[[BaseException], None]


class EngineThread:
    """Runs an engine until `inbox` stops or it dies. Other threads may read `load` and `step_since`."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        progress: bool,
        metrics: Metrics,
        recorder: Recorder | None,
        inbox: Inbox,
        loop: asyncio.AbstractEventLoop,
        listeners: Listeners,
        parts: Parts | None = None,
        prepare: Callable[[LLMEngine], None] = lambda engine: None,  # called before `ready`
    ) -> None:
        self.load = Load()
        self.step_since: float | None = None
        self._config = config
        self._progress = progress
        self._metrics = metrics
        self._recorder = recorder
        self._inbox = inbox
        self._loop = loop
        self._listeners = listeners
        self._parts = parts
        self._prepare = prepare
        self._clock = time.monotonic if parts is None else parts.clock
        self._speeds: deque[tuple[float, int]] = deque()
        self._thread = threading.Thread(target=self._run, name="jaxllm-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout: float) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def call_back(self, function: Callable[..., None], *arguments: Any) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        for _ in self.turns():
            pass

    def turns(self) -> Iterator[None]:
        """Load the engine, then run one iteration per `next` until stopped or dead."""
        engine: LLMEngine | None = None
        try:
            engine = self._load()
            self._prepare(engine)
            self.load = engine.load()
            self.call_back(self._listeners.ready, engine)
            yield
            while self._turn(engine):
                yield
        except BaseException as error:
            self.step_since = None
            self.call_back(self._listeners.died, error)
        finally:
            if engine is not None:
                engine.close()

    def _load(self) -> LLMEngine:
        return engine_type(self._config)(
            self._config,
            progress=self._progress,
            metrics=self._metrics,
            recorder=self._recorder,
            parts=self._parts,
        )

    def _turn(self, engine: LLMEngine) -> bool:
        if not engine.has_unfinished_requests():
            self._speeds = deque([(self._clock(), engine.metrics.generated_tokens)])
        taken = self._inbox.take(is_idle=not engine.has_unfinished_requests())
        if taken.is_stopped:
            return False
        outputs = self._take_in(engine, taken.added, taken.aborted, taken.calls)
        if taken.added:
            self.load = _with_speed(engine.load(), self.load)
        self._inbox.settle(taken.added)
        report = None
        if not taken.is_paused and engine.has_unfinished_requests():
            stepped, report = self._step(engine)
            outputs += stepped
        elif taken.aborted or taken.calls:
            self.load = _with_speed(engine.load(), self.load)
        if outputs or report is not None:
            self.call_back(self._listeners.deliver, outputs, report)
        if blocks := engine.take_block_events():
            self.call_back(self._listeners.block_events, time.time(), self._config.block_size, blocks)
        return True

    def _step(self, engine: LLMEngine) -> tuple[list[RequestOutput], StepReport]:
        metrics = engine.metrics
        before = metrics.chunk_tokens, metrics.generated_tokens
        started = self.step_since = self._clock()
        outputs = engine.step()
        ended = self._clock()
        self.step_since = None
        num_sampled = metrics.generated_tokens - before[1]
        num_tokens = metrics.chunk_tokens - before[0] + num_sampled
        report = StepReport(ended - started, num_tokens, engine.num_rows, num_sampled)
        speeds = self._speeds
        speeds.append((ended, metrics.generated_tokens))
        while len(speeds) > 2 and ended - speeds[1][0] > RATE_SECONDS:
            speeds.popleft()
        self.load = engine.load()._replace(
            step_seconds=report.seconds,
            generated_tokens_per_second=(speeds[-1][1] - speeds[0][1]) / max(ended - speeds[0][0], 1e-6),
        )
        return outputs, report

    def _take_in(
        self,
        engine: LLMEngine,
        added: list[Accepted],
        aborted: list[tuple[str, FinishReason]],
        calls: list[Callable[[LLMEngine], None]],
    ) -> list[RequestOutput]:
        try:
            if added:
                engine.add(added)
        except Exception:  # one request may be the cause
            for accepted in added:
                try:
                    engine.add([accepted])
                except Exception:
                    _log.exception("request %s could not be added", accepted.request_id)
                    engine.metrics.note_finished("error", accepted.num_sequences)
                    self.call_back(self._listeners.refused, accepted.internal_id)
        outputs = engine.abort_requests(aborted) if aborted else []
        for call in calls:
            call(engine)
        return outputs


def _with_speed(load: Load, before: Load) -> Load:
    return load._replace(
        step_seconds=before.step_seconds, generated_tokens_per_second=before.generated_tokens_per_second
    )
