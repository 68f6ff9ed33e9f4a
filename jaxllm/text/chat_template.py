"""Chat templates: a conversation written out as the text a model was trained on.

A template is jinja2 source from a model's folder; callers cannot send one. It runs in jinja2's sandbox
(template_environment.py) and gets plain values only. Its variables have transformers' names. Knows no tokenizers and no
files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxllm.errors import UnsupportedError, UserError

if TYPE_CHECKING:
    import jinja2

MAX_TEXT = 1 << 25  # characters that a template may render: several times the largest body that a server accepts
RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")
# JSON's names for the kinds of values that cannot be a part of a content.
_KINDS = {type(None): "null", bool: "boolean", int: "number", float: "number", list: "array"}
_CONTINUES_HERE = "JAXLLM_CONTINUES_HERE"


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled template and what it takes for a message's content."""

    program: jinja2.Template
    takes_parts: bool  # whether it iterates over the parts of a content
    takes_text: bool  # whether it accepts a content that is one text


def render(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> str:
    """Write a conversation with a template of `compile_template`.

    `tools` are JSON schemas. `variables` are passed to the template as they are. `continue_final_message` leaves the
    last message open. For a template that does not iterate over parts, a content that is a list of text parts becomes
    one text, a line each. Raises `UserError` where the messages are malformed or the template rejects them.
    """
    if continue_final_message and add_generation_prompt:
        raise UserError(
            "continue_final_message and add_generation_prompt exclude each other; set one of them to False.",
            "continue_final_message",
        )
    conversation = _plain_messages(messages)
    for index, message in enumerate(conversation):
        if "content" in message:
            message["content"] = _fitting_content(message["content"], template, f"messages[{index}]")
    if continue_final_message:
        _mark_end(conversation[-1])
    arguments = {
        "documents": None,
        **_plain(variables, "chat_template_kwargs"),
        "messages": conversation,
        "tools": None if tools is None else _plain(list(tools), "tools"),
        "add_generation_prompt": add_generation_prompt,
    }
    import jinja2

    pieces, length = [], 0
    try:
        for piece in template.program.generate(arguments):
            length += len(piece)
            if length > MAX_TEXT:
                raise jinja2.TemplateError(f"it renders to more than {MAX_TEXT} characters.")
            pieces.append(piece)
    except (jinja2.TemplateError, OverflowError) as error:
        raise UserError(f"The chat template rejects this conversation: {_one_line(error)}", "messages") from error
    except Exception as error:  # any exception of Python, whose message would name Python's classes
        reason = "a value in it is not of the kind that the template expects."
        raise UserError(f"The chat template rejects this conversation: {reason}", "messages") from error
    text = "".join(pieces)
    return _cut_at_mark(text) if continue_final_message else text


def compile_template(source: str) -> ChatTemplate:
    """Compile a chat template. Raises `UserError` with the line where its syntax is wrong."""
    import jinja2

    from jaxllm.text.template_environment import content_kinds, make_environment

    environment = make_environment()
    try:
        takes_parts, takes_text = content_kinds(environment.parse(source))
        return ChatTemplate(environment.from_string(source), takes_parts, takes_text)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"The chat template is not valid in line {error.lineno}: {error.message}", "chat_template"
        ) from error
    except Exception as error:  # Python's own compiler has limits
        raise UserError(f"The chat template cannot be compiled: {_one_line(error)}", "chat_template") from error


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copy a conversation as plain values, without keys that are None (`"content": null` in the OpenAI API)."""
    if not isinstance(messages, list | tuple) or not messages:
        raise UserError("messages must be a list of at least one message.", "messages")
    conversation = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(f"messages[{index}] must be an object with a role and a content.", "messages")
        conversation.append(_plain({key: value for key, value in message.items() if value is not None}, "messages"))
    return conversation


def _fitting_content(content: Any, template: ChatTemplate, name: str) -> Any:
    """Return a content in the form that the template accepts: a text, or a list of text parts."""
    if isinstance(content, str):
        return content if template.takes_text else [{"type": "text", "text": content}]
    if not isinstance(content, list):
        return content  # the template reports what is wrong with it
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    for at, part in enumerate(parts):
        kind = part.get("type", "text") if isinstance(part, dict) else _KINDS[type(part)]
        if kind != "text":
            raise UnsupportedError(
                f"{name}.content[{at}] is a part of type {kind!r}; jaxllm accepts parts of text only.", "messages", kind
            )
        if not isinstance(part.get("text"), str):
            raise UserError(f"{name}.content[{at}] must have a text.", "messages")
    return parts if template.takes_parts else "\n".join(part["text"] for part in parts)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _plain(value: Any, parameter: str) -> Any:
    """Copy JSON-like values; refuse others, whose methods a template could call."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, parameter) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, parameter) for item in value]
    raise UserError(
        f"{parameter} may hold text, numbers, lists and objects only, got {type(value).__name__}.", parameter
    )


def _mark_end(message: dict[str, Any]) -> None:
    """Append the mark that `_cut_at_mark` looks for to a message's last text."""
    content = message.get("content")
    texts = [part for part in content if isinstance(part, dict) and "text" in part] if isinstance(content, list) else []
    if isinstance(content, str):
        message["content"] = f"{content}{_CONTINUES_HERE} "
    elif texts:
        texts[-1]["text"] = f"{texts[-1]['text']}{_CONTINUES_HERE} "
    else:
        raise UserError("continue_final_message needs a final message with text.", "continue_final_message")


def _cut_at_mark(text: str) -> str:
    """Cut a rendered conversation where its last message ends."""
    at = text.rfind(_CONTINUES_HERE)
    if at < 0:
        raise UserError(
            "continue_final_message is not possible: the chat template leaves out the final message.",
            "continue_final_message",
        )
    # A template that trims messages has removed the space after the mark, and would have trimmed this message's end.
    return text[:at] if text.startswith(" ", at + len(_CONTINUES_HERE)) else text[:at].rstrip()
