"""Determine a chat template's message shape: the first whose probes render completely.

Templates differ in null content, call arguments (text or objects) and the name of reasoning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, TypeAlias

Message: TypeAlias = dict[str, Any]
# None: an error, or too long.
Show: TypeAlias = Callable[[list[Message]], str | None]
Blank: TypeAlias = Literal["missing", "null", "empty"]

CALLER = "assistant with calls"  # some templates render its content differently
BLANKS: Mapping[Blank, Message] = {"missing": {}, "null": {"content": None}, "empty": {"content": ""}}
# In no template.
_NAME, _KEY, _VALUE, _FIRST, _SECOND, _THOUGHT = (
    f"jaxllm{word}" for word in ("f", "k", "v", "first", "second", "idea")
)
_OBJECT = {_KEY: _VALUE}
_CUT_OFF = '{"' + _KEY
_IDS = ("chatcmpl-tool-1", "a1b2c3d4e")  # common; required by Mistral's templates
_NONE = re.compile("None|null")
_TYPE = re.compile("""['"]type['"]""")
TOOL: Message = {
    "type": "function",
    "function": {
        "name": "other",
        "description": "Other.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "X."}},
            "required": ["x"],
        },
    },
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A template's message shape."""

    parts: frozenset[str]  # roles with content parts
    texts: frozenset[str]  # roles with content text
    blank: Blank  # without content and calls
    blank_beside_calls: Blank
    loses_calls_beside_empty: bool  # drops calls if content is ""
    takes_objects: bool
    takes_texts: bool  # even truncated
    short_ids: bool  # nine letters and digits
    thought_is_part: bool  # of type "thinking"
    names_reasoning: bool  # `reasoning`, which transformers does not set

    def takes_parts(self, role: str) -> bool:
        return self._like(role) in self.parts

    def takes_text(self, role: str) -> bool:
        return self._like(role) in self.texts

    def _like(self, role: str) -> str:
        role = "system" if role == "developer" else role
        return role if role in self.parts | self.texts else "user"


def find_shape(show: Show, source: str) -> Shape:
    kinds = {"user": _kinds(show, lambda message: [[message]], "user")}
    user, answer = _turn("user", "Hi.", kinds), _turn("assistant", "Yes.", kinds)
    calls = _Calls(show, user, answer)
    kinds["system"] = _kinds(show, lambda message: [[message, user]], "system")
    kinds["assistant"] = _kinds(show, lambda message: [[user, message, user], [user, message]], "assistant")
    kinds[CALLER] = _kinds(show, calls.around_caller, "assistant", **calls.caller)
    kinds[CALLER] = kinds[CALLER] or kinds["assistant"]
    kinds["tool"] = _kinds(show, lambda message: calls.around(calls.message(), message), "tool", **calls.answers)
    kinds["user"] |= set() if kinds["user"] else {"text"}
    is_part = "thinking" in source and "parts" in kinds["assistant"] and calls.thought_is_part()
    return Shape(
        parts=frozenset(role for role, own in kinds.items() if "parts" in own),
        texts=frozenset(role for role, own in kinds.items() if "text" in own),
        blank=_best_blank(lambda blank: map(show, ([user, blank], [user, blank, user]))) or "missing",
        thought_is_part=is_part,
        names_reasoning=re.search(r"\breasoning\b", source) is not None,
        **calls.found,
    )


