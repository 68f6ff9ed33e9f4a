"""The queue of requests and calls to the engine's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from jaxllm.outputs import FinishReason

if TYPE_CHECKING:
    from jaxllm.engine.accepted import Accepted
    from jaxllm.engine.llm_engine import LLMEngine


class Taken(NamedTuple):
    """The content of an `Inbox`."""

    added: list[Accepted]
    aborted: list[tuple[str, FinishReason]]
    calls: list[Callable[[LLMEngine], None]]
    is_paused: bool
    is_stopped: bool


class Inbox:
    """A thread-safe queue for the engine's thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._added: list[Accepted] = []
        self._aborted: list[tuple[str, FinishReason]] = []
        self._calls: list[Callable[[LLMEngine], None]] = []
        self._num_sequences = self._num_tokens = 0
        self._is_paused = self._is_stopped = False

    def add(self, accepted: Accepted) -> None:
        with self._changed:
            self._added.append(accepted)
            self._num_sequences += accepted.num_sequences
            self._num_tokens += accepted.num_sequences * len(accepted.prompt_token_ids)
            self._changed.notify()

    def abort(self, internal_id: str, reason: FinishReason) -> None:
        with self._changed:
            self._aborted.append((internal_id, reason))
            self._changed.notify()

    def call(self, function: Callable[[LLMEngine], None]) -> None:
        with self._changed:
            self._calls.append(function)
            self._changed.notify()

    def set_paused(self, is_paused: bool) -> None:
        with self._changed:
            self._is_paused = is_paused
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify()

    def counts(self) -> tuple[int, int]:
        return self._num_sequences, self._num_tokens

    def take(self, is_idle: bool) -> Taken:
        """Take the whole queue; block while it is empty if the engine is idle or paused."""
        with self._changed:
            while not (self._added or self._aborted or self._calls or self._is_stopped):
                if not is_idle and not self._is_paused:
                    break
                self._changed.wait()
            taken = Taken(self._added, self._aborted, self._calls, self._is_paused, self._is_stopped)
            self._added, self._aborted, self._calls = [], [], []
            return taken

    def settle(self, added: list[Accepted]) -> None:
        """Stop counting requests, which the engine's load includes now."""
        if added:
            with self._changed:
                self._num_sequences -= sum(accepted.num_sequences for accepted in added)
                self._num_tokens -= sum(accepted.num_sequences * len(accepted.prompt_token_ids) for accepted in added)
