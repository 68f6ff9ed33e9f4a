"""Convert protobuf messages into the client's results."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC
from typing import Any

from google.rpc import code_pb2, status_pb2

from jaxllm.client.errors import read_error
from jaxllm.client.options import keyword_of
from jaxllm.client.results import (
    Adapter,
    Classification,
    Completion,
    Delta,
    Embedding,
    ModelInfo,
    Output,
    Scores,
    ServerInfo,
    Timing,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
    WeightInfo,
)
from jaxllm.metrics import Load
from jaxllm.v1 import control_pb2, inference_pb2, types_pb2

FINISH_REASONS = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_CONTEXT: "context",
    types_pb2.FINISH_REASON_TIME_LIMIT: "time_limit",
    types_pb2.FINISH_REASON_ABORTED: "abort",
    types_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
    types_pb2.FINISH_REASON_REPETITION: "repetition",
}


@dataclass(slots=True)
class _Pieces:
    """The deltas of a sequence, joined on demand: repeated concatenation is quadratic."""

    deltas: list[Delta] = field(default_factory=list)

    def joined(self, index: int) -> Output:
        last = [delta for delta in self.deltas if delta.finish_reason is not None][-1:]
        logprobs = [delta.logprobs for delta in self.deltas if delta.logprobs is not None]
        return Output(
            index=index,
            text="".join(delta.text for delta in self.deltas),
            token_ids=[token for delta in self.deltas for token in delta.token_ids],
            logprobs=[row for rows in logprobs for row in rows] if logprobs else None,
            finish_reason=last[0].finish_reason if last else None,
            stop_reason=last[0].stop_reason if last else None,
            reasoning="".join(delta.reasoning for delta in self.deltas),
            tool_calls=self._tool_calls(),
            seed=next((delta.seed for delta in self.deltas if delta.seed is not None), None),
        )

    def _tool_calls(self) -> list[ToolCall]:
        calls: dict[int, list[ToolCallDelta]] = {}
        for delta in self.deltas:
            for call in delta.tool_calls:
                calls.setdefault(call.index, []).append(call)
        return [
            ToolCall(pieces[0].id, pieces[0].name, "".join(piece.arguments for piece in pieces))
            for _, pieces in sorted(calls.items())
        ]


class Joiner:
    """Accumulates the messages of a stream."""

    def __init__(self) -> None:
        self.request_id = ""
        self.model = ""
        self.usage: Usage | None = None
        self.timing: Timing | None = None
        self._prompt: types_pb2.PromptInfo | None = None
        self._pieces: dict[int, _Pieces] = {}

    def add(self, message: inference_pb2.StreamGenerateResponse) -> list[Delta]:
        self.request_id = message.request_id or self.request_id
        self.model = message.model or self.model
        if message.HasField("prompt"):
            self._prompt = message.prompt
        if message.HasField("usage"):
            self.usage = _usage(message.usage)
        if message.HasField("timing"):
            self.timing = _timing(message.timing)
        deltas = [_delta(delta) for delta in message.deltas]
        for delta in deltas:
            self._pieces.setdefault(delta.index, _Pieces()).deltas.append(delta)
        return deltas

    def completion(self) -> Completion:
        return Completion(
            request_id=self.request_id,
            model=self.model,
            outputs=[pieces.joined(index) for index, pieces in sorted(self._pieces.items())],
            usage=self.usage,
            timing=self.timing,
            **({} if self._prompt is None else _prompt(self._prompt)),
        )


class Received:
    """Base of the streams: all deltas, and the unread ones."""

    def __init__(self) -> None:
        self._joiner = Joiner()
        self._unread: deque[Delta] = deque()

    def _take(self, message: inference_pb2.StreamGenerateResponse) -> None:
        self._unread.extend(self._joiner.add(message))

    @property
    def request_id(self) -> str:
        """The request's id, for `abort`; empty before the first message."""
        return self._joiner.request_id

    @property
    def usage(self) -> Usage | None:
        """Token counts at the end of the stream; so far, with `usage_every_message`."""
        return self._joiner.usage

    @property
    def timing(self) -> Timing | None:
        """Durations of the request's phases, at its end."""
        return self._joiner.timing

    @property
    def so_far(self) -> Completion:
        """All deltas received, as a completion."""
        return self._joiner.completion()


