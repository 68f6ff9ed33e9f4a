"""Convert messages to a chat template's shape."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from jaxllm.errors import UnsupportedError, UserError
from jaxllm.media.image_part import ImagePart, path_of
from jaxllm.text.template_shapes import BLANKS, CALLER, Blank, Shape

# JSON's names of wrong content parts.
_KINDS = {type(None): "null", bool: "boolean", int: "number", float: "number", list: "array"}
_REASONING = ("reasoning_content", "thinking", "reasoning")  # in transformers' order
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
# (text, name for errors) -> arguments, or text that is not JSON.
ReadArguments = Callable[[str, str], Any]


def shaped(
    messages: Sequence[Mapping[str, Any]], shape: Shape, read_arguments: ReadArguments | None
) -> list[dict[str, Any]]:
    """Return messages in a template's shape, without values of None, as in transformers.

    Without `read_arguments`, call arguments are already converted. Raises `UserError`, naming `messages`, if invalid.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise UserError("messages must be a list of at least one message.", "messages")
    return [_shaped(message, f"messages[{index}]", shape, read_arguments) for index, message in enumerate(messages)]


def shaped_arguments(arguments: Any, shape: Shape, name: str, read: ReadArguments) -> Any:
    """Return a tool call's arguments as the template reads them: JSON text or an object.

    Keeps text that is not a JSON object if the template accepts text; otherwise raises `UserError`, naming `messages`.
    """
    if not shape.takes_objects:
        return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return arguments if shape.takes_texts else {}
    value = read(arguments, name)
    if isinstance(value, dict):
        return value
    if not shape.takes_texts:
        message = (
            f"{name} must be a JSON object, as the chat template reads its fields; this text is not, or is truncated."
        )
        raise UserError(message, "messages")
    return arguments


def read_json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _shaped(message: Any, name: str, shape: Shape, read: ReadArguments | None) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UserError(f"{name} must be an object with a role and a content.", "messages")
    copied = {key: value for key, value in message.items() if value is not None}
    calls, thought = copied.get("tool_calls"), next((copied[key] for key in _REASONING if key in copied), None)
    if thought is not None:
        # transformers uses two of these, some templates the third.
        copied = {"thinking": thought, **copied, "reasoning_content": thought}
        copied |= {"reasoning": thought} if shape.names_reasoning and "reasoning" not in copied else {}
    if isinstance(calls, list | tuple):
        copied["tool_calls"] = [
            _shaped_call(call, f"{name}.tool_calls[{at}].function.arguments", shape, read)
            for at, call in enumerate(calls)
        ]
    if shape.short_ids and isinstance(copied.get("tool_call_id"), str):
        copied["tool_call_id"] = _short_id(copied["tool_call_id"])
    is_caller = copied["role"] == "assistant" and bool(calls)
    if "content" in copied:
        copied["content"] = _fitting_content(copied["content"], shape, CALLER if is_caller else copied["role"], name)
    if copied["role"] == "assistant" and copied.get("content", "") == "":
        _set_blank(copied, shape)
    if shape.thought_is_part and isinstance(thought, str) and thought:
        copied["content"] = _with_thought(copied.get("content"), thought)
    return copied


def _set_blank(message: dict[str, Any], shape: Shape) -> None:
    blank: Blank = shape.blank
    if message.get("tool_calls"):
        if "content" in message and not shape.loses_calls_beside_empty:
            return
        blank = shape.blank_beside_calls
    elif "content" in message:
        return
    message.pop("content", None)
    message |= BLANKS[blank]


def _shaped_call(call: Any, name: str, shape: Shape, read: ReadArguments | None) -> Any:
    if not isinstance(call, Mapping):
        return call
    copied = dict(call)
    if shape.short_ids and isinstance(copied.get("id"), str):
        copied["id"] = _short_id(copied["id"])
    function = copied.get("function")
    if read is not None and isinstance(function, Mapping) and "arguments" in function:
        arguments = shaped_arguments(function["arguments"], shape, name, read)
        copied["function"] = {**function, "arguments": arguments}
    return copied


def _short_id(call_id: str) -> str:
    return call_id if _SHORT_ID.fullmatch(call_id) else sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _fitting_content(content: Any, shape: Shape, role: str, name: str) -> Any:
    if isinstance(content, str):
        return content if shape.takes_text(role) else [{"type": "text", "text": content}]
    if not isinstance(content, list | tuple):
        return content  # the template reports it
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    for at, part in enumerate(parts):
        if isinstance(part, ImagePart):
            if not shape.takes_parts(role):
                message = (
                    f"{name}.content[{at}] is of type {part['type']}, and the chat template takes texts only for the "
                    f"role {role}."
                )
                raise UserError(message, "messages")
            continue
        kind = part.get("type", "text") if isinstance(part, Mapping) else _KINDS.get(type(part), "array")
        if kind != "text":
            raise UnsupportedError(
                f"{path_of(part, f'{name}.content[{at}]')} is a part of type {kind!r}, which this model does not read.",
                "messages",
                kind,
            )
        if not isinstance(part.get("text"), str):
            raise UserError(f"{name}.content[{at}] must have a text.", "messages")
    return parts if shape.takes_parts(role) else "\n".join(part["text"] for part in parts)


def _with_thought(content: Any, thought: str) -> list[Any]:
    text = [{"type": "text", "text": content}] if isinstance(content, str) and content else []
    return [{"type": "thinking", "thinking": thought}, *(content if isinstance(content, list) else text)]
