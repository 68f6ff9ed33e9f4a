"""Generated conversations, and transformers' rendering of them in each shape that a template may take.

An oracle for `template_shapes.py` that shares no code with it: whole conversations instead of small ones, and
transformers' renderer instead of jaxllm's.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import combinations, product
from random import Random
from typing import Any, Literal

Message = dict[str, Any]
CALLER = "caller"  # an assistant's message with calls
THOUGHTS = ("reasoning", "reasoning_content", "thinking")
TOOLS: list[Message] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Do {name}.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "string", "description": "An a."}},
                "required": ["a"],
            },
        },
    }
    for name in ("look", "fetch")
]


@dataclass(frozen=True)
class Form:
    """A shape of all messages."""

    joined: frozenset[str]  # roles with joined parts
    listed: bool  # texts are lists of one part
    arguments: Literal["object", "text"]
    blank: Literal["missing", "null", "empty"]  # null content of messages with calls
    short_ids: bool
    empty_is_null: bool = False  # in messages with calls
    thought: str = ""  # "part": of the content


def all_forms() -> list[Form]:
    """List the forms, as a client sends messages first."""
    roles = ("user", "system", "assistant", "tool", CALLER)
    subsets = [frozenset(some) for number in range(6) for some in combinations(roles, number)]
    return [
        Form(joined, listed, arguments, blank, short_ids, empty_is_null)  # pyright: ignore[reportArgumentType]
        for short_ids, listed, empty_is_null, joined, arguments, blank in product(
            (False, True), (False, True), (False, True), subsets, ("object", "text"), ("missing", "null", "empty")
        )
        if not listed or not joined
        if not empty_is_null or blank == "null"
    ]


def conversation(rng: Random, with_tools: bool, thoughts: bool) -> tuple[list[Message], set[str]]:
    """Return a conversation as a client sends it, and the words that its rendering must contain.

    Texts, names and arguments are unique words; contents are texts, lists of parts, empty or null.
    """
    words: set[str] = set()
    number = 0

    def word() -> str:
        nonlocal number
        number += 1
        words.add(f"w{number}q")
        return f"w{number}q"

    def content(*, may_be_none: bool = False) -> Any:
        kind = rng.random()
        if may_be_none and kind < 0.6:
            return None if kind < 0.4 else ""
        if kind < 0.75:
            return f"{word()} {word()}\n"
        return [{"type": "text", "text": word()} for _ in range(rng.randrange(1, 4))]

    messages: list[Message] = [{"role": "system", "content": content()}] if rng.random() < 0.5 else []
    for _ in range(rng.randrange(1, 4)):
        messages.append({"role": "user", "content": content()})
        for _ in range(rng.randrange(3) if with_tools else 0):
            messages += _called(rng, content(may_be_none=True), word, content)
        messages.append({"role": "assistant", "content": content()})
    if rng.random() < 0.8:
        messages.append({"role": "user", "content": content()})
    for message in messages:
        if thoughts and message["role"] == "assistant" and rng.random() < 0.5:
            message[rng.choice(THOUGHTS)] = f"idea {number}"
    return messages, words


def _called(rng: Random, own: Any, word: Any, content: Any) -> list[Message]:
    arguments = {"a": word(), "b": rng.choice([1, 2.5, True, None, [1, "x"], {"c": "d"}])}
    text = json.dumps(arguments, separators=rng.choice([(",", ":"), (", ", ": ")]))
    call_id = f"call_{rng.randrange(10**6)}"
    function = {"name": word(), "arguments": arguments if rng.random() < 0.3 else text}
    call = {"id": call_id, "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": call_id, "name": function["name"], "content": content()}
    return [{"role": "assistant", "content": own, "tool_calls": [call]}, result]


def in_form(messages: list[Message], form: Form) -> list[Message]:
    """Return a conversation in a form."""
    formed = []
    for message in messages:
        own, content = dict(message), message["content"]
        role = CALLER if "tool_calls" in own else own["role"]
        is_none = content is None or (content == "" and form.empty_is_null and "tool_calls" in own)
        if is_none:
            own["content"] = None if form.blank == "null" else ""
            if form.blank == "missing":
                del own["content"]
        elif isinstance(content, list) and role in form.joined:
            own["content"] = "\n".join(part["text"] for part in content)
        elif isinstance(content, str) and form.listed:
            own["content"] = [{"type": "text", "text": content}]
        if "tool_calls" in own:
            own["tool_calls"] = [_call_in_form(call, form) for call in own["tool_calls"]]
        if form.short_ids and "tool_call_id" in own:
            own["tool_call_id"] = _short(own["tool_call_id"])
        thought = next((own[name] for name in THOUGHTS if name in own), None)
        own |= {} if thought is None else dict.fromkeys(THOUGHTS, thought)
        if thought is not None and form.thought == "part":
            parts = own.get("content") or []
            parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
            own["content"] = [{"type": "thinking", "thinking": thought}, *parts]
        formed.append(own)
    return formed


def _call_in_form(call: Message, form: Form) -> Message:
    arguments = call["function"]["arguments"]
    if form.arguments == "object":
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    else:
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
    function = {**call["function"], "arguments": arguments}
    return {**call, "id": _short(call["id"]) if form.short_ids else call["id"], "function": function}


def _short(call_id: str) -> str:
    return sha256(call_id.encode()).hexdigest()[:9]


def as_transformers(source: str, messages: list[Message], tools: list[Message] | None) -> str | None:
    """Render with transformers; return None if the template raises."""
    from transformers.utils.chat_template_utils import render_jinja_template

    arguments: dict[str, Any] = {"tools": tools, "bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
    try:
        (text,), _ = render_jinja_template([messages], chat_template=source, **arguments)
    except Exception:
        return None
    return text


def fitting_form(source: str, seeds: range, *, with_tools: bool) -> Form:
    """Return the form that renders most words of some conversations, without Python's spelling of values."""
    forms = all_forms()
    scores = dict.fromkeys(forms, 0)
    for seed in seeds:
        messages, words = conversation(Random(seed), with_tools and seed % 2 == 0, thoughts=False)
        for form in forms:
            text = as_transformers(source, in_form(messages, form), TOOLS if with_tools else None)
            if text is not None:
                shown = sum(word in text for word in words)
                scores[form] += 100 * shown - 60 * sum(
                    text.count(ugly) for ugly in ("None", "null", "{'", "'text'", '"text"')
                )
    best = max(forms, key=scores.__getitem__)
    shown = {best: 0, replace(best, thought="part"): 0}
    for seed in seeds:
        messages, _ = conversation(Random(seed), with_tools, thoughts=True)
        for form in shown:
            text = as_transformers(source, in_form(messages, form), TOOLS) or ""
            shown[form] += text.count("idea") if not re.search("['\"]thinking['\"]", text) else -1
    return max(shown, key=shown.__getitem__)
