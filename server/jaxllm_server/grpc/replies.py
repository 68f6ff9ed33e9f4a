"""Convert `Chunk`s to `jaxllm.v1` responses and stream messages. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from google.protobuf.duration_pb2 import Duration

from jaxllm.client import reading
from jaxllm.outputs import Logprob
from jaxllm.sampling_params import MAX_REPORTED_TOKENS, SamplingParams
from jaxllm.scheduler.state import AllBlocksCleared, BlockRemoved, BlockStored
from jaxllm.v1 import control_pb2, inference_pb2, types_pb2
from jaxllm_server.grpc.reading import SAMPLING_NAMES

if TYPE_CHECKING:
    from jaxllm.engine.kv_events import BlockBatch
    from jaxllm_server.generation.calls import Chunk, Part, Timing, TokenUsage
    from jaxllm_server.parsers.tool_parsers import ToolCallDelta


FINISH_REASONS: Mapping[str | None, types_pb2.FinishReason] = {
    None: types_pb2.FINISH_REASON_UNSPECIFIED,
    **{reason: number for number, reason in reading.FINISH_REASONS.items()},
}


@dataclass
class Reply:
    """An answer's options and progress."""

    model: str
    has_text: bool = True
    has_token_ids: bool = True
    has_prompt_token_ids: bool = False
    num_logprobs: int | None = None  # alternatives per row; -1: the vocabulary
    num_prompt_logprobs: int | None = None
    asked: tuple[int, ...] = ()  # logprob_token_ids
    has_logprob_texts: bool = False
    has_usage_always: bool = False
    _sent: dict[int, int] = field(default_factory=dict)  # by index
    _seeded: set[int] = field(default_factory=set)
    _is_begun: bool = False

    def response(self, chunk: Chunk) -> inference_pb2.GenerateResponse:
        response = inference_pb2.GenerateResponse(
            request_id=chunk.request_id, model=self.model, prompt=self._prompt(chunk), usage=usage_of(chunk.usage)
        )
        for part in chunk.outputs:
            output = response.outputs.add()
            self._fill(output, part)
            if part.tool_calls:
                output.tool_calls.extend(whole_calls(part.tool_calls))
        if chunk.timing is not None:
            response.timing.CopyFrom(timing_of(chunk.timing))
        return response

    def delta(self, chunk: Chunk) -> inference_pb2.StreamGenerateResponse | None:
        """Return the next stream message, or None without data."""
        # Filled in place: nested constructors take twice as long.
        response = inference_pb2.StreamGenerateResponse()
        for part in chunk.outputs:
            if self._is_news(part):
                delta = response.deltas.add()
                self._fill(delta, part)
                if part.tool_calls:
                    delta.tool_calls.extend(call_deltas(part.tool_calls))
        if not self._is_begun:
            self._is_begun = True
            response.request_id = chunk.request_id
            response.model = self.model
            response.prompt.CopyFrom(self._prompt(chunk))
        elif not (response.deltas or chunk.is_last):
            return None
        if chunk.is_last or self.has_usage_always:
            response.usage.CopyFrom(usage_of(chunk.usage))
        if chunk.is_last and chunk.timing is not None:
            response.timing.CopyFrom(timing_of(chunk.timing))
        return response

    def _is_news(self, part: Part) -> bool:
        return bool(
            part.text
            or part.finish_reason is not None
            or part.reasoning
            or part.tool_calls
            or (part.token_ids and (self.has_token_ids or self.num_logprobs is not None))
        )

    def _fill(self, message: types_pb2.Output | types_pb2.OutputDelta, part: Part) -> None:
        ids = part.token_ids
        message.index = part.index
        if part.text and self.has_text:
            message.text = part.text
        if ids and (self.has_token_ids or self.num_logprobs is not None):
            message.token_ids.extend(ids)
        if part.logprobs and self.num_logprobs is not None:
            first = self._sent.get(part.index, 0)
            rows = logprobs_of(
                part.logprobs, self.num_logprobs, first, with_texts=self.has_logprob_texts, asked=self.asked
            )
            message.logprobs.CopyFrom(rows)
            self._sent[part.index] = first + len(ids)
        if part.reasoning:
            message.reasoning_text = part.reasoning
        if part.seed is not None and part.index not in self._seeded:
            self._seeded.add(part.index)
            message.seed = part.seed
        if part.finish_reason is not None:
            message.finish_reason = FINISH_REASONS[part.finish_reason]
            if isinstance(part.stop_reason, str) and part.finish_reason == "stop":
                message.stop_string = part.stop_reason
            elif isinstance(part.stop_reason, int):
                message.stop_token_id = part.stop_reason

    def _prompt(self, chunk: Chunk) -> types_pb2.PromptInfo:
        assert chunk.prompt is not None
        prompt, wanted = chunk.prompt, self.num_prompt_logprobs
        rows = [row for row in prompt.logprobs or () if row is not None]
        return types_pb2.PromptInfo(
            token_count=len(prompt.token_ids),
            cached_token_count=prompt.num_cached,
            token_ids=prompt.token_ids if self.has_prompt_token_ids or wanted is not None else (),
            logprobs=None if wanted is None else logprobs_of(rows, wanted, 1, with_texts=self.has_logprob_texts),
        )


