"""Locate chat template errors: the message, by identity in tracebacks, and values, by the failed line's fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import nodes

_KINDS = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a text"}
_KINDS |= {list: "a list", dict: "an object"}
_LONGEST_NAME = 64  # characters


def words_by_line(tree: nodes.Template) -> dict[int, frozenset[str]]:
    from jinja2 import nodes

    found: dict[int, set[str]] = {}
    for node in tree.find_all((nodes.Getattr, nodes.Getitem)):
        name = node.attr if isinstance(node, nodes.Getattr) else node.arg
        name = name.value if isinstance(name, nodes.Const) else name
        if isinstance(name, str):
            found.setdefault(node.lineno, set()).add(name)
    return {line: frozenset(names) for line, names in found.items()}


def place_of(
    error: BaseException, conversation: Sequence[Mapping[str, Any]], words: Mapping[int, frozenset[str]]
) -> str:
    index, lines = None, []
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_filename == "<template>":
            lines.append(trace.tb_lineno)
            # The innermost loop's message is last.
            for value in frame.f_locals.values():
                index = next((at for at, message in enumerate(conversation) if message is value), index)
        trace = trace.tb_next
    if index is None:
        return ""
    read = frozenset[str]().union(*(words.get(line, frozenset[str]()) for line in lines))
    message = conversation[index]
    values = [f"{path[:_LONGEST_NAME]} is {kind}" for path, kind in _values(message, read)]
    missing = ["content is missing"] if "content" in read and "content" not in message else []
    told = ", ".join([*missing, *values])
    return f" (messages[{index}]{': ' + told if told else ''})"


def _values(value: Any, names: frozenset[str], path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            inner_path = f"{path}.{key}" if path else str(key)
            if key in names and not isinstance(item, str) and not _has_names(item, names):
                yield inner_path, _KINDS.get(type(item), "a value")
            elif key == "arguments" and key in names and isinstance(item, str):
                yield inner_path, "a text"
            elif path.count(".") < 3:
                yield from _values(item, names, inner_path)
    elif isinstance(value, list):
        for at, item in enumerate(value[:4]):
            yield from _values(item, names, f"{path}[{at}]")


def _has_names(value: Any, names: frozenset[str]) -> bool:
    if isinstance(value, list):
        return any(_has_names(item, names) for item in value[:4])
    return isinstance(value, Mapping) and any(key in names or _has_names(item, names) for key, item in value.items())
