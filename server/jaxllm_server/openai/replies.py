"""Common parts of OpenAI's responses. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from jaxllm.errors import UserError
from jaxllm.outputs import Logprob
from jaxllm_server.generation.calls import Chunk, Part, TokenUsage
from jaxllm_server.requests.form import Form
from jaxllm_server.shared.error_table import code_of, message_of, row_of

LEAST_LOGPROB = -9999.0  # replaces -inf, absent in JSON, as in vLLM
_FINISH_REASONS = {"context": "length", "time_limit": "length"}


def finish_reason(part: Part) -> str | None:
    reason = part.finish_reason
    return None if reason is None else _FINISH_REASONS.get(reason, reason)


def usage_without(usage: TokenUsage, parts: Iterable[Part]) -> TokenUsage:
    """Return usage without parts that are not sent yet."""
    parts = list(parts)
    return replace(
        usage,
        completion_tokens=usage.completion_tokens - sum(len(part.token_ids) for part in parts),
        reasoning_tokens=usage.reasoning_tokens - sum(part.num_reasoning for part in parts),
    )


def usage_fields(usages: Iterable[TokenUsage], form: Form) -> dict[str, Any]:
    prompt = completion = cached = reasoning = 0
    for usage in usages:
        prompt += usage.prompt_tokens
        completion += usage.completion_tokens
        cached += usage.cached_prompt_tokens
        reasoning += usage.reasoning_tokens
    fields: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if form.shows_cached:
        fields["prompt_tokens_details"] = {"cached_tokens": cached}
    if form.shows_reasoning:
        fields["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return fields


def transfer_fields(chunk: Chunk) -> dict[str, Any]:
    params = chunk.kv_transfer_params
    return {} if params is None else {"kv_transfer_params": dict(params)}


def token_name(token: int, entry: Logprob, form: Form, before_bytes: str = "") -> str:
    """Return a token's text.

    For a partial character: its bytes as `\\xNN` after `before_bytes`. Without text, or if the form requires ids:
    `token_id:N`.
    """
    if form.tokens_as_ids or not entry.decoded_token:
        return f"token_id:{token}"
    if entry.raw_bytes is None:
        return entry.decoded_token
    return before_bytes + "".join(f"\\x{byte:02x}" for byte in entry.raw_bytes)


def reported(entries: Sequence[dict[int, Logprob]] | None, form: Form) -> Sequence[dict[int, Logprob]] | None:
    """Return the tokens to report at each position, the sampled one first.

    With `logprob_token_ids`, only sampled and listed tokens, as in vLLM.
    """
    ids = form.logprob_ids
    if entries is None or not ids:
        return entries
    return [
        {token: entry for place, (token, entry) in enumerate(candidates.items()) if place == 0 or token in ids}
        for candidates in entries
    ]


def prompt_logprobs_of(entries: Sequence[dict[int, Logprob] | None] | None) -> list[dict[str, Any] | None] | None:
    if entries is None:
        return None
    return [
        None
        if candidates is None
        else {
            str(token): {"logprob": finite(entry), "rank": entry.rank, "decoded_token": entry.decoded_token}
            for token, entry in candidates.items()
        }
        for candidates in entries
    ]


def finite(entry: Logprob) -> float:
    return max(LEAST_LOGPROB, entry.logprob)  # this order replaces NaN too


def error_body(message: str, kind: str, parameter: str | None, reason: str) -> dict[str, dict[str, Any]]:
    return {"error": {"message": message, "type": kind, "param": parameter, "code": code_of(reason)}}


def error_body_of(error: BaseException) -> dict[str, dict[str, Any]]:
    row = row_of(error)
    parameter = error.parameter if isinstance(error, UserError) else None
    return error_body(message_of(error), row.kind, parameter, row.reason)


def model_card(name: str, root: str, created: int, max_model_len: int, parent: str | None = None) -> dict[str, Any]:
    """Describe a served model.

    `root` is the model's path, as in vLLM, where local clients find the tokenizer, or an adapter's source; `parent` is
    an adapter's model. `created` is in seconds since 1970.
    """
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "jaxllm",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [],
    }


def model_list(cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": cards}
