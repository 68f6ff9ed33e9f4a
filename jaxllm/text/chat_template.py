"""Compile a model's chat template, and render conversations with it.

Templates are a model's, never a request's, and run in jinja2's sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jaxllm.errors import UserError
from jaxllm.text import template_errors
from jaxllm.text.template_shapes import TOOL, Message, Shape, find_shape

if TYPE_CHECKING:
    import jinja2

MAX_TEXT = 1 << 25  # several times a server's largest body
RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")
_MAX_TRIAL = 1 << 18  # of probes
_CONTINUES_HERE = "JAXLLM_CONTINUES_HERE"


@dataclass(frozen=True)
class ChatTemplate:
    """A compiled template and its message shape."""

    program: jinja2.Template
    shape: Shape
    words_by_line: Mapping[int, frozenset[str]]  # field names, to locate errors


def render(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> str:
    """Render a conversation as the prompt's text.

    `messages` have the template's shape (message_forms.py); `tools` are JSON schemas; `variables` are passed on.
    Raises `UserError`, naming the message, if the template
    rejects it.
    """
    if continue_final_message and add_generation_prompt:
        raise UserError(
            "continue_final_message and add_generation_prompt exclude each other; set one of them to False.",
            "continue_final_message",
        )
    conversation: list[dict[str, Any]] = _plain(list(messages), "messages")
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

    try:
        text = generated(template.program, arguments, MAX_TEXT)
    except Exception as error:
        is_own = isinstance(error, jinja2.TemplateError | OverflowError)
        # Others would name Python classes.
        reason = _one_line(error) if is_own else "a value in it is not of the kind that the template expects"
        at = template_errors.place_of(error, conversation, template.words_by_line)
        raise UserError(f"The chat template rejects this conversation: {reason}{at}", "messages") from error
    return _cut_at_mark(text) if continue_final_message else text


def compile_template(source: str, variables: Mapping[str, Any] = MappingProxyType({})) -> ChatTemplate:
    """Compile a template, and render probes with `variables` to find its message shape; raise UserError if invalid."""
    import jinja2

    from jaxllm.text.template_environment import make_environment

    environment = make_environment()
    try:
        words = template_errors.words_by_line(environment.parse(source))
        program = environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"The chat template is not valid in line {error.lineno}: {error.message}", "chat_template"
        ) from error
    except Exception as error:  # limits of Python's compiler
        raise UserError(f"The chat template cannot be compiled: {_one_line(error)}", "chat_template") from error

    def show(messages: list[Message]) -> str | None:
        arguments = {"documents": None, **variables, "messages": messages, "add_generation_prompt": True}
        for tools in ([TOOL], None):
            try:
                return generated(program, arguments | {"tools": tools}, _MAX_TRIAL)
            except MemoryError:
                raise
            except Exception:
                continue
        return None

    return ChatTemplate(program, find_shape(show, source), words)


def generated(program: jinja2.Template, arguments: Mapping[str, Any], most: int) -> str:
    import jinja2

    pieces, length = [], 0
    for piece in program.generate(arguments):
        length += len(piece)
        if length > most:
            raise jinja2.TemplateError(f"the rendered prompt has more than {most} characters.")
        pieces.append(piece)
    return "".join(pieces)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _plain(value: Any, parameter: str) -> Any:
    """Copy JSON-like values; refuse others, since templates could call their methods."""
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
    content = message.get("content")
    texts = [part for part in content if isinstance(part, dict) and "text" in part] if isinstance(content, list) else []
    if isinstance(content, str):
        message["content"] = f"{content}{_CONTINUES_HERE} "
    elif texts:
        texts[-1]["text"] = f"{texts[-1]['text']}{_CONTINUES_HERE} "
    else:
        raise UserError("continue_final_message needs a final message with text.", "continue_final_message")


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_CONTINUES_HERE)
    if at < 0:
        raise UserError(
            "continue_final_message is not possible: the chat template leaves out the final message.",
            "continue_final_message",
        )
    # Trim the message as the template trimmed the mark.
    return text[:at] if text.startswith(" ", at + len(_CONTINUES_HERE)) else text[:at].rstrip()
