"""State machine of an asynchronous engine."""

from __future__ import annotations

from typing import Literal

from jaxllm.errors import DrainingError, EngineDeadError, EngineError, UnavailableError

EngineState = Literal["loading", "serving", "paused", "draining", "hung", "dead", "stopped"]
PauseMode = Literal["abort", "wait", "keep"]
Event = Literal["ready", "pause", "resume", "announce_drain", "drain", "stop", "die"]
NOT_STARTED = "The engine was not started: use `async with AsyncLLM(...)` or `await engine.start()`."

# Other events leave the state unchanged.
_WORK = {
    ("loading", "ready"): "serving",
    ("serving", "pause"): "paused",
    ("paused", "resume"): "serving",
}
_EXIT = {
    ("staying", "announce_drain"): "leaving",  # health checks report "draining"
    ("staying", "drain"): "draining",
    ("leaving", "drain"): "draining",
    ("staying", "stop"): "stopped",
    ("leaving", "stop"): "stopped",
    ("draining", "stop"): "drained",  # later requests fail with DrainingError
    ("staying", "die"): "dead",
    ("leaving", "die"): "dead",
    ("draining", "die"): "dead",
    ("stopped", "die"): "dead",
    ("drained", "die"): "dead",
}
_ENDS: dict[str, EngineState] = {"dead": "dead", "stopped": "stopped", "drained": "stopped"}


class LifeCycle:
    """An engine's state: `work` (loading, serving, paused) and `exit` (its shutdown)."""

    def __init__(self) -> None:
        self.work = "loading"
        self.exit = "staying"

    def on(self, event: Event) -> None:
        self.work = _WORK.get((self.work, event), self.work)
        self.exit = _EXIT.get((self.exit, event), self.exit)

    @property
    def has_ended(self) -> bool:
        return self.exit in _ENDS

    def state(self, is_hung: bool) -> EngineState:
        """Return the state to report; `is_hung`: the current step exceeds its time limit."""
        if self.exit in ("leaving", "draining"):
            return "draining"
        return _ENDS.get(self.exit) or self._working(is_hung)

    def _working(self, is_hung: bool) -> EngineState:
        if self.work == "loading":
            return "loading"
        if is_hung:
            return "hung"
        return "paused" if self.work == "paused" else "serving"

    def is_responsive(self, is_hung: bool) -> bool:
        return not self.has_ended and self._working(is_hung) in ("serving", "paused")

    def unavailable(self, is_hung: bool, was_started: bool) -> EngineError | None:
        if self.exit in ("draining", "drained"):
            return DrainingError("The server is shutting down.")
        if self.has_ended:
            return EngineDeadError("The engine has stopped.")
        match self._working(is_hung):
            case "serving":
                return None
            case "paused":
                return UnavailableError("The engine is paused.")
            case "hung":
                return UnavailableError("The engine makes no progress.")
            case _:
                return UnavailableError("The model is still being loaded." if was_started else NOT_STARTED)
