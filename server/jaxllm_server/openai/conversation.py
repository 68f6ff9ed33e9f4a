"""Reads the prompt of a chat request. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.errors import UserError
from jaxllm.value_types import types_of
from jaxllm_server.requests.fields import Body, flag, mapping, one_of

CONVERSATION = frozenset(
    (
        *("messages", "tools", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "chat_template_kwargs", "reasoning_effort", "mm_processor_kwargs"),
        # Thinking: DashScope and SGLang; Ollama; Z.ai and DeepSeek.
        *("enable_thinking", "think", "thinking"),
    )
)
_OF_WRITING = ("add_generation_prompt", "continue_final_message", "add_special_tokens")
REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def conversation_of(fields: Body) -> dict[str, Any]:
    """Return the prompt's `Call` fields; tools and template variables are validated later.

    `prompt_token_ids` replace the rendered prompt (vllm-project/vllm#55771); messages then only serve for echo.
    """
    if "chat_template" in fields:
        raise UserError(
            "chat_template is not accepted in requests: start the server with --chat-template.", "chat_template"
        )
    written = _written_ids(fields)
    messages = fields.get("messages", None if written is None else [])
    kwargs = _thinking(fields) | dict(mapping(fields, "chat_template_kwargs") or {})
    effort = one_of(fields, "reasoning_effort", REASONING_EFFORTS)
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        kwargs.setdefault("enable_thinking", effort != "none")  # as in vLLM: most templates ignore reasoning_effort
    return ({} if written is None else {"written_ids": written}) | {
        "messages": messages_of(messages, may_be_empty=written is not None),
        "tools": _tools(fields.get("tools")),
        "template_kwargs": kwargs,
        "mm_processor_kwargs": mapping(fields, "mm_processor_kwargs") or {},
        "add_generation_prompt": flag(fields, "add_generation_prompt", True),
        "continue_final_message": flag(fields, "continue_final_message", False),
    }


def messages_of(messages: Any, name: str = "messages", may_be_empty: bool = False) -> list[Mapping[str, Any]]:
    if not isinstance(messages, list) or not (messages or may_be_empty):
        raise UserError(f"{name} must be a list of at least one message.", "messages")
    return [_message_in(message, f"{name}[{index}]") for index, message in enumerate(messages)]


def _written_ids(fields: Body) -> list[int] | None:
    """Return unchecked `prompt_token_ids`, or None; refuse fields that would not affect them."""
    ids = fields.get("prompt_token_ids")
    if ids is None:
        return None
    if not isinstance(ids, list) or types_of(ids) != {int}:
        raise UserError("prompt_token_ids must be a list of token ids.", "prompt_token_ids")
    for name in _OF_WRITING:
        if name in fields:
            raise UserError(
                f"{name} has no effect on prompt_token_ids, which are a rendered prompt; remove one of them.", name
            )
    return ids


def with_transferred_ids(body: Body) -> Body:
    """Move `prompt_token_ids` out of `kv_transfer_params`, vLLM's place; raise UserError if both differ."""
    transfer = body.get("kv_transfer_params")
    if not isinstance(transfer, dict) or transfer.get("prompt_token_ids") is None:
        return body
    if body.get("prompt_token_ids") not in (None, transfer["prompt_token_ids"]):
        raise UserError("prompt_token_ids differ from those of kv_transfer_params.", "prompt_token_ids")
    rest = {name: value for name, value in transfer.items() if name != "prompt_token_ids"}
    return {**body, "kv_transfer_params": rest, "prompt_token_ids": transfer["prompt_token_ids"]}


def _thinking(fields: Body) -> dict[str, Any]:
    """Return template variables for the switches `enable_thinking`, `think` and `thinking`, which must not differ.

    Sets `enable_thinking` for Qwen and GLM, `thinking` for DeepSeek and Kimi, as in SGLang. `think` may be an effort.
    """
    said: dict[str, Any] = {"enable_thinking": flag(fields, "enable_thinking", None)}
    level = fields.get("think")
    if isinstance(level, bool):
        said["think"] = level
    elif level is not None and level not in ("low", "medium", "high"):
        raise UserError("think must be true, false, low, medium or high.", "think")
    asked = mapping(fields, "thinking")
    if asked is not None:
        kind = asked.get("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise UserError("thinking.type must be enabled, disabled or adaptive.", "thinking")
        said["thinking"] = kind != "disabled"
    wanted = {name: value for name, value in said.items() if value is not None}
    if len(set(wanted.values())) > 1:
        raise UserError(f"{' and '.join(wanted)} differ: give one of them.", next(iter(wanted)))
    kwargs = dict.fromkeys(("enable_thinking", "thinking"), next(iter(wanted.values()))) if wanted else {}
    return kwargs | ({"reasoning_effort": level} if isinstance(level, str) else {})


def _message_in(message: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(f"{name} must be an object with a role and a content.", "messages")
    reasoning = message.get("reasoning")
    if reasoning is None:
        return message
    if message.get("reasoning_content") not in (None, reasoning):
        raise UserError(f"{name}: reasoning and reasoning_content differ: give one of them.", "messages")
    renamed = {name: value for name, value in message.items() if name != "reasoning"}
    return {**renamed, "reasoning_content": reasoning}


def _tools(tools: Any) -> list[Any] | None:
    if tools is not None and not isinstance(tools, list):
        raise UserError("tools must be a list.", "tools")
    return tools or None
