"""Limits on conversations. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jaxllm.errors import UserError, too_long
from jaxllm.text.message_forms import ReadArguments, shaped_arguments
from jaxllm.text.template_shapes import Shape
from jaxllm_server.shared import strict_json

MOST_MESSAGES = 16_384  # 55 µs of a thread per short message (measured)
_MOST_VALUES = 131_072  # keys included; 3 to 6 µs of a thread each (measured)
_MOST_BRACKETS = 1 << 19  # strings included
_MAX_TEMPLATE_KWARGS = 32
_MAX_TEMPLATE_KWARG_CHARS = 1024
_MAX_NAME_CHARS = 64
# Other fields' variables, and arguments of transformers and vLLM that change the tokenization (vLLM CVE-2025-62426).
_RESERVED_KWARGS = frozenset(
    (
        *("messages", "conversation", "tools", "documents", "chat_template", "template"),
        *("add_generation_prompt", "continue_final_message", "add_special_tokens", "tokenize", "tokenizer"),
        *("truncation", "padding", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
        *("return_assistant_tokens_mask", "chat_template_content_format", "skip_special_tokens", "variables"),
    )
)


def check_messages(messages: Sequence[Any], max_model_len: int, max_tokens: int) -> None:
    """Refuse more messages than `max_tokens`, or than are rendered quickly; `max_model_len` is for the error."""
    if len(messages) > max_tokens:
        raise too_long(max_model_len, len(messages), None, is_bound=True)
    if len(messages) > MOST_MESSAGES:
        raise UserError(f"messages may hold at most {MOST_MESSAGES} messages, got {len(messages)}.", "messages")


def texts_of(conversation: list[Any]) -> list[str]:
    """Return all strings, keys included, in any order; raise UserError for too many values."""
    texts: list[str] = []
    left = _MOST_VALUES
    waiting: list[Any] = [conversation]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, dict):
            left -= 2 * len(value)
            waiting += [*value, *value.values()] if left >= 0 else ()
        elif isinstance(value, list):
            left -= len(value)
            waiting += value if left >= 0 else ()
        if left < 0:
            message = (
                f"messages may hold at most {_MOST_VALUES} values, including those of tools and the names in objects."
            )
            raise UserError(message, "messages")
    return texts


def check_tools(tools: Sequence[Any] | None, max_tools: int) -> None:
    tools = tools or ()
    if len(tools) > max_tools:
        raise UserError(f"tools may hold at most {max_tools} tools, got {len(tools)}.", "tools")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise UserError(f'tools[{index}] must be {{"type": "function", "function": {{"name": …}}}}.', "tools")
        if not isinstance(function.get("parameters"), Mapping | None):
            raise UserError(f"tools[{index}].function.parameters must be a JSON schema, an object.", "tools")


def check_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    if len(kwargs) > _MAX_TEMPLATE_KWARGS:
        message = f"chat_template_kwargs may hold at most {_MAX_TEMPLATE_KWARGS} names, got {len(kwargs)}."
        raise UserError(message, "chat_template_kwargs")
    for name, value in kwargs.items():
        if not name.isidentifier() or name.startswith("_") or len(name) > _MAX_NAME_CHARS or name in _RESERVED_KWARGS:
            raise UserError(f"chat_template_kwargs may not set {name[:_MAX_NAME_CHARS]!r}.", "chat_template_kwargs")
        is_long = isinstance(value, str) and len(value) > _MAX_TEMPLATE_KWARG_CHARS
        if is_long or not isinstance(value, str | int | float | bool | None):
            message = f"chat_template_kwargs: {name} must be a number, true, false, null or a short text."
            raise UserError(message, "chat_template_kwargs")


def with_read_arguments(messages: Sequence[Any], shape: Shape, max_json_depth: int) -> list[Any]:
    """Convert calls' arguments to the template's form: objects or JSON text."""
    left = _MOST_BRACKETS
    read = partial(_read, max_json_depth=max_json_depth)
    all_read = []
    for index, message in enumerate(messages):
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        if isinstance(calls, list):
            left -= sum(_num_brackets(call) for call in calls)
            if left < 0:
                raise UserError(f"messages may have at most {_MOST_BRACKETS} brackets in arguments.", "messages")
            path = f"messages[{index}].tool_calls"
            own = [_with_read(call, shape, f"{path}[{at}].function.arguments", read) for at, call in enumerate(calls)]
            message = {**message, "tool_calls": own}
        all_read.append(message)
    return all_read


def _arguments_of(call: Any) -> str | None:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    return arguments if isinstance(arguments, str) else None


def _num_brackets(call: Any) -> int:
    arguments = _arguments_of(call) or ""
    return arguments.count("[") + arguments.count("{")


def _with_read(call: Any, shape: Shape, name: str, read: ReadArguments) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    arguments = shaped_arguments(function["arguments"], shape, name, read)
    return {**call, "function": {**function, "arguments": arguments}}


def _read(arguments: str, name: str, *, max_json_depth: int) -> Any:
    try:
        return strict_json.read_value(arguments.encode("utf-8", "surrogatepass"), max_json_depth, name, in_thread=True)
    except strict_json.NotJsonError:
        return arguments
    except UserError as error:
        raise UserError(str(error), "messages") from error
