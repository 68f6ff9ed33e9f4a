"""What crosses between the event loop and the engine's thread: an inbox towards the engine, a stream to each reader.

Knows requests and their outputs; knows neither the engine's loop nor any protocol.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from jaxllm.errors import OutOfRangeError, RequestFailedError
from jaxllm.state import BlockEvent
from jaxllm.types import CompletionOutput, FinishReason, RequestOutput, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxllm.engine import Accepted, LLMEngine

LOGGED_BATCHES = 10_000  # of changes of the prefix cache, for readers that come back


class Taken(NamedTuple):
    """What the engine's thread found in its inbox."""

    added: list[Accepted]
    aborted: list[tuple[str, FinishReason]]
    calls: list[Callable[[LLMEngine], None]]
    is_paused: bool
    is_stopped: bool


class Inbox:
    """Where the event loop puts what the engine is to do. Any thread may put; one takes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._added: list[Accepted] = []
        self._aborted: list[tuple[str, FinishReason]] = []
        self._calls: list[Callable[[LLMEngine], None]] = []
        self._num_samples = self._num_tokens = 0
        self._is_paused = self._is_stopped = False

    def add(self, accepted: Accepted) -> None:
        """Queue a request."""
        with self._changed:
            self._added.append(accepted)
            self._num_samples += accepted.params.n
            self._num_tokens += accepted.params.n * len(accepted.prompt_token_ids)
            self._changed.notify()

    def abort(self, request_id: str, reason: FinishReason) -> None:
        """End a request."""
        with self._changed:
            self._aborted.append((request_id, reason))
            self._changed.notify()

    def call(self, function: Callable[[LLMEngine], None]) -> None:
        """Run a function between two steps."""
        with self._changed:
            self._calls.append(function)
            self._changed.notify()

    def set_paused(self, is_paused: bool) -> None:
        """Stop computing steps, or go on."""
        with self._changed:
            self._is_paused = is_paused
            self._changed.notify()

    def stop(self) -> None:
        """End the engine's loop."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()

    def counts(self) -> tuple[int, int]:
        """Count the samples, and the tokens of their prompts, that `settle` has not been told of."""
        return self._num_samples, self._num_tokens

    def take(self, is_idle: bool) -> Taken:
        """Take everything; an engine that is idle or paused waits here until there is something."""
        with self._changed:
            while not (self._added or self._aborted or self._calls or self._is_stopped):
                if not is_idle and not self._is_paused:
                    break
                self._changed.wait()
            taken = Taken(self._added, self._aborted, self._calls, self._is_paused, self._is_stopped)
            self._added, self._aborted, self._calls = [], [], []
            return taken

    def settle(self, added: list[Accepted]) -> None:
        """Count requests that were taken no more: from now on they show in the engine's own load."""
        if added:
            with self._changed:
                self._num_samples -= sum(accepted.params.n for accepted in added)
                self._num_tokens -= sum(accepted.params.n * len(accepted.prompt_token_ids) for accepted in added)


class BlockBatch(NamedTuple):
    """What entered and left the prefix cache in one step."""

    sequence: int  # counts from 0 without a gap
    time: float  # seconds since 1970
    block_size: int  # tokens of a block
    events: tuple[BlockEvent, ...]


class BlockLog:
    """The last changes of the prefix cache, for any number of readers. Belongs to the event loop."""

    def __init__(self) -> None:
        self._batches: deque[BlockBatch] = deque(maxlen=LOGGED_BATCHES)
        self._next = 0
        self._changed = asyncio.Event()

    def append(self, time: float, block_size: int, events: tuple[BlockEvent, ...]) -> None:
        """Note a batch and wake the readers."""
        self._batches.append(BlockBatch(self._next, time, block_size, events))
        self._next += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def read(self, start: int) -> AsyncGenerator[BlockBatch]:
        """Give the batches from number `start` on, and go on as they come; OutOfRangeError for one that is lost."""
        while True:
            first = self._next - len(self._batches)
            if not first <= start <= self._next:
                raise OutOfRangeError(
                    f"batch {start} is not kept; there are {first} to {self._next - 1}: forget all and begin there.",
                    "start_sequence",
                )
            changed = self._changed
            for batch in [self._batches[number - first] for number in range(start, self._next)]:
                yield batch
                start = batch.sequence + 1
            if start == self._next:
                await changed.wait()


