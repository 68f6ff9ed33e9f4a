"""Splits a model's text into reasoning and content while it comes, at tags like `<think>` and `</think>`.

The tags are dropped and everything else is kept as it is, the newlines around the tags too, as in vLLM
(reasoning/qwen3_reasoning_parser.py, deepseek_r1_reasoning_parser.py). An output without an end tag was cut off and is
all reasoning. Tags count once: a second `<think>`, and whatever follows the first `</think>`, is text. The forms of
models are rows of table.py. Knows nothing of requests, templates and tool calls.
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
    """Splits one output in time linear in its length; what it returns does not depend on how the text is cut."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens of most vocabularies: their text must not be skipped."""
        ...

    @property
    def may_hold_calls(self) -> bool:
        """Whether a tool call in the reasoning stays in the text of that."""
        ...

    @property
    def is_reasoning(self) -> bool:
        """Whether the next character is reasoning, as far as the text so far says."""
        ...

    def push(self, text: str) -> tuple[str, str]:
        """Take in more text; return the reasoning and the content that are certain now."""
        ...

    def finish(self, is_cut_off: bool = False) -> tuple[str, str]:
        """Return the text held back at the end of an output, without a partial tag if it was truncated."""
        ...


class Habit(Enum):
    """When a model reasons."""

    ALWAYS = auto()  # from its first token on, whether or not its template opens the reasoning, unless that closes it
    BY_ITSELF = auto()  # it or its template says the start tag; with thinking switched off, neither does
    IF_OPENED = auto()  # if its template says the start tag
    IF_ASKED = auto()  # if its prompt, in the system message as a rule, has the start tag anywhere


@dataclass(frozen=True, slots=True)
class TaggedReasoning:
    """How a model writes its reasoning between tags. All start tags, and all end tags, begin with one character."""

    starts: tuple[str, ...]
    ends: tuple[str, ...]  # the first one is the model's own; the others end the reasoning as well
    habit: Habit
    kept_ends: tuple[str, ...] = ()  # those that belong to the content

    def begin_after(self, is_forced: bool) -> tuple[str, ...]:
        """Return the texts after which a constraint of the answer holds."""
        return self.ends

    def openings(self, prompt: str) -> tuple[str, ...]:
        """Return the texts that begin a reasoning; () if every output begins inside of one."""
        return () if self._starts_inside(prompt) else self.starts

    def opens(self, prompt: str) -> bool:
        """Whether a prompt's text ends with a start tag, so that the output begins inside of the reasoning."""
        return prompt.rstrip().endswith(self.starts)

    def closes(self, prompt: str) -> bool:
        """Whether a prompt's text ends with an end tag, so that the output begins after the reasoning."""
        return prompt.rstrip().endswith(self.ends)

    def may_reason(self, prompt: str, is_switched_off: bool) -> bool:
        """Whether an output may begin with reasoning, so that a constraint of the answer holds only after its end."""
        if self.closes(prompt):
            return False
        if self.opens(prompt) or self.habit is Habit.ALWAYS:
            return True
        if self.habit is Habit.BY_ITSELF:
            return not is_switched_off
        return self.habit is Habit.IF_ASKED and any(start in prompt for start in self.starts)

    def parser(self, prompt: str = "") -> TagParser:
        """Return a parser of one output to a prompt."""
        return TagParser(self, self._starts_inside(prompt))

    def _starts_inside(self, prompt: str) -> bool:
        return self.opens(prompt) or (self.habit is Habit.ALWAYS and not self.closes(prompt))

    def counter(self, token_id: TokenId) -> ReasoningTokens:
        """Return what counts the tokens of one output that are reasoning."""
        return ReasoningTokens(token_id(self.ends[0]))


class HarmonyChannels:
    """gpt-oss's channels: an answer, or a call, is always opened by a header of its own."""

    kept_ends: tuple[str, ...] = ()

    def begin_after(self, is_forced: bool) -> tuple[str, ...]:
        """Return the text after which a constraint of the answer, or of calls that are forced, holds.

        With tools the model would call them by a header of its own, and never come to a final answer.
        """
        return (END,) if is_forced else (FINAL,)

    def openings(self, prompt: str) -> tuple[str, ...]:
        """Return the marker of the first header."""
        return (CHANNEL,)

    def may_reason(self, prompt: str, is_switched_off: bool) -> bool:
        """Return True: what is not reasoned has a header too."""
        return True

    def parser(self, prompt: str = "") -> HarmonyReasoning:
        """Return a parser of one output."""
        return HarmonyReasoning()

    def counter(self, token_id: TokenId) -> AnalysisTokens:
        """Return what counts the tokens of one output that are reasoning."""
        return AnalysisTokens(token_id)


class _State(Enum):
    OPENING = auto()  # nothing but space and perhaps a part of the start tag has come
    REASONING = auto()
    CONTENT = auto()


class TagParser:
    """A `ReasoningParser` of tags.

    `starts_inside`: the reasoning begins with the first character; a start tag that the model repeats there is dropped.
    Otherwise there is reasoning only if the output begins with the start tag.
    """

    may_hold_calls = True

    def __init__(self, form: TaggedReasoning, starts_inside: bool) -> None:
        self.markers = (*form.starts, *form.ends)
        self._form = form
        self._ends = (*form.ends, *form.kept_ends)
        self._starts_inside = starts_inside
        self._state = _State.OPENING
        self._space: list[str] = []  # before a start tag; dropped if one comes
        self._held = ""  # what may become a tag

    @property
    def is_reasoning(self) -> bool:
        """Whether the next character is reasoning, as far as the text so far says."""
        if self._state is _State.OPENING:
            return self._starts_inside
        return self._state is _State.REASONING

    def push(self, text: str) -> tuple[str, str]:
        """Take in more text; return the reasoning and the content that are certain now."""
        if self._state is _State.OPENING:
            text = self._open(text)
        reasoning = content = ""
        if self._state is _State.REASONING:
            reasoning, text = self._split(text)
        if self._state is _State.CONTENT:
            content = text
        return reasoning, content

    def finish(self, is_cut_off: bool = False) -> tuple[str, str]:
        """Return the text held back at the end of an output, without a partial tag if it was truncated."""
        held = "" if is_cut_off else "".join([*self._space, self._held])
        self._space, self._held = [], ""
        return (held, "") if self.is_reasoning else ("", held)

    def _open(self, text: str) -> str:
        """Look for a start tag; return the text that is to be read in the state this led to."""
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
        """Look for an end tag; return the reasoning before it and the text after it, "" while it has not come."""
        text = self._held + text
        self._held = ""
        found = [(at, tag) for tag in self._ends if (at := text.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            self._state = _State.CONTENT
            return text[:at], text[at if tag in self._form.kept_ends else at + len(tag) :]
        # A tag has its first character nowhere else, so only the last one can begin an unfinished tag.
        start = text.rfind(self._ends[0][0])
        if start >= 0 and any(tag.startswith(text[start:]) for tag in self._ends):
            self._held = text[start:]
        return text[: len(text) - len(self._held)], ""


class ReasoningTokens:
    """Counts the tokens of reasoning that one token ends; none where the end is no single token."""

    def __init__(self, end_id: int | None) -> None:
        self._end_id = end_id
        self._is_counting = end_id is not None

    def count(self, ids: Sequence[int], is_reasoning: bool) -> int:
        """Count those of the next tokens before the end; all or none by `is_reasoning` if it is not there."""
        if not self._is_counting:
            return 0
        before = list(takewhile(lambda token: token != self._end_id, ids))
        if len(before) < len(ids):
            self._is_counting = False
            return len(before)
        return len(ids) if is_reasoning else 0
