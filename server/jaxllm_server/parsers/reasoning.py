"""Streaming split of text into reasoning and content, at tags such as `<think>` and `</think>`.

Only tags are dropped, as in vLLM (reasoning/qwen3_reasoning_parser.py, deepseek_r1_reasoning_parser.py). Without an end
tag all is reasoning. A second `<think>`, and tags after the first `</think>`, are text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import takewhile
from typing import Protocol

from jaxllm_server.parsers.harmony import CHANNEL, END, FINAL, AnalysisTokens, HarmonyReasoning

TokenId = Callable[[str], int | None]


class ReasoningParser(Protocol):
    """Splits an output in linear time, independently of its chunks."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Tags that detokenization must keep."""
        ...

    @property
    def may_hold_calls(self) -> bool:
        """Whether a call inside reasoning stays in its text."""
        ...

    @property
    def is_reasoning(self) -> bool:
        """Whether the next character is reasoning."""
        ...

    def push(self, text: str) -> tuple[str, str]:
        """Return final reasoning and content."""
        ...

    def finish(self, is_cut_off: bool = False) -> tuple[str, str]:
        """Return held-back text, except a partial tag of a truncated output."""
        ...


class ReasoningMode(Enum):
    """When a model reasons."""

    ALWAYS = auto()  # from the first token, unless the template closes the reasoning
    BY_ITSELF = auto()  # model or template writes the start tag, unless thinking is disabled
    IF_OPENED = auto()  # if the template writes the start tag
    IF_ASKED = auto()  # if the prompt contains the start tag


@dataclass(frozen=True, slots=True)
class TaggedReasoning:
    """A model's reasoning tags. Start tags share a first character, as do end tags."""

    starts: tuple[str, ...]
    ends: tuple[str, ...]  # the model's end tag, then others
    habit: ReasoningMode
    kept_ends: tuple[str, ...] = ()  # that belong to the content

    def begin_after(self, is_forced: bool) -> tuple[str, ...]:
        """Return the texts after which a constraint on the answer applies."""
        return self.ends

    def openings(self, prompt: str) -> tuple[str, ...]:
        """Return the tags that may open reasoning; none if the output begins inside."""
        return () if self._starts_inside(prompt) else self.starts

    def opens(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(self.starts)

    def closes(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(self.ends)

    def may_reason(self, prompt: str, is_switched_off: bool) -> bool:
        """Return whether reasoning may precede the answer, to delay a constraint."""
        if self.closes(prompt):
            return False
        if self.opens(prompt) or self.habit is ReasoningMode.ALWAYS:
            return True
        if self.habit is ReasoningMode.BY_ITSELF:
            return not is_switched_off
        return self.habit is ReasoningMode.IF_ASKED and any(start in prompt for start in self.starts)

    def parser(self, prompt: str = "") -> TagParser:
        return TagParser(self, self._starts_inside(prompt))

    def _starts_inside(self, prompt: str) -> bool:
        return self.opens(prompt) or (self.habit is ReasoningMode.ALWAYS and not self.closes(prompt))

    def counter(self, token_id: TokenId) -> ReasoningTokens:
        return ReasoningTokens(token_id(self.ends[0]))


class HarmonyChannels:
    """`TaggedReasoning`'s counterpart for gpt-oss's channels.

    A header, with the channel's name, precedes every answer and call.
    """

    kept_ends: tuple[str, ...] = ()

    def begin_after(self, is_forced: bool) -> tuple[str, ...]:
        """Return the text after which a grammar applies: the header of the final channel.

        With forced calls the end of the reasoning, since a final answer might never follow.
        """
        return (END,) if is_forced else (FINAL,)

    def openings(self, prompt: str) -> tuple[str, ...]:
        return (CHANNEL,)

    def may_reason(self, prompt: str, is_switched_off: bool) -> bool:
        """Return True: a header always precedes the answer."""
        return True

    def parser(self, prompt: str = "") -> HarmonyReasoning:
        return HarmonyReasoning()

    def counter(self, token_id: TokenId) -> AnalysisTokens:
        return AnalysisTokens(token_id)


class _State(Enum):
    OPENING = auto()
    REASONING = auto()
    CONTENT = auto()


class TagParser:
    """A `ReasoningParser` for tags.

    With `starts_inside`, the output begins as reasoning and a start tag is dropped; else only a start tag at its
    beginning opens reasoning.
    """

    may_hold_calls = True

    def __init__(self, form: TaggedReasoning, starts_inside: bool) -> None:
        self.markers = (*form.starts, *form.ends)
        self._form = form
        self._ends = (*form.ends, *form.kept_ends)
        self._starts_inside = starts_inside
        self._state = _State.OPENING
        self._space: list[str] = []
        self._held = ""

    @property
    def is_reasoning(self) -> bool:
        if self._state is _State.OPENING:
            return self._starts_inside
        return self._state is _State.REASONING

    def push(self, text: str) -> tuple[str, str]:
        if self._state is _State.OPENING:
            text = self._open(text)
        reasoning = content = ""
        if self._state is _State.REASONING:
            reasoning, text = self._split(text)
        if self._state is _State.CONTENT:
            content = text
        return reasoning, content

    def finish(self, is_cut_off: bool = False) -> tuple[str, str]:
        held = "" if is_cut_off else "".join([*self._space, self._held])
        self._space, self._held = [], ""
        return (held, "") if self.is_reasoning else ("", held)

    def _open(self, text: str) -> str:
        if not self._held:
            rest = text.lstrip()
            self._space.append(text[: len(text) - len(rest)])
            text = rest
        text = self._held + text
        if any(len(text) < len(start) and start.startswith(text) for start in self._form.starts):
            self._held = text
            return ""
        self._held = ""
        for start in self._form.starts:
            if text.startswith(start):
                self._state = _State.REASONING
                rest = text[len(start) :]
                break
        else:
            self._state = _State.REASONING if self._starts_inside else _State.CONTENT
            rest = "".join([*self._space, text])
        self._space = []
        return rest

    def _split(self, text: str) -> tuple[str, str]:
        text = self._held + text
        self._held = ""
        found = [(at, tag) for tag in self._ends if (at := text.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            self._state = _State.CONTENT
            return text[:at], text[at if tag in self._form.kept_ends else at + len(tag) :]
        # Tags contain their first character once, so only the last occurrence can begin a partial one.
        start = text.rfind(self._ends[0][0])
        if start >= 0 and any(tag.startswith(text[start:]) for tag in self._ends):
            self._held = text[start:]
        return text[: len(text) - len(self._held)], ""


class ReasoningTokens:
    """Counts reasoning tokens up to the end tag; 0 if that is not one token."""

    def __init__(self, end_id: int | None) -> None:
        self._end_id = end_id
        self._is_counting = end_id is not None

    def count(self, ids: Sequence[int], is_reasoning: bool) -> int:
        """Count new tokens before the end tag; without one, all if `is_reasoning`, else 0.

        Calls after the tag return 0.
        """
        if not self._is_counting:
            return 0
        before = list(takewhile(lambda token: token != self._end_id, ids))
        if len(before) < len(ids):
            self._is_counting = False
            return len(before)
        return len(ids) if is_reasoning else 0
