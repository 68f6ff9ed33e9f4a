"""Parsers for tool calls under a grammar, for all models; other text is content."""

from __future__ import annotations

from collections.abc import Callable

from jaxllm_server.parsers.json_calls import ListCalls
from jaxllm_server.parsers.tool_parsers import MakeId, ToolCallDelta


class RequiredCalls(ListCalls):
    """Parses `[{"name": …, "parameters": {…}}, …]`; content begins at the first mismatch."""

    _needs_arguments = True

    def __init__(self, make_id: MakeId) -> None:
        super().__init__(make_id)
        self._read = self._read_list

    def _after_list(self) -> Callable[[str, int], int]:
        return self._read_list

    def _after_text(self) -> Callable[[str, int], int]:
        return self._read_rest


class NamedCall:
    """Passes an output on as one call's arguments."""

    markers: tuple[str, ...] = ()

    def __init__(self, make_id: MakeId, name: str) -> None:
        self._make_id = make_id
        self._name = name
        self._has_begun = False

    def push(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        if not text:
            return "", []
        if self._has_begun:
            return "", [ToolCallDelta(0, None, None, text)]
        self._has_begun = True
        return "", [ToolCallDelta(0, self._make_id(self._name), self._name, text)]

    def finish(self, is_cut_off: bool = False) -> tuple[str, list[ToolCallDelta]]:
        return "", []
