"""Reference results on whole texts, for stop strings, reasoning and tool calls in streams."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxllm_server.parsers.reasoning import TaggedReasoning
from jaxllm_server.parsers.table import TOOL_PARSERS

Call = tuple[str, str, str]  # id, name, arguments


def distinct(forms: Mapping[str, Any]) -> list[str]:
    """Return the names of forms without aliases."""
    return [name for name, form in forms.items() if form.signs]


def stop_at(text: str, stops: Iterable[str]) -> tuple[str, str | None]:
    """Return the text before the first complete stop string, the longest of several; and that stop string."""
    for end in range(len(text) + 1):
        matched = [stop for stop in stops if text[:end].endswith(stop)]
        if matched:
            stop = max(matched, key=len)
            return text[: end - len(stop)], stop
    return text, None


def split_reasoning(text: str, is_inside: bool, form: TaggedReasoning) -> tuple[str, str]:
    """Return the reasoning and the content."""
    for start in form.starts:
        if text.lstrip().startswith(start):
            text, is_inside = text.lstrip().removeprefix(start), True
            break
    if not is_inside:
        return "", text
    ends = [(text.find(end), end) for end in (*form.ends, *form.kept_ends) if end in text]
    at, end = min(ends, default=(len(text), ""))
    return text[:at], text[at:] if end in form.kept_ends else text[at + len(end) :]


def parsed_calls(style: str, pieces: Sequence[str], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[Call]]:
    """Return all content and all calls that a parser makes of pieces.

    The result for the whole text in one piece is the reference. Checks that ids and names appear once, first, and in
    order.
    """
    numbers = itertools.count()
    parser = TOOL_PARSERS[style].parser(lambda name: f"id-{next(numbers)}", tools)
    content: list[str] = []
    calls: list[Call] = []
    for text, deltas in [*(parser.push(piece) for piece in pieces), parser.finish()]:
        content.append(text)
        for delta in deltas:
            if delta.name is not None:
                assert delta.index == len(calls) and delta.id is not None
                calls.append((delta.id, delta.name, delta.arguments))
            else:
                assert delta.index == len(calls) - 1 and delta.id is None and delta.arguments
                calls[-1] = (*calls[-1][:2], calls[-1][2] + delta.arguments)
    return "".join(content), calls


class Unread(list[Any]):
    """A list that must not be iterated over."""

    def __iter__(self) -> Any:
        raise AssertionError("read")
