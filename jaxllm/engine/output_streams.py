"""Output streams to readers, for the event loop."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from jaxllm.errors import RequestFailedError
from jaxllm.outputs import CompletionOutput, FinishReason, RequestOutput
from jaxllm.sampling_params import RequestOutputKind, SamplingParams


class Stream:
    """The outputs of one request; unread ones are merged."""

    def __init__(self, request_id: str, owner: str, internal_id: str, params: SamplingParams, arrival: float) -> None:
        self.request_id = request_id
        self.owner = owner  # scope of `request_id`
        self.internal_id = internal_id
        self.params = params
        self.is_finished = False
        self.is_over = False
        self._arrival = arrival
        self._last_tokens: float | None = None
        self._pending: RequestOutput | None = None
        self._error: BaseException | None = None
        self.needs: asyncio.Future[Any] | None = None  # to await before queuing
        self.end_reason: FinishReason | None = None  # if ended before it was queued
        self._waiter: asyncio.Future[None] | None = None
        self._tokens: dict[int, CompletionOutput] = {}  # token ids and finish reason, by index

    def put(self, output: RequestOutput, now: float) -> list[tuple[float, int, bool]]:
        """Put an output; return latencies: seconds summed over sequences, tokens, whether first.

        First tokens count from arrival, others from the previous output.
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
        self.is_finished = output.finished  # last: `fail` may come first
        self._wake()
        return taken

    def fail(self, error: BaseException) -> None:
        if not self.is_finished and self._error is None:
            self._error = error
        if self.needs is not None:
            self.needs.cancel()
        self._wake()

    @property
    def error(self) -> BaseException | None:
        return self._error

    async def get(self) -> RequestOutput:
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
        return replace(last, outputs=[self._tokens[index] for index in sorted(self._tokens)])

    def _count(self, completion: CompletionOutput) -> int:
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
    """Open streams by request id, unique per owner, and by internal id."""

    def __init__(self) -> None:
        self._by_id: dict[str, dict[str, Stream]] = {}  # and owner
        self._by_internal_id: dict[str, Stream] = {}
        self._num_opened = 0
        self._num_awaited = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._by_internal_id)

    def has(self, request_id: str, owner: str) -> bool:
        return owner in self._by_id.get(request_id, ())

    def ids(self) -> list[str]:
        return list(self._by_id)

    def of_id(self, request_id: str) -> list[Stream]:
        return list(self._by_id.get(request_id, {}).values())

    def of_internal_id(self, internal_id: str) -> Stream | None:
        return self._by_internal_id.get(internal_id)

    def open(self, request_id: str, owner: str, params: SamplingParams, arrival: float) -> Stream:
        # A request id may be reused before the engine ends its first request.
        self._num_opened += 1
        stream = Stream(request_id, owner, f"{self._num_opened}", params, arrival)
        self._by_id.setdefault(request_id, {})[owner] = self._by_internal_id[stream.internal_id] = stream
        self._num_awaited += 1
        self._idle.clear()
        self._quiet.clear()
        return stream

    def close(self, stream: Stream) -> None:
        owners = self._by_id[stream.request_id]
        del owners[stream.owner], self._by_internal_id[stream.internal_id]
        if not owners:
            del self._by_id[stream.request_id]
        self.note_over(stream)
        if not self._by_internal_id:
            self._idle.set()

    def note_over(self, stream: Stream) -> None:
        if not stream.is_over:
            stream.is_over = True
            self._num_awaited -= 1
            if self._num_awaited == 0:
                self._quiet.set()

    def fail(self, stream: Stream, error: BaseException) -> None:
        stream.fail(error)
        self.note_over(stream)

    def fail_all(self, error: BaseException) -> None:
        for stream in list(self._by_internal_id.values()):
            self.fail(stream, error)

    async def wait_quiet(self) -> None:
        await self._quiet.wait()

    async def wait_idle(self) -> None:
        await self._idle.wait()


def merge(pending: RequestOutput, new: RequestOutput) -> None:
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
        if part.weight_versions is not None and completion.weight_versions is not None:
            part.weight_versions += completion.weight_versions
        part.cumulative_logprob = completion.cumulative_logprob
        part.finish_reason, part.stop_reason = completion.finish_reason, completion.stop_reason
    pending.finished, pending.metrics = new.finished, new.metrics
    pending.num_cached_tokens = new.num_cached_tokens
    pending.kv_transfer_params = new.kv_transfer_params
    if new.prompt_logprobs is not None:
        pending.prompt_logprobs = new.prompt_logprobs
