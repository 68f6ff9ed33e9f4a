"""Converts fields of `/v1/responses` to chats', which validate them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxllm.errors import UnsupportedError, UserError
from jaxllm_server.generation.calls import NamedTool, ToolChoice
from jaxllm_server.openai.conversation import REASONING_EFFORTS
from jaxllm_server.requests.fields import Body, flag, mapping, text

LOGPROBS = "message.output_text.logprobs"
# Clients also request those of unused tools.
_INCLUDABLE = (
    *(LOGPROBS, "reasoning.encrypted_content", "message.input_image.image_url", "file_search_call.results"),
    *("web_search_call.results", "web_search_call.action.sources", "code_interpreter_call.outputs"),
    "computer_call_output.output.image_url",
)
# Chats' fields -> names here, for errors.
_CHATS_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "logprobs": f'include: ["{LOGPROBS}"]',
    }
)
_REASONING: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "effort": REASONING_EFFORTS,
        "summary": ("auto", "concise", "detailed"),
        "generate_summary": ("auto", "concise", "detailed"),
        "context": ("auto",),
        "mode": ("standard",),
    }
)
_VERBOSITIES = ("low", "medium", "high")
_SHOWN = 64
_MOST_METADATA, _MOST_KEY, _MOST_VALUE = 16, 64, 512  # OpenAI's limits: pairs, and characters of each


def check_names(body: Body) -> None:
    for name, own in _CHATS_NAMES.items():
        if body.get(name) not in (None, False):
            raise UserError(f"{name} is a field of chat completions; in the Responses API it is {own}.", name)


def of_message(message: Body) -> dict[str, Any]:
    kind = message.get("type")
    if kind != "response.create":
        raise UserError("The messages of a WebSocket are objects of type response.create.", "type")
    for name, value in (("stream", True), ("background", False), ("generate", True)):
        if message.get(name) not in (None, value):
            raise UnsupportedError(f"{name} is not supported over a WebSocket: leave it out.", name)
    left = ("type", "background", "generate")
    return {**{name: value for name, value in message.items() if name not in left}, "stream": True}


def chosen(fields: Body, name: str, values: Sequence[str], path: str, parameter: str) -> str | None:
    value = fields.get(name)
    if value is not None and value not in values:
        raise UserError(f"{path} must be one of {', '.join(values)}.", parameter)
    return value


def includes(fields: Body) -> Sequence[str]:
    wanted = fields.get("include", [])
    if not isinstance(wanted, list) or any(each not in _INCLUDABLE for each in wanted):
        raise UserError(f"include must be a list of any of {', '.join(_INCLUDABLE)}.", "include")
    return wanted


def metadata_of(fields: Body) -> dict[str, str]:
    pairs = mapping(fields, "metadata") or {}
    is_small = len(pairs) <= _MOST_METADATA and all(
        len(name) <= _MOST_KEY and isinstance(value, str) and len(value) <= _MOST_VALUE for name, value in pairs.items()
    )
    if not is_small:
        message = (
            f"metadata may have at most {_MOST_METADATA} strings of {_MOST_VALUE} characters, with keys of {_MOST_KEY}."
        )
        raise UserError(message, "metadata")
    return pairs


def tools_of(fields: Body, max_tools: int) -> list[dict[str, Any]]:
    tools = fields.get("tools", [])
    if not isinstance(tools, list):
        raise UserError("tools must be a list.", "tools")
    if len(tools) > max_tools:
        raise UserError(f"tools may hold at most {max_tools} tools, got {len(tools)}.", "tools")
    functions = []
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if not isinstance(kind, str):
            raise UserError(f"{path} must be an object with a type.", "tools")
        if kind != "function":
            shown = kind[:_SHOWN]
            message = f"{path}: tools of type {shown!r} are not supported: jaxllm does not run tools; give functions."
            raise UnsupportedError(message, "tools")
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            form = '{"type": "function", "name": …, "parameters": {…}}'
            raise UserError(f"{path} has no name: in the Responses API a tool is {form}.", "tools")
        if not isinstance(tool.get("parameters"), Mapping | None):
            raise UserError(f"{path}.parameters must be a JSON schema, an object.", "tools")
        if not isinstance(tool.get("description"), str | None):
            raise UserError(f"{path}.description must be a string.", "tools")
        functions.append(
            {
                "type": "function",
                "name": tool["name"],
                "description": tool.get("description"),
                "parameters": tool.get("parameters"),
                "strict": flag(tool, "strict", None),
            }
        )
    return functions


def choice_of(fields: Body, tools: Sequence[Body]) -> tuple[ToolChoice, Sequence[Body]]:
    """Return the choice and the tools shown to the model."""
    choice = fields.get("tool_choice")
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        names = _allowed_names(choice)
        unknown = names - {tool["name"] for tool in tools}
        if unknown:
            raise UserError(f"tool_choice allows {min(unknown)[:_SHOWN]!r}, which is not in tools.", "tool_choice")
        tools = [tool for tool in tools if tool["name"] in names]
        choice = choice["mode"]
    elif isinstance(choice, Mapping):
        name = choice.get("name")
        if choice.get("type") != "function" or not isinstance(name, str) or not name:
            message = 'tool_choice must name a function, as {"type": "function", "name": …}.'
            raise UserError(message, "tool_choice")
        choice = NamedTool(name)
    elif choice not in (None, "none", "auto", "required"):
        raise UserError("tool_choice must be none, auto, required, allowed tools or a named function.", "tool_choice")
    if not tools and (choice == "required" or isinstance(choice, NamedTool)):
        raise UserError("A tool_choice that forces a call needs tools.", "tool_choice")
    return choice if tools else None, tools


def shown_choice(fields: Body) -> Any:
    """Return `tool_choice` as a response repeats it, without unknown keys."""
    choice = fields.get("tool_choice", "auto")
    if not isinstance(choice, Mapping):
        return choice
    if choice["type"] == "function":
        return {"type": "function", "name": choice["name"]}
    tools = [{"type": "function", "name": name} for name in sorted(_allowed_names(choice))]
    return {"type": "allowed_tools", "mode": choice["mode"], "tools": tools}


def _allowed_names(choice: Mapping[str, Any]) -> set[str]:
    tools = choice.get("tools")
    given = tools if isinstance(tools, list) else []
    names = {tool["name"] for tool in given if isinstance(tool, Mapping) and isinstance(tool.get("name"), str)}
    if choice.get("mode") not in ("auto", "required") or not names:
        form = '{"type": "allowed_tools", "mode": "auto" or "required", "tools": [{"type": "function", "name": …}]}'
        raise UserError(f"tool_choice must be {form}.", "tool_choice")
    return names


def chat_tools(tools: Sequence[Body]) -> list[dict[str, Any]] | None:
    names = ("name", "description", "parameters")
    functions = [{name: tool[name] for name in names if tool[name] is not None} for tool in tools]
    return [{"type": "function", "function": function} for function in functions] or None


def format_of(fields: Body) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return `text` as a response repeats it, and its format as a chat's `response_format`."""
    wanted = mapping(fields, "text") or {}
    for name in wanted:
        if name not in ("format", "verbosity"):
            raise UserError(f"text has no {name[:_SHOWN]!r}; it has format and verbosity.", "text")
    verbosity = chosen(wanted, "verbosity", _VERBOSITIES, "text.verbosity", "text") or "medium"
    form = wanted.get("format")
    if form is None:
        return {"format": {"type": "text"}, "verbosity": verbosity}, None
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind in ("text", "json_object"):
        if len(form) > 1:
            raise UserError(f"text.format of type {kind} has no other fields.", "text")
        return {"format": form, "verbosity": verbosity}, dict(form)
    if kind != "json_schema":
        raise UserError("text.format must be an object of type text, json_object or json_schema.", "text")
    if not isinstance(form.get("name"), str) or not form["name"] or not isinstance(form.get("schema"), Mapping):
        message = 'text.format of type json_schema needs a name and a schema, as {"name": "person", "schema": {…}}.'
        raise UserError(message, "text")
    if not isinstance(form.get("strict"), bool | None) or not isinstance(form.get("description"), str | None):
        raise UserError("text.format: strict must be true or false, description a text.", "text")
    schema = {name: value for name, value in form.items() if name != "type"}
    for name in schema:
        if name not in ("name", "schema", "strict", "description"):
            message = f"text.format has no {name[:_SHOWN]!r}; it has type, name, schema, strict, description."
            raise UserError(message, "text")
    return {"format": form, "verbosity": verbosity}, {"type": "json_schema", "json_schema": schema}


def reasoning_of(fields: Body) -> dict[str, Any]:
    """Return effort and summary; reasoning is returned in full anyway."""
    wanted = mapping(fields, "reasoning") or {}
    for name in wanted:
        if name not in _REASONING:
            raise UserError(f"reasoning has no {name[:_SHOWN]!r}; it has {', '.join(_REASONING)}.", "reasoning")
        chosen(wanted, name, _REASONING[name], f"reasoning.{name}", "reasoning")
    return {"effort": wanted.get("effort"), "summary": wanted.get("summary")}


def texts_of(fields: Body, names: Sequence[str]) -> dict[str, str | None]:
    texts = {name: text(fields, name) for name in names}
    for name, value in texts.items():
        if value is not None and len(value) > _MOST_VALUE:
            raise UserError(f"{name} may have at most {_MOST_VALUE} characters.", name)
    return texts
