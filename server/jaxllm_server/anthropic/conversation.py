"""What the prompt of a message is made of: `system`, `messages` and `tools` in the form that chat templates know.

Pure. Only shapes are checked here; how much a conversation may hold is checked where all front ends' are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxllm.errors import UnsupportedError, UserError
from jaxllm_server.generation.calls import NamedTool, ToolChoice
from jaxllm_server.generation.chat_checks import MOST_MESSAGES
from jaxllm_server.requests.fields import Body

# Claude Code begins `system` with a line about its version and the request, which is for Anthropic's accounts: it
# differs in every request, so that no prefix would ever be found in the cache.
_BILLING = "x-anthropic-billing-header:"
_TOOL_ID = "toolu_"  # begins the ids of tool calls
_PARSERS_ID = "chatcmpl-tool-"  # as which the tool parsers' ids begin, those of models that have none of their own
_CHOICES: Mapping[str, ToolChoice] = {"auto": "auto", "any": "required", "none": "none"}
_SHOWN = 64  # characters of a type that an error repeats


@dataclass
class _Turn:
    """One message for the template, while blocks are added to it."""

    role: str
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)  # of a tool's result: whose it is

    def message(self) -> dict[str, Any]:
        parts = [{"type": "text", "text": text} for text in self.texts]
        message: dict[str, Any] = {"role": self.role, "content": parts if len(parts) > 1 else "".join(self.texts)}
        if self.reasoning:
            message["reasoning_content"] = "\n".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message | self.about


def messages_of(fields: Body) -> list[dict[str, Any]]:
    """Return the system prompt and the messages for a template; turns of one role that follow each other are one.

    A message of the system in the middle, as Claude Code sends them, is a reminder in the user's turn: many templates
    have the system's turn at the beginning and nowhere else.

    Raises:
        UserError: naming `system` or `messages`, and in its text which block.
        UnsupportedError: for a block that is no text, thinking, tool_use or tool_result.
    """
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UserError("messages must be a list of at least one message.", "messages")
    if len(messages) > MOST_MESSAGES:  # 17 µs each (measured)
        raise UserError(f"messages may hold at most {MOST_MESSAGES} messages, got {len(messages)}.", "messages")
    system = [text for text in _texts(fields.get("system"), "system") if not text.startswith(_BILLING)]
    turns = [_Turn("system", system)] if system else []
    num_before = len(turns)
    names: dict[str, str] = {}  # of the tools that were called, by the call's id
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
    """Whether the answer continues the last message.

    Raises:
        UserError: if that one ends with a tool call, whose result is missing.
    """
    last = messages[-1]
    if last.get("tool_calls"):
        raise UserError(
            "messages end with a tool_use: its tool_result must follow, in a message of the user.", "messages"
        )
    return last["role"] == "assistant"


def tools_of(fields: Body) -> list[dict[str, Any]] | None:
    """Return the tools as templates know them, None for none.

    Raises:
        UserError: naming `tools`.
        UnsupportedError: for a tool that Anthropic's servers run, or whose schema only Claude knows.
    """
    tools = fields.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise UserError("tools must be a list.", "tools")
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)] or None


def tool_choice_of(fields: Body, has_tools: bool) -> tuple[ToolChoice, bool]:
    """Return which tools have to be called, and whether it may be one at most.

    Raises:
        UserError: naming `tool_choice`.
    """
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
    """Return the id that a client sees of a tool call."""
    return _TOOL_ID + (own or "").removeprefix(_PARSERS_ID)


def _own_id(block: Mapping[str, Any], name: str, where: str) -> str:
    """Return the id that a tool parser gave a call: some models' templates look for the form of theirs."""
    value = block.get(name)
    if not isinstance(value, str) or not value:
        raise UserError(f"{where}.{name} must be a string.", "messages")
    return value.removeprefix(_TOOL_ID)


def _add(turns: list[_Turn], role: str, block: Mapping[str, Any], where: str, names: dict[str, str]) -> None:
    """Add one block to the last turn, or begin one with it."""
    kind = block["type"]
    if kind == "tool_result" and role == "user":
        own = _own_id(block, "tool_use_id", where)
        texts = _texts(block.get("content"), f"{where}.content")
        if block.get("is_error") is True:  # templates have no other place for it
            texts = [f"Error: {texts[0]}", *texts[1:]] if texts else ["Error"]
        about = {"tool_call_id": own} | ({"name": names[own]} if own in names else {})
        turns.append(_Turn("tool", texts, about=about))
        return
    if not turns or turns[-1].role != role:
        turns.append(_Turn(role))
    turn = turns[-1]
    if kind == "text":
        text = _text(block, "text", where)
        turn.texts += [text] if text else []
    elif kind == "tool_use" and role == "assistant":
        own, name, given = _own_id(block, "id", where), _text(block, "name", where), block.get("input")
        if not isinstance(given, dict):
            raise UserError(f"{where}.input must be an object.", "messages")
        names[own] = name
        turn.calls.append({"id": own, "type": "function", "function": {"name": name, "arguments": given}})
    elif kind == "thinking" and role == "assistant":
        turn.reasoning.append(_text(block, "thinking", where))
    elif kind != "redacted_thinking" or role != "assistant":
        accepted = {"user": "text and tool_result", "assistant": "text, thinking and tool_use"}.get(role, "text")
        raise UnsupportedError(
            f"{where} is a block of type {kind[:_SHOWN]!r}; jaxllm accepts {accepted} in a message of the {role}.",
            "messages",
        )


def _reminder(block: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a block in the form that Claude Code tells the model of, and itself uses for older models."""
    if block["type"] != "text":
        return block
    return {**block, "text": f"<system-reminder>\n{_text(block, 'text', where)}\n</system-reminder>"}


def _blocks(content: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Give each block of a content and what errors call it; a text is a block, nothing is none."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise UserError(f"{where} must be a string or a list of blocks.", where.partition("[")[0])
    for index, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise UserError(f"{where}[{index}] must be an object with a type.", where.partition("[")[0])
        yield f"{where}[{index}]", block


def _texts(content: Any, where: str) -> list[str]:
    """Return the texts of a content that can have no others."""
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
