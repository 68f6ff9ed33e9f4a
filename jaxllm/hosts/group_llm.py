"""`GroupLLM`: an `AsyncLLM` with a model on several hosts."""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.engine.async_llm import AsyncLLM
from jaxllm.engine.engine_thread import EngineThread
from jaxllm.engine.llm_engine import LLMEngine
from jaxllm.hosts import agreement
from jaxllm.hosts.leader import Leader
from jaxllm.hosts.settings import HostSettings


class GroupLLM(AsyncLLM):
    """The leader's engine; the other hosts run `follower.Follower`.

    After a failure of any host this process must end: threads may wait for a device forever.
    """

    def __init__(self, model: str | EngineConfig | None, settings: HostSettings, **given: Any) -> None:
        super().__init__(
            model, thread_type=partial(LeaderThread, Leader(settings)), hang_timeout=settings.silence, **given
        )
        agreement.check(self.config)


class LeaderThread(EngineThread):
    """The thread of a leader's engine; it first waits for the other hosts."""

    def __init__(self, leader: Leader, **given: Any) -> None:
        super().__init__(**given)
        self._leader = leader
        leader.on_failed = lambda error: self.call_back(self._listeners.died, error)

    def _load(self) -> LLMEngine:
        return self._leader.make_engine(self._config, self._progress, self._metrics)

    def _turn(self, engine: LLMEngine) -> bool:
        try:
            return super()._turn(engine)
        except BaseException as error:  # fail the followers too
            self._leader.stop(f"{type(error).__name__}: {error}")
            raise