def reply_of(request: inference_pb2.GenerateRequest, model: str) -> Reply:
    output = request.output
    return Reply(
        model=model,
        has_text=output.text if output.HasField("text") else True,
        has_token_ids=output.token_ids if output.HasField("token_ids") else True,
        has_prompt_token_ids=output.prompt_token_ids,
        num_logprobs=output.logprobs if output.HasField("logprobs") else 0 if output.logprob_token_ids else None,
        num_prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
        asked=tuple(dict.fromkeys(output.logprob_token_ids[:MAX_REPORTED_TOKENS])),  # more are refused
        has_logprob_texts=output.logprob_texts,
        has_usage_always=request.stream.usage_every_message,
    )


def logprobs_of(
    rows: Sequence[Mapping[int, Logprob]],
    top_k: int,
    first_position: int,
    *,
    with_texts: bool,
    asked: Sequence[int] = (),
) -> types_pb2.Logprobs:
    """Pack log-probabilities: the sampled token and exactly `top_k` alternatives per row, likeliest first.

    A row maps the sampled token, the likeliest in order, then others of `asked`. `top_k` -1 is the vocabulary. Packed
    arrays take 2.6 µs per token with 20 alternatives, one message per alternative 19.6 µs.
    """
    chosen = [next(iter(row.values())) for row in rows]
    tops = [_likeliest(row, top_k) for row in rows]
    packed = types_pb2.Logprobs(
        first_position=first_position,
        logprobs=[entry.logprob for entry in chosen],
        ranks=[entry.rank or 0 for entry in chosen],
        top_k=len(tops[0]) if tops else max(0, top_k),
        asked_logprobs=[row[token].logprob for row in rows for token in asked],
        top_token_ids=[token for top in tops for token, _ in top],
        top_logprobs=[entry.logprob for top in tops for _, entry in top],
    )
    if with_texts:
        packed.texts.extend(entry.decoded_token or "" for entry in chosen)
        packed.top_texts.extend(entry.decoded_token or "" for top in tops for _, entry in top)
    return packed


def _likeliest(row: Mapping[int, Logprob], top_k: int) -> list[tuple[int, Logprob]]:
    first, *others = row.items()
    likeliest = [entry for entry in others if entry[1].rank is not None]
    if len(likeliest) == top_k:
        return likeliest
    return sorted([first, *likeliest], key=lambda entry: -entry[1].logprob)


def whole_calls(deltas: Iterable[ToolCallDelta]) -> list[types_pb2.ToolCall]:
    calls: dict[int, types_pb2.ToolCall] = {}
    for delta in deltas:
        call = calls.setdefault(delta.index, types_pb2.ToolCall())
        call.id += delta.id or ""
        call.name += delta.name or ""
        call.arguments_json += delta.arguments
    return [calls[index] for index in sorted(calls)]


def call_deltas(deltas: Iterable[ToolCallDelta]) -> list[types_pb2.ToolCallDelta]:
    return [
        types_pb2.ToolCallDelta(
            index=delta.index, id=delta.id or "", name=delta.name or "", arguments_json=delta.arguments
        )
        for delta in deltas
    ]


def usage_of(usage: TokenUsage) -> types_pb2.Usage:
    return types_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )


def timing_of(timing: Timing) -> types_pb2.Timing:
    spans = {name: getattr(timing, name) for name in ("queue", "prefill", "first_token", "total")}
    return types_pb2.Timing(**{name: duration_of(span) for name, span in spans.items() if span is not None})


def duration_of(seconds: float) -> Duration:
    whole, nanos = divmod(round(seconds * 1e9), 10**9)
    return Duration(seconds=whole, nanos=nanos)


def kv_events_of(batch: BlockBatch) -> control_pb2.StreamKvEventsResponse:
    """Convert changes of the prefix cache in order; adjacent ones of a kind and adapter form one event."""
    response = control_pb2.StreamKvEventsResponse(sequence=batch.sequence)
    response.time.FromNanoseconds(round(batch.time * 1e9))
    for (kind, adapter), changes in groupby(batch.events, lambda event: (type(event), getattr(event, "adapter", 0))):
        event = response.events.add()
        if kind is AllBlocksCleared:
            event.cleared.SetInParent()
        if adapter:
            event.stored.adapter = batch.adapters[adapter]
        for change in changes:
            if isinstance(change, BlockRemoved):
                event.removed.hashes.append(_hash(change.digest))
            elif isinstance(change, BlockStored):
                event.stored.block_size = batch.block_size
                block = event.stored.blocks.add(hash=_hash(change.digest), token_ids=change.tokens)
                if change.parent is not None:
                    block.parent_hash = _hash(change.parent)
    return response


def _hash(digest: bytes) -> int:
    """Return a block's hash as 64 bits, unique within a server."""
    return int.from_bytes(digest[:8], "big")


def default_sampling_of(params: SamplingParams) -> types_pb2.SamplingParams:
    names = [own for own in SAMPLING_NAMES["sampling"] if getattr(SamplingParams, own) not in (None, ())]
    return types_pb2.SamplingParams(**{own: getattr(params, own) for own in names})


def default_stop_of(params: SamplingParams, max_tokens: int | None) -> types_pb2.StopConditions:
    """Describe default stop conditions; `max_tokens` None: until the context is full."""
    return types_pb2.StopConditions(
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        stop_strings=params.stop,
        stop_token_ids=params.stop_token_ids,
        include_stop=params.include_stop_str_in_output,
        ignore_eos=params.ignore_eos,
    )
