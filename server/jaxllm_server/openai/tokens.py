"""vLLM's `/tokenize` and `/detokenize`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxllm.errors import UserError
from jaxllm.value_types import types_of
from jaxllm_server.generation.calls import Call
from jaxllm_server.openai.conversation import CONVERSATION, conversation_of
from jaxllm_server.requests.fields import Body, flag, text
from jaxllm_server.requests.shared_fields import given

TEXT_FIELDS = frozenset({"model", "prompt", "add_special_tokens", "return_token_strs"})
CHAT_FIELDS = CONVERSATION | {"model", "add_special_tokens", "return_token_strs"}
DETOKENIZE_FIELDS = frozenset({"model", "tokens"})


def tokenize_call_of(body: Body, policy: str = "refuse", ignored: list[str] | None = None) -> tuple[Call, bool]:
    """Return the call, and whether to return the tokens' spellings."""
    is_chat = "messages" in body
    fields = given(body, CHAT_FIELDS if is_chat else TEXT_FIELDS, {}, policy, ignored)
    if is_chat:
        prompt: dict[str, Any] = conversation_of(fields)
    else:
        prompt = {"prompt": text(fields, "prompt")}
        if prompt["prompt"] is None:
            raise UserError("prompt or messages is missing: there is nothing to tokenize.", "prompt")
    add = flag(fields, "add_special_tokens", None)
    call = Call(model=text(fields, "model") or "", add_special_tokens=add, **prompt)
    return call, bool(flag(fields, "return_token_strs", False))


def tokens_response(ids: Sequence[int], max_model_len: int, pieces: Sequence[str] | None) -> dict[str, Any]:
    return {"count": len(ids), "max_model_len": max_model_len, "tokens": list(ids), "token_strs": pieces}


def detokenize_request_of(
    body: Body, policy: str = "refuse", ignored: list[str] | None = None
) -> tuple[str, list[int]]:
    """Return the model's name and unchecked token ids."""
    fields = given(body, DETOKENIZE_FIELDS, {}, policy, ignored)
    tokens = fields.get("tokens")
    if not isinstance(tokens, list) or types_of(tokens) - {int}:
        raise UserError("tokens must be a list of token ids.", "tokens")
    return text(fields, "model") or "", tokens