class _Calls:
    """Probes the form of tool calls."""

    def __init__(self, show: Show, user: Message, answer: Message) -> None:
        self._show = show
        self._user, self._answer = user, answer
        self._blank: Blank
        self._id, self._arguments, self._blank = self._form()
        self.caller: Message = {"tool_calls": [_call(self._id, self._arguments)]}
        self.answers: Message = {"tool_call_id": self._id, "name": _NAME}
        is_shown, takes_objects = self._shows(self.message()), isinstance(self._arguments, dict)
        takes_cut_off = any(
            text is not None for text in self._texts(self.message(tool_calls=[_call(self._id, _CUT_OFF)]))
        )
        self.found: Message = {
            "takes_objects": takes_objects,
            "takes_texts": takes_cut_off or not takes_objects or not is_shown,
            "short_ids": self._id == _IDS[1],
            "blank_beside_calls": self._blank,
            "loses_calls_beside_empty": is_shown and not self._shows(self.message(content="")),
        }

    def message(self, **more: Any) -> Message:
        return {"role": "assistant", **BLANKS[self._blank], **self.caller, **more}

    def around(self, message: Message, result: Message) -> list[list[Message]]:
        return [[self._user, message, result], [self._user, message, result, self._answer, self._user]]

    def around_caller(self, message: Message, call_id: str | None = None) -> list[list[Message]]:
        result = {"role": "tool", "content": "1", "tool_call_id": call_id or self._id, "name": _NAME}
        return [[self._user, message], *self.around(message, result)]

    def thought_is_part(self) -> bool:
        named = {"reasoning_content": _THOUGHT, "thinking": _THOUGHT, "reasoning": _THOUGHT}
        parts = [{"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": _FIRST}]
        turn = {"role": "assistant", "content": [{"type": "text", "text": _FIRST}]}

        def shows(message: Message) -> bool:
            conversations = [[self._user, message], [self._user, message, self._user]]
            return any(_THOUGHT in (text or "") for text in map(self._show, conversations))

        return not shows({**turn, **named}) and shows({**turn, "content": parts})

    def _form(self) -> tuple[str, Any, Blank]:
        for own_id, arguments in product(_IDS, (_OBJECT, json.dumps(_OBJECT))):
            calls = [_call(own_id, arguments)]
            blank = _best_blank(
                lambda blank, calls=calls, own_id=own_id: self._texts({**blank, "tool_calls": calls}, own_id), _is_call
            )
            if blank is not None:
                return own_id, arguments, blank
        calls = [_call(_IDS[0], _OBJECT)]  # not rendered
        blank = _best_blank(lambda blank: self._texts({**blank, "tool_calls": calls}, _IDS[0]))
        return _IDS[0], _OBJECT, blank or "empty"

    def _texts(self, message: Message, call_id: str | None = None) -> Iterable[str | None]:
        return map(self._show, self.around_caller(message, call_id or self._id))

    def _shows(self, message: Message) -> bool:
        return any(text is not None and _is_call(text) for text in self._texts(message))


def _kinds(show: Show, around: Callable[[Message], list[list[Message]]], role: str, **more: Any) -> set[str]:
    def texts(content: Any) -> Iterable[str]:
        return (text or "" for text in map(show, around({"role": role, **more, "content": content})))

    kinds: set[str] = set()
    parts = [{"type": "text", "text": word} for word in (_FIRST, _SECOND)]
    for as_text, as_parts in zip(texts(_FIRST), texts(parts), strict=True):
        once = as_text.count(_FIRST)
        kinds |= {"text"} if once else set()
        # Otherwise parts are printed, or text is repeated per part.
        is_plain = len(_TYPE.findall(as_parts)) <= len(_TYPE.findall(as_text))
        if is_plain and 0 < as_parts.count(_FIRST) == as_parts.count(_SECOND) <= (once or 1):
            kinds.add("parts")
    return kinds


def _best_blank(
    texts: Callable[[Message], Iterable[str | None]], is_whole: Callable[[str], bool] = lambda text: True
) -> Blank | None:
    found: dict[Blank, list[str]] = {}
    for name, blank in BLANKS.items():
        whole = [text for text in texts({"role": "assistant", **blank}) if text is not None and is_whole(text)]
        found |= {name: whole} if whole else {}
    if len(found) > 1 and "null" in found:
        spelled = {name: sum(len(_NONE.findall(text)) for text in own) for name, own in found.items()}
        if spelled.pop("null") > min(spelled.values()):
            del found["null"]  # rendered as "None" or "null"
    return min(found, key=lambda name: (-len(found[name]), sum(map(len, found[name])))) if found else None


def _turn(role: str, text: str, kinds: Mapping[str, set[str]]) -> Message:
    as_parts = kinds["user"] == {"parts"}
    return {"role": role, "content": [{"type": "text", "text": text}] if as_parts else text}


def _call(call_id: str, arguments: Any) -> Message:
    return {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": arguments}}


def _is_call(text: str) -> bool:
    return all(word in text for word in (_NAME, _KEY, _VALUE)) and "{'" + _KEY not in text