class ReceivedEmbeddings:
    """The received, unread embeddings of a stream."""

    _target: str

    def __init__(self) -> None:
        self._unread: deque[Embedding] = deque()

    def _take(self, message: inference_pb2.EmbedResponse) -> None:
        if message.error:
            status = status_pb2.Status.FromString(message.error)
            raise read_error(code_pb2.Code.Name(status.code), status.message, message.error, self._target)
        self._unread.append(read_embedding(message))


def read_completion(response: inference_pb2.GenerateResponse) -> Completion:
    return Completion(
        request_id=response.request_id,
        model=response.model,
        outputs=[_output(output) for output in response.outputs],
        usage=_usage(response.usage) if response.HasField("usage") else None,
        timing=_timing(response.timing) if response.HasField("timing") else None,
        **_prompt(response.prompt),
    )


def read_embedding(response: inference_pb2.EmbedResponse) -> Embedding:
    return Embedding(values=list(response.values), index=response.index, **_pooled(response))


def read_classification(response: inference_pb2.ClassifyResponse) -> Classification:
    return Classification(label=response.label, values=list(response.values), **_pooled(response))


def read_scores(response: inference_pb2.ScoreResponse) -> Scores:
    return Scores(values=list(response.scores), **_pooled(response))


def read_models(response: inference_pb2.ListModelsResponse) -> list[ModelInfo]:
    return [
        ModelInfo(
            name=model.name,
            aliases=tuple(model.aliases),
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=tuple(model.eos_token_ids),
            defaults=_defaults(model),
            has_chat=model.has_chat,
            has_tool_calls=model.has_tool_calls,
            has_reasoning=model.has_reasoning,
            tasks=tuple(model.tasks),
            pooled_size=model.pooling.size,
            dimensions=tuple(model.pooling.dimensions) if model.pooling.takes_dimensions else None,
            labels=tuple(model.pooling.labels),
            parent=model.parent,
        )
        for model in response.models
    ]


def read_server_info(response: control_pb2.GetServerInfoResponse) -> ServerInfo:
    state = control_pb2.ServerState.Name(response.state) if response.state in control_pb2.ServerState.values() else ""
    return ServerInfo(
        version=response.version,
        api_revision=response.api_revision,
        instance_id=response.instance_id,
        start_time=response.start_time.ToDatetime(tzinfo=UTC),
        state=state.removeprefix("SERVER_STATE_").lower() or "unknown",
        model_names=tuple(response.model_names),
        max_model_len=response.max_model_len,
        max_num_seqs=response.max_num_seqs,
        max_num_batched_tokens=response.max_num_batched_tokens,
        block_size=response.block_size,
        kv_blocks_total=response.kv_blocks_total,
        dtype=response.dtype,
        device_kind=response.device_kind,
        mesh=dict(response.mesh),
    )


def read_load(response: control_pb2.GetLoadResponse) -> Load:
    return Load(
        running=response.running,
        waiting=response.waiting,
        waiting_tokens=response.waiting_prompt_tokens_uncached,
        kv_blocks_used=response.kv_blocks_used,
        kv_blocks_total=response.kv_blocks_total,
        max_running=response.max_running,
        generated_tokens_per_second=response.generated_tokens_per_second,
        prefix_hit_rate=response.prefix_hit_rate,
        step_seconds=response.step_time.ToNanoseconds() / 1e9,
        running_adapters=tuple(response.running_adapters),
        waiting_adapters=tuple(response.waiting_adapters),
    )


def read_adapters(response: control_pb2.ListAdaptersResponse) -> list[Adapter]:
    return [Adapter(adapter.name, adapter.source, adapter.rank) for adapter in response.adapters]


def read_token_ids(response: inference_pb2.TokenizeResponse) -> list[int]:
    return list(response.token_ids)


def read_text(response: inference_pb2.DetokenizeResponse) -> str:
    return response.text


def read_was_reset(response: control_pb2.ResetPrefixCacheResponse) -> bool:
    return response.was_reset


