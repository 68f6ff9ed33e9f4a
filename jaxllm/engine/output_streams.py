"""The way of outputs from the engine's thread to their readers: a stream for each, and the table of all streams.

Belongs to the event loop. Knows requests and their outputs; knows neither the engine's loop nor any protocol.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from jaxllm.errors import RequestFailedError
from jaxllm.outputs import CompletionOutput, RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams


class Stream:
    """One request's outputs on their way to its reader; what was not taken yet is one merged output."""

    def __init__(self, request_id: str, owner: str, internal_id: str, params: SamplingParams, arrival: float) -> None:
        self.request_id = request_id  # the caller's
        self.owner = owner  # whose id it is: other owners may use the same
        self.internal_id = internal_id  # the engine's
        self.params = params
        self.is_finished = False  # its last output has come
        self.is_over = False  # nothing more is expected of the engine
        self._arrival = arrival
        self._last_tokens: float | None = None
        self._pending: RequestOutput | None = None
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._tokens: dict[int, CompletionOutput] = {}  # by sample: its ids and how it ended, for the summary

    def put(self, output: RequestOutput, now: float) -> list[tuple[float, int, bool]]:
        """Take in an output; return what its tokens took: seconds, tokens, and if they were the first.

        Those of first tokens are since arrival, others since the output before. Samples wait side by side: their
        seconds are added up.
        """
        counts = [count for completion in output.outputs if (count := self._count(completion))]
        taken: list[tuple[float, int, bool]] = []
        if counts:
            before, num_tokens = self._last_tokens, sum(counts)
            if before is None:
                before = output.metrics.first_token_time if output.metrics else None
                before = now if before is None else before
                taken.append((before - self._arrival, len(counts), True))
                num_tokens -= len(counts)
            if num_tokens:
                taken.append(((now - before) * len(counts), num_tokens, False))
            self._last_tokens = now
        if output.metrics is not None:
            output.metrics.arrival_time = self._arrival
        for completion in output.outputs:
            if completion.finish_reason == "error":
                why = f"The request failed, others go on: {completion.stop_reason}."
                self._error = RequestFailedError(why)
        if self.params.output_kind is RequestOutputKind.DELTA and self._pending is not None:
            merge(self._pending, output)
        else:
            self._pending = output
        self.is_finished = output.finished  # only now: a stream may still fail before this
        self._wake()
        return taken

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


class StreamTable:
    """The streams of all readers, by the caller's id and by the engine's. Belongs to the event loop.

    A caller's id is one request's at a time; other owners' requests may have it, too.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, dict[str, Stream]] = {}  # the second by owner
        self._by_internal_id: dict[str, Stream] = {}
        self._num_opened = 0
        self._num_awaited = 0  # streams of which the engine has more to say
        self._quiet = asyncio.Event()  # there are none of them
        self._quiet.set()
        self._idle = asyncio.Event()  # every reader has gone
        self._idle.set()

    def __len__(self) -> int:
        return len(self._by_internal_id)

    def has(self, request_id: str, owner: str) -> bool:
        """Whether a caller's id is in use."""
        return owner in self._by_id.get(request_id, ())

    def ids(self) -> list[str]:
        """List the callers' ids."""
        return list(self._by_id)

    def of_id(self, request_id: str) -> list[Stream]:
        """Find the streams of all callers' requests of an id."""
        return list(self._by_id.get(request_id, {}).values())

    def of_internal_id(self, internal_id: str) -> Stream | None:
        """Find a stream by the engine's id; None if its reader has gone."""
        return self._by_internal_id.get(internal_id)

    def open(self, request_id: str, owner: str, params: SamplingParams, arrival: float) -> Stream:
        """Make a stream for an id that is free."""
        # An id may come back before the engine has heard of its first owner's end, so it has names of its own.
        self._num_opened += 1
        stream = Stream(request_id, owner, f"{self._num_opened}", params, arrival)
        self._by_id.setdefault(request_id, {})[owner] = self._by_internal_id[stream.internal_id] = stream
        self._num_awaited += 1
        self._idle.clear()
        self._quiet.clear()
        return stream

    def close(self, stream: Stream) -> None:
        """Forget a stream, whose reader has gone."""
        owners = self._by_id[stream.request_id]
        del owners[stream.owner], self._by_internal_id[stream.internal_id]
        if not owners:
            del self._by_id[stream.request_id]
        self.note_over(stream)
        if not self._by_internal_id:
            self._idle.set()

    def note_over(self, stream: Stream) -> None:
        """Note that nothing more is expected of the engine for a stream."""
        if not stream.is_over:
            stream.is_over = True
            self._num_awaited -= 1
            if self._num_awaited == 0:
                self._quiet.set()

    def fail(self, stream: Stream, error: BaseException) -> None:
        """End a stream with an error."""
        stream.fail(error)
        self.note_over(stream)

    def fail_all(self, error: BaseException) -> None:
        """End every stream with an error."""
        for stream in list(self._by_internal_id.values()):
            self.fail(stream, error)

    async def wait_quiet(self) -> None:
        """Wait until the engine has no more outputs for any reader."""
        await self._quiet.wait()

    async def wait_idle(self) -> None:
        """Wait until every reader has gone."""
        await self._idle.wait()


def merge(pending: RequestOutput, new: RequestOutput) -> None:
    """Append an output of deltas to one that its reader has not taken yet, in place."""
    parts = {completion.index: completion for completion in pending.outputs}
    for completion in new.outputs:
        part = parts.get(completion.index)
        if part is None:
            pending.outputs.append(completion)
            continue
        part.text += completion.text
        assert isinstance(part.token_ids, list) and isinstance(completion.token_ids, list)
        part.token_ids += completion.token_ids
        if part.logprobs is not None and completion.logprobs is not None:
            part.logprobs += completion.logprobs
        part.cumulative_logprob = completion.cumulative_logprob
        part.finish_reason, part.stop_reason = completion.finish_reason, completion.stop_reason
    pending.finished, pending.metrics = new.finished, new.metrics
    pending.num_cached_tokens = new.num_cached_tokens
    if new.prompt_logprobs is not None:
        pending.prompt_logprobs = new.prompt_logprobs
