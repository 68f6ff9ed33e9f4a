"""Parsers for calls that are JSON objects: Hermes, Llama, Granite, Mistral."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxllm_server.parsers.tool_call_json import MAX_NAME, CallObject, skip
from jaxllm_server.parsers.tool_parsers import MakeId, ToolParser, is_name


class ObjectCalls(ToolParser):
    """Base of parsers for JSON objects."""

    _object: CallObject | None = None

    @abstractmethod
    def _follow(self, call: CallObject) -> Callable[[str, int], int]:
        """Return the state after an object, a call or not."""

    def _begin_object(self, needs_arguments: bool) -> None:
        call = self._object = CallObject(needs_arguments)
        self._read = lambda text, start: self._read_object(call, text, start)

    def _read_object(self, call: CallObject, text: str, start: int) -> int:
        was_call = call.is_call
        end = call.read(text, start)
        if not call.is_call:
            self._held.append(text[start:end])
        elif was_call:
            self._extend_call(call.take_arguments())
        else:
            self._begin_call(call.name or "", call.take_arguments())
        if call.is_over:
            if not call.is_call:
                self._give_up()
            self._read = self._follow(call)
        return end


class HermesParser(ObjectCalls):
    """Parses any number of `<tool_call>{"name": …, "arguments": {…}}</tool_call>` between text.

    Content before the first call keeps its last newline, as in vLLM. Space before another call or the end is dropped;
    other text is content (vLLM drops it). Missing arguments mean `{}`. The end tag is optional; tags in JSON strings
    are text.
    """

    markers = ("<tool_call>", "</tool_call>")

    def __init__(self, make_id: MakeId, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(make_id, tools)
        self._read = self._read_content
        self._expected = self.markers[:1]

    def _read_content(self, text: str, start: int) -> int:
        end, marker = self._seek(text, start, self.markers[:1], self._content)
        if marker:
            self._open(marker)
        return end

    def _open(self, marker: str) -> None:
        self._held = [marker]
        self._read = self._read_opening

    def _read_opening(self, text: str, start: int) -> int:
        end = skip(text, start)
        self._held.append(text[start:end])
        if end < len(text):
            if text[end] == "{":
                self._begin_object(needs_arguments=False)
            else:
                self._give_up()
                self._read = self._read_content
        return end

    def _follow(self, call: CallObject) -> Callable[[str, int], int]:
        self._expected = self.markers
        return self._read_between if call.is_call else self._read_content

    def _read_between(self, text: str, start: int) -> int:
        end, marker = self._match_after_space(text, start, self._expected)
        if marker == self.markers[0]:
            self._open(self.markers[0])
        elif marker:
            self._held = []
            self._expected = self.markers[:1]
        elif end < len(text):
            self._give_up()
            self._read = self._read_content
        return end

    def _end(self) -> None:
        if self._read != self._read_between or self._partial:
            self._give_up()


class LlamaParser(ObjectCalls):
    """Parses `{"name": …, "parameters": {…}}`, separated by `;`, after an optional `<|python_tag|>`.

    Only an output that begins with a call has any, as in vLLM's stream. An object without name or arguments, such as
    requested JSON, is content. Space, `;` and markers are dropped; other text makes the rest content.
    """

    markers = ("<|python_tag|>",)

    def __init__(self, make_id: MakeId, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(make_id, tools)
        self._read = self._read_between
        self._may_separate = False
        self._may_mark = True

    def _read_between(self, text: str, start: int) -> int:
        if self._partial:
            end, marker = self._match(text, start, self.markers)
            if marker:
                self._held.append(marker)
                self._may_mark = self._may_separate = False
            elif end < len(text):
                self._refuse()
            return end
        end = skip(text, start)
        self._held.append(text[start:end])
        if end == len(text):
            return end
        if text[end] == "{":
            self._begin_object(needs_arguments=True)
        elif text[end] == ";" and self._may_separate:
            self._held.append(";")
            self._may_separate = False
            return end + 1
        elif text[end] == "<" and self._may_mark:
            self._partial = "<"
            return end + 1
        else:
            self._refuse()
        return end

    def _refuse(self) -> None:
        self._give_up()
        self._read = self._read_rest

    def _follow(self, call: CallObject) -> Callable[[str, int], int]:
        self._may_separate = self._may_mark = True
        return self._read_between if call.is_call and not call.is_broken else self._read_rest

    def _end(self) -> None:
        is_separator = self._num_calls and not self._partial and "".join(self._held).strip() in ("", ";")
        if self._read != self._read_between or not is_separator:
            self._give_up()

    def _drop(self) -> None:
        """Discard a truncated output's held text, unless it is an unmarked object with members foreign to calls."""
        is_marked = self.markers[0] in "".join(self._held)
        if self._object is not None and self._object.is_foreign and not is_marked:
            self._give_up()
        super()._drop()