def read_weight_info(response: control_pb2.GetWeightInfoResponse) -> WeightInfo:
    return WeightInfo(response.weight_version, response.is_sleeping, response.is_paused)


def read_weight_version(response: Any) -> str:
    return response.weight_version


def read_nothing(response: object) -> None:
    """Ignore an empty response."""


def _pooled(
    response: inference_pb2.EmbedResponse | inference_pb2.ClassifyResponse | inference_pb2.ScoreResponse,
) -> dict[str, Any]:
    return {
        "prompt_tokens": response.usage.prompt_tokens,
        "request_id": response.request_id,
        "model": response.model,
    }


def _sequence(output: types_pb2.Output | types_pb2.OutputDelta) -> dict[str, Any]:
    return {
        "index": output.index,
        "text": output.text,
        "token_ids": list(output.token_ids),
        "logprobs": _logprobs(output),
        "finish_reason": _finish_reason(output),
        "stop_reason": _stop_reason(output),
        "reasoning": output.reasoning_text,
        "seed": output.seed if output.HasField("seed") else None,
    }


def _output(output: types_pb2.Output) -> Output:
    calls = [ToolCall(call.id, call.name, call.arguments_json) for call in output.tool_calls]
    return Output(**_sequence(output), tool_calls=calls)


def _delta(delta: types_pb2.OutputDelta) -> Delta:
    calls = [ToolCallDelta(call.index, call.id, call.name, call.arguments_json) for call in delta.tool_calls]
    return Delta(**_sequence(delta), tool_calls=calls)


def _finish_reason(output: types_pb2.Output | types_pb2.OutputDelta) -> str | None:
    if output.finish_reason == types_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    return FINISH_REASONS.get(output.finish_reason, "unknown")  # a newer server's reason


def _stop_reason(output: types_pb2.Output | types_pb2.OutputDelta) -> int | str | None:
    matched = output.WhichOneof("matched")
    return getattr(output, matched) if matched else None


def _prompt(prompt: types_pb2.PromptInfo) -> dict[str, Any]:
    ids = list(prompt.token_ids)
    logprobs = [None, *_rows(ids[1:], prompt.logprobs)] if prompt.HasField("logprobs") else None
    return {"prompt_token_ids": ids or None, "prompt_logprobs": logprobs}


def _logprobs(output: types_pb2.Output | types_pb2.OutputDelta) -> list[TokenLogprob] | None:
    return _rows(output.token_ids, output.logprobs) if output.HasField("logprobs") else None


def _rows(token_ids: Sequence[int], packed: types_pb2.Logprobs) -> list[TokenLogprob]:
    texts: Sequence[str | None] = packed.texts or [None] * len(packed.logprobs)
    num_asked = len(packed.asked_logprobs) // max(1, len(packed.logprobs))
    rows = zip(token_ids, packed.logprobs, packed.ranks, texts, strict=True)
    return [
        TokenLogprob(
            token,
            logprob,
            rank,
            text,
            tuple(_alternatives(packed, row)),
            tuple(packed.asked_logprobs[row * num_asked : (row + 1) * num_asked]),
        )
        for row, (token, logprob, rank, text) in enumerate(rows)
    ]


def _alternatives(packed: types_pb2.Logprobs, row: int) -> Iterator[TokenLogprob]:
    for rank in range(1, packed.top_k + 1):
        at = row * packed.top_k + rank - 1
        text = packed.top_texts[at] if packed.top_texts else None
        yield TokenLogprob(packed.top_token_ids[at], packed.top_logprobs[at], rank, text)


def _usage(usage: types_pb2.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens, usage.reasoning_tokens)


def _timing(timing: types_pb2.Timing) -> Timing:
    parts = {
        name: getattr(timing, name).ToNanoseconds() / 1e9 if timing.HasField(name) else None
        for name in ("queue", "prefill", "first_token", "total")
    }
    return Timing(**parts)


def _defaults(model: inference_pb2.Model) -> dict[str, Any]:
    sections = (("sampling", model.default_sampling), ("stop", model.default_stop))
    return {
        keyword_of(f"{section}.{descriptor.name}"): list(value) if descriptor.is_repeated else value
        for section, message in sections
        for descriptor, value in message.ListFields()
        if descriptor.message_type is None
    }
