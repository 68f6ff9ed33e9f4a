"""Converts `system`, `messages` and `tools` to chat templates' form, checking shapes only. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxllm.errors import UnsupportedError, UserError
from jaxllm.media.image_part import NamedPart, refuse_video
from jaxllm_server.generation.calls import NamedTool, ToolChoice
from jaxllm_server.generation.chat_checks import MOST_MESSAGES
from jaxllm_server.requests.fields import Body

# Claude Code's `system` begins with a line that changes with every request, which defeats the prefix cache.
_BILLING = "x-anthropic-billing-header:"
_TOOL_ID = "toolu_"
_PARSERS_ID = "chatcmpl-tool-"  # of the tool parsers
_CHOICES: Mapping[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}
_SHOWN = 64


@dataclass
class _Turn:
    """A message under construction."""

    role: str
    texts: list[str] = field(default_factory=list)
    images: list[tuple[int, dict[str, Any]]] = field(default_factory=list)  # parts, and the number of texts before
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)  # a tool result's call id and name

    def message(self) -> dict[str, Any]:
        parts: list[dict[str, Any]] = [{"type": "text", "text": text} for text in self.texts]
        for before, image in reversed(self.images):
            parts.insert(before, image)
        is_list = len(parts) > 1 or bool(self.images)
        message: dict[str, Any] = {"role": self.role, "content": parts if is_list else "".join(self.texts)}
        if self.reasoning:
            message["reasoning_content"] = "\n".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message | self.about


def messages_of(fields: Body) -> list[dict[str, Any]]:
    """Convert the system prompt and messages, merging consecutive messages of one role.

    A later system message (Claude Code) becomes a reminder in the user's message, since many templates refuse it.
    """
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UserError("messages must be a list of at least one message.", "messages")
    if len(messages) > MOST_MESSAGES:  # 17 µs each (measured)
        raise UserError(f"messages may hold at most {MOST_MESSAGES} messages, got {len(messages)}.", "messages")
    system = [text for text in _texts(fields.get("system"), "system") if not text.startswith(_BILLING)]
    turns = [_Turn("system", system)] if system else []
    num_before = len(turns)
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            raise UserError(f"messages[{index}] must have the role user or assistant, and a content.", "messages")
        blocks = _blocks(message.get("content"), f"messages[{index}].content")
        if role == "system" and turns and turns[-1].role != "system":
            role, blocks = "user", ((where, _reminder(block, where)) for where, block in blocks)
        for where, block in blocks:
            _add(turns, role, block, where, names)
    if len(turns) == num_before:
        raise UserError("messages must have a content.", "messages")
    return [turn.message() for turn in turns]


def is_prefilled(messages: list[dict[str, Any]]) -> bool:
    """Return whether the answer continues the last message; raise UserError if that is an open tool call."""
    last = messages[-1]
    if last.get("tool_calls"):
        raise UserError(
            "messages end with a tool_use: its tool_result must follow, in a message of the user.", "messages"
        )
    return last["role"] == "assistant"


def tools_of(fields: Body) -> list[dict[str, Any]] | None:
    tools = fields.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise UserError("tools must be a list.", "tools")
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)] or None


def tool_choice_of(fields: Body, has_tools: bool) -> tuple[ToolChoice, bool]:
    """Return the tool choice, and whether at most one call is allowed."""
    choice = fields.get("tool_choice")
    if choice is None:
        return None, False
    kind = choice.get("type") if isinstance(choice, dict) else None
    takes_one = choice.get("disable_parallel_tool_use") if isinstance(choice, dict) else None
    if not isinstance(takes_one, bool | None):
        raise UserError("tool_choice.disable_parallel_tool_use must be true or false.", "tool_choice")
    if kind == "tool":
        name = choice.get("name")
        if not isinstance(name, str) or not name:
            raise UserError("tool_choice of type tool needs the name of a tool.", "tool_choice")
        wanted: ToolChoice = NamedTool(name)
    elif isinstance(kind, str) and kind in _CHOICES:
        wanted = _CHOICES[kind]
    else:
        raise UserError("tool_choice must be an object whose type is auto, any, tool or none.", "tool_choice")
    if kind in ("any", "tool") and not has_tools:
        raise UserError(f"tool_choice of type {kind} needs tools.", "tool_choice")
    return wanted if has_tools else None, takes_one is True


def tool_id(own: str | None) -> str:
    return _TOOL_ID + (own or "").removeprefix(_PARSERS_ID)


def _own_id(block: Mapping[str, Any], name: str, where: str) -> str:
    """Return the id as the tool parser generated it, as some templates require."""
    value = block.get(name)
    if not isinstance(value, str) or not value:
        raise UserError(f"{where}.{name} must be a string.", "messages")
    return value.removeprefix(_TOOL_ID)


def _add(turns: list[_Turn], role: str, block: Mapping[str, Any], where: str, names: dict[str, str]) -> None:
    kind = block["type"]
    if kind == "tool_result" and role == "user":
        call_id = _own_id(block, "tool_use_id", where)
        result = _Turn("tool", about={"tool_call_id": call_id} | ({"name": names[call_id]} if call_id in names else {}))
        content = block.get("content")
        for at, part in _blocks([] if content is None else content, f"{where}.content"):
            if part["type"] == "image":
                result.images.append((len(result.texts), _image(part, at)))
            elif part["type"] == "text":
                result.texts.append(_text(part, "text", at))
            else:
                refuse_video(part["type"], at, "messages")
                message = f"{at} is a block of type {part['type'][:_SHOWN]!r}; jaxllm accepts text and image there."
                raise UnsupportedError(message, "messages")
        if block.get("is_error") is True:  # templates have no field for errors
            if not result.texts:
                result.images = [(1, image) for _, image in result.images]
            result.texts[:1] = [f"Error: {result.texts[0]}"] if result.texts else ["Error"]
        turns.append(result)
        return
    if not turns or turns[-1].role != role:
        turns.append(_Turn(role))
    turn = turns[-1]
    if kind == "text":
        text = _text(block, "text", where)
        turn.texts += [text] if text else []
    elif kind == "image" and role == "user":
        turn.images.append((len(turn.texts), _image(block, where)))
    elif kind == "tool_use" and role == "assistant":
        call_id, name, given = _own_id(block, "id", where), _text(block, "name", where), block.get("input")
        if not isinstance(given, dict):
            raise UserError(f"{where}.input must be an object.", "messages")
        names[call_id] = name
        turn.calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": given}})
    elif kind == "thinking" and role == "assistant":
        turn.reasoning.append(_text(block, "thinking", where))
    elif kind != "redacted_thinking" or role != "assistant":
        refuse_video(kind, where, "messages")
        accepted = {"user": "text, image and tool_result", "assistant": "text, thinking and tool_use"}.get(role, "text")
        raise UnsupportedError(
            f"{where} is a block of type {kind[:_SHOWN]!r}; jaxllm accepts {accepted} in a message of the {role}.",
            "messages",
        )


def _image(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    source = block.get("source")
    if isinstance(source, dict) and source.get("type") == "base64":
        kind, data = (_text(source, name, f"{where}.source") for name in ("media_type", "data"))
        return NamedPart(where, type="image_url", image_url=f"data:{kind};base64,{data}")
    if isinstance(source, dict) and source.get("type") == "url":
        return NamedPart(where, type="image_url", image_url=_text(source, "url", f"{where}.source"))
    raise UserError(f"{where}.source must be an object whose type is base64 or url.", "messages")


def _reminder(block: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Format a later system message as Claude Code does for other models."""
    if block["type"] != "text":
        return block
    return {**block, "text": f"<system-reminder>\n{_text(block, 'text', where)}\n</system-reminder>"}