class Stream:
    """One request's outputs on their way to its reader; what was not taken yet is one merged output."""

    def __init__(self, request_id: str, key: str, params: SamplingParams, arrival: float) -> None:
        self.request_id = request_id  # the caller's
        self.key = key  # the engine's
        self.params = params
        self.is_finished = False
        self._arrival = arrival
        self._last_tokens: float | None = None
        self._pending: RequestOutput | None = None
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._tokens: dict[int, CompletionOutput] = {}  # by sample: its ids and how it ended, for the summary

    def put(self, output: RequestOutput, now: float) -> tuple[float, int, bool]:
        """Take in an output; return the seconds since the last one or the arrival, its tokens, and if it was first.

        Samples wait side by side: the seconds are those of all that got tokens, added up.
        """
        counts = [self._count(completion) for completion in output.outputs]
        count = sum(counts)
        is_first = self._last_tokens is None
        seconds = now - (self._arrival if self._last_tokens is None else self._last_tokens)
        if not is_first:
            seconds *= sum(count > 0 for count in counts)
        if count:
            self._last_tokens = now
        output.request_id = self.request_id
        if output.metrics is not None:
            output.metrics.arrival_time = self._arrival
        if self.params.output_kind is RequestOutputKind.DELTA and self._pending is not None:
            output = merged(self._pending, output)
        self._pending = output
        if output.finished:
            self.is_finished = True
            if any(completion.finish_reason == "error" for completion in output.outputs):
                self._error = RequestFailedError("The request failed inside a step of the engine; others go on.")
        self._wake()
        return seconds, count, is_first

    def fail(self, error: BaseException) -> None:
        """End the stream with an error, unless its last output is there already."""
        if not self.is_finished and self._error is None:
            self._error = error
            self._wake()

    async def get(self) -> RequestOutput:
        """Wait for an output and take it."""
        while self._pending is None and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._error is not None:
            raise self._error
        assert self._pending is not None
        output, self._pending = self._pending, None
        return output

    def summary(self, last: RequestOutput) -> RequestOutput:
        """Return the whole request, token ids without text, from its last output."""
        return replace(last, outputs=[self._tokens[index] for index in sorted(self._tokens)])

    def _count(self, completion: CompletionOutput) -> int:
        """Note a sample's new tokens; return how many they are."""
        whole = self._tokens.get(completion.index)
        if whole is None:
            whole = self._tokens[completion.index] = CompletionOutput(completion.index, "", [])
        ids = whole.token_ids
        assert isinstance(ids, list)
        is_delta = self.params.output_kind is RequestOutputKind.DELTA
        new = completion.token_ids if is_delta else completion.token_ids[len(ids) :]
        ids.extend(new)
        whole.finish_reason, whole.stop_reason = completion.finish_reason, completion.stop_reason
        return len(new)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merged(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Join two outputs of deltas into one."""
    parts = {completion.index: completion for completion in first.outputs}
    for new in second.outputs:
        old = parts.get(new.index)
        if old is None:
            parts[new.index] = new
            continue
        parts[new.index] = CompletionOutput(
            index=new.index,
            text=old.text + new.text,
            token_ids=[*old.token_ids, *new.token_ids],
            cumulative_logprob=new.cumulative_logprob,
            logprobs=None if new.logprobs is None else [*(old.logprobs or ()), *new.logprobs],
            finish_reason=new.finish_reason,
            stop_reason=new.stop_reason,
            seed=new.seed,
        )
    return replace(second, outputs=[parts[index] for index in sorted(parts)])
