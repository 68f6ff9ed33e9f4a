"""Parse the event streams of the OpenAI API into outcomes.

Tolerates CRLF, comments, late errors, and missing usage, role or `[DONE]`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from jaxllm.bench.outcome import Outcome

_MOST_SHOWN = 200  # of an error


class EventReader:
    """Splits bytes into payloads of `data:` lines."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # joined at the line's end: linear time

    def feed(self, received: bytes) -> list[bytes]:
        head, end, rest = received.rpartition(b"\n")
        if not end:
            self._rest.append(received)
            return []
        lines = b"".join((*self._rest, head)).split(b"\n")
        self._rest = [rest]
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class AnswerReader:
    """Fills an outcome from the events of its response."""

    def __init__(self, outcome: Outcome, is_chat: bool) -> None:
        self._outcome, self._is_chat = outcome, is_chat
        self._pieces: list[str] = []
        self._last_at = 0.0
        self._is_complete = False

    def take(self, payloads: Iterable[bytes], now: float) -> None:
        """Process events received at `now`; each with new tokens is a message."""
        for payload in payloads:
            if payload == b"[DONE]":
                self._is_complete = True
                continue
            try:
                event = json.loads(payload)
            except ValueError:
                self._outcome.error = f"an event is not valid JSON: {shorten(payload.decode(errors='replace'))}"
                continue
            if not isinstance(event, dict) or "error" in event:
                self._outcome.error = f"the stream failed: {error_message(event)}"
                continue
            if event.get("usage"):
                self._outcome.output_tokens = event["usage"].get("completion_tokens")
                self._outcome.seen_prompt_tokens = event["usage"].get("prompt_tokens")
            for choice in event.get("choices") or ():
                self._take_choice(choice, now)

    def finish(self) -> None:
        outcome = self._outcome
        outcome.text = "".join(self._pieces)
        if not outcome.message_times and outcome.output_tokens and self._last_at:
            outcome.message_times.append(self._last_at)  # tokens without text
        if outcome.error:
            return
        if not self._is_complete:
            outcome.error = "the stream ended before the answer did"
        elif not outcome.message_times:
            outcome.error = "the answer has no token"

    def _take_choice(self, choice: dict[str, Any], now: float) -> None:
        ends = choice.get("finish_reason") is not None
        self._is_complete |= ends
        self._last_at = now
        if self._is_chat:
            delta = choice.get("delta") or {}
            text = delta.get("content") or ""
            # Some servers send the role before computing a token.
            has_tokens = any(
                delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")
            )
        else:
            text = choice.get("text") or ""
            has_tokens = bool(text) or not ends  # partial characters have no text
        if has_tokens:
            self._outcome.message_times.append(now)
            self._pieces.append(text)


def error_message(body: Any) -> str:
    if isinstance(body, dict):
        body = body.get("error") or body.get("detail") or body.get("message") or body
    if isinstance(body, dict):
        body = body.get("message") or body
    return shorten(body if isinstance(body, str) else json.dumps(body, ensure_ascii=False))


def shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MOST_SHOWN else line[: _MOST_SHOWN - 1] + "…"