class ListCalls(ObjectCalls):
    """Base of parsers of `[{…}, {…}]`; brackets, commas and space are dropped."""

    _needs_arguments = False
    _expected = "["

    def _read_list(self, text: str, start: int) -> int:
        end = skip(text, start)
        self._held.append(text[start:end])
        if end == len(text):
            return end
        if text[end] == "{" == self._expected:
            self._begin_object(self._needs_arguments)
        elif text[end] in self._expected and text[end] != "{":
            self._held.append(text[end])
            self._expected = "" if text[end] == "]" else "{"
            if text[end] == "]":
                self._read = self._after_list()
            return end + 1
        else:
            self._give_up()
            self._read = self._after_text()
        return end

    @abstractmethod
    def _after_list(self) -> Callable[[str, int], int]:
        """Return the state after a list."""

    @abstractmethod
    def _after_text(self) -> Callable[[str, int], int]:
        """Return the state after other text."""

    def _follow(self, call: CallObject) -> Callable[[str, int], int]:
        self._expected = ",]"
        return self._read_list if call.is_call and not call.is_broken else self._after_text()

    def _end(self) -> None:
        if self._read != self._read_list or not self._num_calls:
            self._give_up()


class GraniteParser(ListCalls):
    """Parses `<|tool_call|>[{"name": …, "arguments": {…}}, …]` between text; Granite 3.1's marker is `<tool_call>`."""

    markers = ("<|tool_call|>", "<tool_call>")
    _openings = markers

    def __init__(self, make_id: MakeId, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(make_id, tools)
        self._read = self._read_content

    def _read_content(self, text: str, start: int) -> int:
        end, marker = self._seek(text, start, self._openings, self._content)
        if marker:
            self._open(marker)
        return end

    def _open(self, marker: str) -> None:
        self._held = [marker]
        self._expected = "["
        self._read = self._read_list

    def _after_list(self) -> Callable[[str, int], int]:
        self._held = []
        return self._read_between

    def _after_text(self) -> Callable[[str, int], int]:
        return self._read_content

    def _read_between(self, text: str, start: int) -> int:
        end, marker = self._match_after_space(text, start, self._openings)
        if marker:
            self._open(marker)
        elif end < len(text):
            self._refuse()
        return end

    def _refuse(self) -> None:
        self._give_up()
        self._read = self._read_content

    def _end(self) -> None:
        is_between = self._num_calls and not self._partial and self._read in (self._read_list, self._read_between)
        if not is_between:
            self._give_up()


class MistralParser(GraniteParser):
    """Parses `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name[ARGS]{…}` per call, between text.

    Tokenizers from version 11 on use the second form; `[CALL_ID]` and an id may precede `[ARGS]`, optional as in vLLM
    (mistral-common, tokens/tokenizers/instruct.py).
    """

    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    _openings = markers[:1]
    _identity = ""

    def _open(self, marker: str) -> None:
        super()._open(marker)
        self._name = self._identity = ""
        self._read = self._read_opening

    def _read_opening(self, text: str, start: int) -> int:
        end = skip(text, start)
        self._held.append(text[start:end])
        if end < len(text):
            self._read = self._read_list if text[end] == "[" else self._read_name
            if text[end] == "{":
                self._begin_object(self._needs_arguments)
        return end

    def _read_name(self, text: str, start: int) -> int:
        end = start
        if not self._partial:
            end, is_short = self._extend_name(text, start, "[{")
            if not is_short or (end < len(text) and not is_name(self._name.strip())):
                self._refuse()
                return end
            if end < len(text) and text[end] == "{":
                self._read = self._read_brace
                return end
        return self._read_marker(text, end, self.markers)

    def _read_identity(self, text: str, start: int) -> int:
        end = start
        if not self._partial:
            end = text.find("[", start)
            end = len(text) if end < 0 else end
            self._held.append(text[start:end])
            self._identity += text[start:end]
            if len(self._identity) > MAX_NAME:
                self._refuse()
                return end
        return self._read_marker(text, end, self.markers[:2])

    def _read_marker(self, text: str, start: int, markers: tuple[str, ...]) -> int:
        end, marker = self._match(text, start, markers)
        if marker == self._openings[0]:
            self._give_up()
            self._open(marker)
        elif marker:
            self._held.append(marker)
            self._read = self._read_brace if marker == self.markers[1] else self._read_identity
        elif end < len(text):
            self._refuse()
        return end

    def _read_brace(self, text: str, start: int) -> int:
        end = skip(text, start)
        self._held.append(text[start:end])
        if end < len(text):
            if text[end] == "{":
                self._begin_call(self._name.strip(), "", self._identity.strip())
                self._begin_arguments(self._read_between)
            else:
                self._refuse()
        return end
