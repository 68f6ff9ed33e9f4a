"""vLLM's `/inference/v1/generate`: token ids to one call, chunks to token ids. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.errors import UserError
from jaxllm.value_types import types_of
from jaxllm_server.generation.calls import Call, Chunk, Part, TokenUsage
from jaxllm_server.openai.chat import logprobs_of
from jaxllm_server.openai.replies import finish_reason, prompt_logprobs_of, transfer_fields, usage_fields
from jaxllm_server.requests.constraints import FIELDS as CONSTRAINTS
from jaxllm_server.requests.fields import Body, flag, integer, mapping, text
from jaxllm_server.requests.form import form_of
from jaxllm_server.requests.shared_fields import SAMPLING, given, sampling_of
from jaxllm_server.shared.options import ServerOptions

_UNBUILT: Mapping[str, tuple[Any, ...]] = {"features": ({},)}
_FIELDS = frozenset(
    {
        "token_ids",
        "sampling_params",
        "model",
        "stream",
        "stream_options",
        "request_id",
        "priority",
        "cache_salt",
        "kv_transfer_params",
    }
    | _UNBUILT.keys()
)
_SAMPLING = SAMPLING | CONSTRAINTS | {"logprobs", "detokenize", "vllm_xargs"}


class GenerateReply:
    """Reads a request of `/inference/v1/generate` and builds its answer. Text is made only for `stop`."""

    fields, unbuilt = _FIELDS, _UNBUILT
    id_prefix = ""
    object = chunk_object = "inference.generate"

    def __init__(self, body: Body, options: ServerOptions, request_id: str) -> None:
        self.ignored: list[str] = []
        fields = given(body, _FIELDS, _UNBUILT, options.unknown_fields, self.ignored)
        ids = fields.get("token_ids")
        if not isinstance(ids, list) or not ids or types_of(ids) != {int}:
            raise UserError("token_ids must be a list of at least one token id.", "token_ids")
        params = given(mapping(fields, "sampling_params") or {}, _SAMPLING, {}, options.unknown_fields, self.ignored)
        num_logprobs = params.get("logprobs", 0 if params.get("logprob_token_ids") else None)
        sampling = sampling_of({**params, "stream": fields.get("stream")})
        if "logprobs" in params:
            sampling["logprobs"] = params["logprobs"]
        sampling["detokenize"] = bool(flag(params, "detokenize", "stop" in params))
        self.form = form_of({**params, **fields, "return_tokens_as_token_ids": True}, options, num_logprobs)
        self.is_stream = self.form.stream
        self.names: Mapping[str, str] = {"prompt": "token_ids", "prompt_token_ids": "token_ids"}
        own_id = text(fields, "request_id")
        self.request_id = request_id if own_id is None else own_id
        self.calls: Sequence[Call] = [
            Call(
                prompt=ids,
                sampling=sampling,
                request_id=self.request_id,
                model=text(fields, "model") or "",
                priority=integer(fields, "priority", 0),
                cache_salt=text(fields, "cache_salt"),
                kv_transfer_params=mapping(fields, "kv_transfer_params") or None,
                stream=self.is_stream,
            )
        ]
        self._usage: list[TokenUsage] = []

    def response(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        (chunk,) = chunks
        shown = self.form.shows_prompt_logprobs and chunk.prompt is not None
        return {
            "request_id": self.request_id,
            "choices": [self._choice(part) for part in chunk.outputs],
            "prompt_logprobs": prompt_logprobs_of(chunk.prompt.logprobs) if shown and chunk.prompt else None,
            "kv_transfer_params": None,
            "usage": usage_fields([chunk.usage], self.form),
        } | transfer_fields(chunk)

    def events(self, number: int, chunk: Chunk) -> list[dict[str, Any]]:
        self._usage = [chunk.usage]
        parts = [part for part in chunk.outputs if part.token_ids or part.finish_reason]
        events = [{"request_id": self.request_id, "choices": [self._choice(part)]} for part in parts]
        if events:
            events[-1] |= transfer_fields(chunk)
        return events

    def last_event(self) -> dict[str, Any] | None:
        return {"choices": [], "usage": usage_fields(self._usage, self.form)} if self.form.include_usage else None

    def _choice(self, part: Part) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": part.index,
            "token_ids": list(part.token_ids),
            "logprobs": logprobs_of(part.logprobs, self.form),
            "finish_reason": finish_reason(part),
        }
        if part.weight_versions is not None:
            runs = [{"version": version, "num_tokens": count} for version, count in part.weight_versions]
            choice["weight_versions"] = runs
        return choice
