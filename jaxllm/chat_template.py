"""Chat templates: a conversation written out as the text a model was trained on.

A template is jinja2 source from a model's folder, so foreign code: it runs in jinja2's immutable sandbox and sees plain
values only. Knows nothing of tokenizers or files.

What templates may rely on is fixed by transformers (utils/chat_template_utils.py): the names of the variables, the
filter `tojson`, `raise_exception`, `strftime_now`, `break` and `continue` in loops, and `{% generation %}` blocks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jaxllm.types import UserError

_CONTINUES_HERE = "JAXLLM_CONTINUES_HERE"


def render(
    template: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
) -> str:
    """Write a conversation with a template of `compile_template`.

    `tools` are JSON schemas. `variables` are passed to the template as they are. `continue_final_message` leaves the
    last message open. Raises `UserError` where the messages are malformed or the template rejects them.
    """
    if continue_final_message and add_generation_prompt:
        raise UserError(
            "continue_final_message and add_generation_prompt exclude each other; set one of them to False.",
            "continue_final_message",
        )
    conversation = _plain_messages(messages)
    if continue_final_message:
        _mark_end(conversation[-1])
    arguments = {
        "documents": None,
        **_plain(variables, "chat_template_kwargs"),
        "messages": conversation,
        "tools": None if tools is None else _plain(list(tools), "tools"),
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        text = template.render(arguments)
    except Exception as error:  # a template is foreign code: it may fail with anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"The chat template rejects this conversation: {reason}", "messages") from error
    return _cut_at_mark(text) if continue_final_message else text


def compile_template(source: str) -> Any:
    """Compile a chat template. Raises `UserError` with the line where its syntax is wrong."""
    import jinja2.ext
    import jinja2.nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(jinja2.ext.Extension):
        """`{% generation %}` marks an assistant's words for training; here it only shows them."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

        def parse(self, parser: Any) -> Any:
            """Keep the block's body."""
            line = next(parser.stream).lineno
            return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(
                line
            )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        # jinja2's own filter escapes for HTML.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(
            f"The chat template is not valid in line {error.lineno}: {error.message}", "chat_template"
        ) from error


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


def _plain(value: Any, parameter: str) -> Any:
    """Copy JSON-like values; refuse others, whose methods a template could call past the sandbox."""
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
    # The space behind the mark is gone where the template trims messages; then it would have trimmed this one's end.
    return text[:at] if text.startswith(" ", at + len(_CONTINUES_HERE)) else text[:at].rstrip()
