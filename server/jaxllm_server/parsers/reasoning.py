"""Splits a model's text into reasoning and content while it comes, at `<think>` and `</think>`.

The tags are dropped and everything else is kept as it is, the newlines around the tags too, as in vLLM
(reasoning/qwen3_reasoning_parser.py, deepseek_r1_reasoning_parser.py). An output without an end tag was cut off and is
all reasoning. Tags count once: a second `<think>`, and whatever follows the first `</think>`, is text. Knows nothing of
requests, templates and tool calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, auto
from types import MappingProxyType

_START = "<think>"
END = "</think>"


class _State(Enum):
    OPENING = auto()  # nothing but space and perhaps a part of the start tag has come
    REASONING = auto()
    CONTENT = auto()


class ReasoningParser:
    """Splits one output in time linear in its length; what it returns does not depend on how the text is cut.

    `starts_inside`: the prompt ends inside of the reasoning, so it begins with the first character; a start tag that
    the model repeats there is dropped. Otherwise there is reasoning only if the output begins with the start tag.
    """

    markers = (_START, END)  # special tokens of most vocabularies: their text must not be skipped

    def __init__(self, starts_inside: bool) -> None:
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

    def finish(self) -> tuple[str, str]:
        """Return what was held back, now that no text follows."""
        held = "".join([*self._space, self._held])
        self._space, self._held = [], ""
        return (held, "") if self.is_reasoning else ("", held)

    def _open(self, text: str) -> str:
        """Look for the start tag; return the text that is to be read in the state this led to."""
        if not self._held:
            rest = text.lstrip()
            self._space.append(text[: len(text) - len(rest)])
            text = rest
        text = self._held + text
        if len(text) < len(_START) and _START.startswith(text):
            self._held = text
            return ""
        self._held = ""
        if text.startswith(_START):
            self._state = _State.REASONING
            rest = text[len(_START) :]
        else:
            self._state = _State.REASONING if self._starts_inside else _State.CONTENT
            rest = "".join([*self._space, text])
        self._space = []
        return rest

    def _split(self, text: str) -> tuple[str, str]:
        """Look for the end tag; return the reasoning before it and the text after it, "" while it has not come."""
        text = self._held + text
        self._held = ""
        before, tag, after = text.partition(END)
        if tag:
            self._state = _State.CONTENT
            return before, after
        # A tag has its first character nowhere else, so only the last one can begin an unfinished tag.
        start = text.rfind("<")
        if start >= 0 and END.startswith(text[start:]):
            self._held = text[start:]
        return text[: len(text) - len(self._held)], ""


def opens_reasoning(prompt: str) -> bool:
    """Whether a prompt's text ends with a start tag, so that the output begins inside of the reasoning."""
    return prompt.rstrip().endswith(_START)


def closes_reasoning(prompt: str) -> bool:
    """Whether a prompt's text ends with an end tag, so that the output begins after the reasoning."""
    return prompt.rstrip().endswith(END)


def reasons(style: str, prompt: str, is_switched_off: bool) -> bool:
    """Whether an output may begin with reasoning, so that a constraint of the answer holds only after its end tag.

    Of qwen3, a template says so by either tag, and by none where the model opens the reasoning itself or, with thinking
    switched off, none is wanted. deepseek_r1 reasons unless its prompt has the end tag.
    """
    if closes_reasoning(prompt):
        return False
    return style == "deepseek_r1" or opens_reasoning(prompt) or not is_switched_off


# Made of whether the prompt opens the reasoning, and whether it closes it.
REASONING_PARSERS: Mapping[str, Callable[..., ReasoningParser]] = MappingProxyType(
    {
        # Says `<think>` itself, unless the template did; with thinking switched off, neither does.
        "qwen3": lambda starts_inside, is_closed=False: ReasoningParser(starts_inside),
        # Reasons from its first token on, whether or not its template says so (some revisions of it do not), unless the
        # template says that the reasoning is over.
        "deepseek_r1": lambda starts_inside, is_closed=False: ReasoningParser(starts_inside=not is_closed),
    }
)
