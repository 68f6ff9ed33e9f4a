"""Random answers of a model, whole or cut into chunks anywhere, for the response writers of all APIs.

Reasoning precedes alternating texts and tool calls; arguments may be truncated or invalid JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import groupby
from random import Random
from typing import Any

from jaxllm_server.generation.calls import Chunk, Part, Timing, TokenUsage
from jaxllm_server.parsers.tool_parsers import ToolCallDelta
from tests.support.fake_serving import FakeServing

_ALPHABET = [*'ab {}[]":,<>\\/\n\t0', "ß", "—", "\u2028", "🦊", "</think>", "<tool_call>"]
_BROKEN = ("{", '{"a": [1,', '{"a": 1}}', "47 + 38", "[1, 2]", "null", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 2000)
Call = tuple[int, str, str]  # the call's number, its name, its arguments


@dataclass(frozen=True)
class Written:
    """An answer and its finish reason."""

    reasoning: str
    turns: list[str | Call]
    finish: Any
    stop: int | str | None

    @property
    def text(self) -> str:
        return "".join(turn for turn in self.turns if isinstance(turn, str))

    @property
    def calls(self) -> list[Call]:
        return [turn for turn in self.turns if not isinstance(turn, str)]

    def chunks(self, random: Random | None) -> list[Chunk]:
        """Return the answer as a stream's chunks, or as one chunk if `random` is None."""
        atoms: list[tuple[str, Any]] = [("reasoning", character) for character in self.reasoning]
        for turn in self.turns:
            if isinstance(turn, str):
                atoms += [("text", character) for character in turn]
            else:
                number, name, arguments = turn
                atoms.append(("call", ToolCallDelta(number, f"chatcmpl-tool-{number}", name, "")))
                atoms += [("call", ToolCallDelta(number, None, None, character)) for character in arguments]
        marks, mark = [], 0
        for _ in atoms:
            mark += random is not None and random.random() < 0.3
            marks.append(mark)
        parts = [
            _part([atom for _, atom in group])
            for _, group in groupby(zip(marks, atoms, strict=True), key=lambda item: item[0])
        ] or [_part([])]
        parts[-1].finish_reason, parts[-1].stop_reason = self.finish, self.stop
        timing = Timing(0.0, 0.25, 0.5, 2.0)
        return [
            Chunk(
                "r", [part], None, TokenUsage(7, number, 4, 0), timing if part is parts[-1] else None, part is parts[-1]
            )
            for number, part in enumerate(parts, 1 if random is not None else len(parts))
        ]


def written(seed: int) -> Written:
    """Draw an answer."""
    random = Random(seed)

    def text() -> str:
        return "".join(random.choices(_ALPHABET, k=random.choice((0, 1, 5, 30))))

    def arguments() -> str:
        if random.random() < 0.3:
            return random.choice(_BROKEN)
        return json.dumps({text(): random.choice([text(), 1, 1.5, None, [], {}]) for _ in range(random.randrange(4))})

    turns: list[str | Call] = [text()]
    for number in range(random.choice((0, 0, 1, 3))):
        turns += [(number, random.choice(("add", "look")), arguments()), text() if random.random() < 0.3 else ""]
    finish = random.choice(("stop", "stop", "length", "context", "time_limit"))
    if finish == "stop" and len(turns) > 1:
        finish = "tool_calls"
    stop = random.choice((None, 2, "END")) if finish in ("stop", "tool_calls") else None
    return Written(text() if random.random() < 0.4 else "", turns, finish, stop)


class WritingServing(FakeServing):
    """Answers a request with the answer of the seed in its `cache_salt`."""

    async def generate(self, call: Any, params: Any = None) -> Any:
        self.calls.append(call)
        self.num_live += 1
        try:
            seed = int(call.cache_salt or 0)
            for chunk in written(seed).chunks(Random(seed) if call.stream else None):
                yield chunk
        finally:
            self.num_live -= 1


def _part(atoms: list[tuple[str, Any]]) -> Part:
    told = {kind: "".join(value for own, value in atoms if own == kind) for kind in ("reasoning", "text")}
    calls = [value for kind, value in atoms if kind == "call"]
    return Part(0, told["text"], told["reasoning"], calls, [1], None, None, None, None)