def _blocks(content: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise UserError(f"{where} must be a string or a list of blocks.", where.partition("[")[0])
    for index, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise UserError(f"{where}[{index}] must be an object with a type.", where.partition("[")[0])
        yield f"{where}[{index}]", block


def _texts(content: Any, where: str) -> list[str]:
    texts = []
    for at, block in _blocks([] if content is None else content, where):
        if block["type"] != "text":
            message = f"{at} is a block of type {block['type'][:_SHOWN]!r}; jaxllm accepts text there."
            raise UnsupportedError(message, where.partition("[")[0])
        texts.append(_text(block, "text", at))
    return texts


def _text(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise UserError(f"{where}.{name} must be a string.", where.partition("[")[0])
    return value


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise UserError(f"{where} must be an object with a name and an input_schema.", "tools")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        message = (
            f"{where} is of type {str(kind)[:_SHOWN]!r}, a tool that Anthropic defines; jaxllm accepts custom tools."
        )
        raise UnsupportedError(message, "tools")
    function: dict[str, Any] = {"name": _text(tool, "name", where)}
    if not function["name"]:
        raise UserError(f"{where}.name must not be empty.", "tools")
    if tool.get("description") is not None:
        function["description"] = _text(tool, "description", where)
    if not isinstance(tool.get("input_schema"), dict):
        raise UserError(f"{where}.input_schema must be a JSON schema, an object.", "tools")
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}
