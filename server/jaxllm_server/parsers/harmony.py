"""Parsers for gpt-oss's harmony format (openai/harmony, docs/format.md).

A message is `<|start|>assistant<|channel|>NAME to=RECIPIENT <|constrain|>json<|message|>…` up to `<|end|>`, `<|call|>`
or `<|return|>`. The prompt ends with `<|start|>assistant`, which the recipient may also follow. A message with a
recipient is a call; otherwise, channel `analysis` is reasoning, and the rest is content: the answer, or a preamble on
channel `commentary`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm_server.parsers.marker_reader import MarkerReader
from jaxllm_server.parsers.tool_call_json import skip
from jaxllm_server.parsers.tool_parsers import MakeId, ToolCallDelta, ToolParser

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, _CALL = "<|end|>", "<|call|>"
_ENDS = (END, _CALL, "<|return|>")
_MARKERS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)
_ANALYSIS = "analysis"
_RECIPIENT = "to="
_MAX_HEADER = 512  # characters; a longer one is text
FINAL = f"{_CHANNEL}final{_MESSAGE}"
CHANNEL = _CHANNEL
CALL_HEADERS = tuple(
    f"{header}{kind}{_MESSAGE}"
    for header in (
        f"{_CHANNEL}commentary to=functions.{{name}}",
        f"{_START}assistant to=functions.{{name}}{_CHANNEL}commentary",
    )
    for kind in ("", f" {_CONSTRAIN}json", f"{_CONSTRAIN}json", " json")
)


@dataclass(frozen=True, slots=True)
class _Message:
    channel: str = ""
    recipient: str = ""
    has_header: bool = False

    @property
    def is_reasoning(self) -> bool:
        return self.channel == _ANALYSIS and not self.recipient


@dataclass(frozen=True, slots=True)
class _Piece:
    message: _Message
    text: str
    is_first: bool = False
    is_over: bool = False


class _Messages(MarkerReader):
    """Splits an output into messages; text outside any has no header."""

    def __init__(self) -> None:
        super().__init__()
        self._read = self._read_start
        self._header: list[str] = []
        self._header_length = 0
        self._message: _Message | None = None
        self._pieces: list[_Piece] = []

    @property
    def is_reasoning(self) -> bool:
        return self._message is not None and self._message.is_reasoning

    def push(self, text: str) -> list[_Piece]:
        self._feed(text)
        return self._taken()

    def finish(self, is_cut_off: bool) -> list[_Piece]:
        """Keep held-back text, except an unfinished header or truncated marker."""
        if not is_cut_off and not "".join(self._header).startswith("<"):
            self._end_header(is_text=True)
        self._close()
        return self._taken()

    def _taken(self) -> list[_Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _read_start(self, text: str, start: int) -> int:
        if not self._partial:
            end = skip(text, start)
            self._header.append(text[start:end])
            start = end
        end, marker = self._match(text, start, (_RECIPIENT,))
        if marker:
            self._header.append(marker)
            self._read = self._read_header
        elif end < len(text):
            self._end_header(is_text=True)
        return end

    def _read_header(self, text: str, start: int) -> int:
        parts: list[str] = []
        end, marker = self._seek(text, start, _MARKERS, parts)
        self._header += parts
        self._header_length += sum(map(len, parts))
        if self._header_length > _MAX_HEADER:
            partial, self._partial = self._partial, ""
            self._end_header(is_text=True)
            self._partial = partial
            self._take_marker(marker)
        elif marker == _MESSAGE:
            self._message = _message_of("".join(self._header))
            self._pieces.append(_Piece(self._message, "", is_first=True))
            self._end_header(is_text=False)
        elif marker in _ENDS:
            self._end_header(is_text=True)
            self._close()
        elif marker == _START and not "".join(self._header).startswith("<"):
            self._end_header(is_text=True)  # resembled a recipient
            self._take_marker(marker)
        elif marker:
            self._header.append(marker)
            self._header_length += len(marker)
        return end

    def _end_header(self, is_text: bool) -> None:
        header, self._header = "".join([*self._header, self._partial]), []
        self._header_length, self._partial = 0, ""
        if is_text:
            self._text(header)
        self._read = self._read_text

    def _read_text(self, text: str, start: int) -> int:
        parts: list[str] = []
        end, marker = self._seek(text, start, _MARKERS, parts)
        self._text("".join(parts))
        self._take_marker(marker)
        return end

    def _take_marker(self, marker: str | None) -> None:
        if marker in _ENDS:
            self._close()
        elif marker in (_START, _CHANNEL):
            self._close()
            self._header = [marker]
            self._read = self._read_header
        else:
            self._text(marker or "")

    def _text(self, text: str) -> None:
        if text:
            is_first = self._message is None
            self._message = self._message or _Message()
            self._pieces.append(_Piece(self._message, text, is_first))

    def _close(self) -> None:
        if self._message is not None:
            self._pieces.append(_Piece(self._message, "", is_over=True))
            self._message = None


def _message_of(header: str) -> _Message:
    spaced = header.replace("<", " <")
    channel = spaced.rpartition(_CHANNEL)[2].split()[:1]
    recipients = [word.removeprefix(_RECIPIENT) for word in spaced.split() if word.startswith(_RECIPIENT)]
    return _Message("".join(channel), "".join(recipients[:1]), has_header=True)


class _Content:
    def __init__(self) -> None:
        self._has_come = False

    def of(self, piece: _Piece) -> str:
        break_ = "\n" if piece.is_first and piece.message.has_header and self._has_come else ""
        self._has_come = self._has_come or bool(piece.text)
        return break_ + piece.text


class HarmonyReasoning:
    """Splits an output into reasoning and content; calls stay in the content, with headers, for `HarmonyParser`."""

    markers = _MARKERS
    may_hold_calls = False

    def __init__(self) -> None:
        self._messages = _Messages()
        self._reasoning, self._content = _Content(), _Content()

    @property
    def is_reasoning(self) -> bool:
        return self._messages.is_reasoning

    def push(self, text: str) -> tuple[str, str]:
        return self._split(self._messages.push(text))

    def finish(self, is_cut_off: bool = False) -> tuple[str, str]:
        return self._split(self._messages.finish(is_cut_off))

    def _split(self, pieces: Sequence[_Piece]) -> tuple[str, str]:
        reasoning, content = [], []
        for piece in pieces:
            message = piece.message
            if message.is_reasoning:
                reasoning.append(self._reasoning.of(piece))
            elif message.recipient:
                header = f"{_START}assistant{_CHANNEL}{message.channel} {_RECIPIENT}{message.recipient}{_MESSAGE}"
                content += [header if piece.is_first else "", piece.text, _CALL if piece.is_over else ""]
            else:
                content.append(self._content.of(piece))
        return "".join(reasoning), "".join(content)


class HarmonyParser(ToolParser):
    """Splits an output into calls and content, which includes remaining reasoning.

    Arguments are a message's text, or `{}` if empty.
    """

    markers = _MARKERS

    def __init__(self, make_id: MakeId, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(make_id, tools)
        self._messages = _Messages()
        self._text = _Content()
        self._has_begun = False

    def push(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        self._take(self._messages.push(text))
        return self._taken()

    def _end(self) -> None:
        self._take(self._messages.finish(is_cut_off=False))

    def _drop(self) -> None:
        self._take(self._messages.finish(is_cut_off=True))

    def _take(self, pieces: Sequence[_Piece]) -> None:
        for piece in pieces:
            recipient = piece.message.recipient
            if not recipient:
                self._content.append(self._text.of(piece))
                continue
            arguments = piece.text or ("{}" if piece.is_over and not self._has_begun else "")
            if self._has_begun:
                self._extend_call(arguments)
            elif arguments:
                self._begin_call(recipient.removeprefix("functions."), arguments)
            self._has_begun = not piece.is_over and (self._has_begun or bool(arguments))


class AnalysisTokens:
    """Counts reasoning tokens by special tokens."""

    def __init__(self, token_id: Callable[[str], int | None]) -> None:
        self._channel, self._message = token_id(_CHANNEL), token_id(_MESSAGE)
        self._ends = {token_id(marker) for marker in (_START, *_ENDS)}
        self._analysis = token_id(_ANALYSIS)
        self._previous: int | None = None
        self._is_analysis = self._is_text = False

    def count(self, ids: Sequence[int], is_reasoning: bool) -> int:
        number = 0
        for token in ids:
            if token == self._channel or token in self._ends:
                self._is_analysis = self._is_text = False
            elif self._previous is not None and self._previous == self._channel:
                self._is_analysis = token == self._analysis
            elif token == self._message:
                self._is_text = True
            elif self._is_text and self._is_analysis:
                number += 1
            self._previous = token
        return number
