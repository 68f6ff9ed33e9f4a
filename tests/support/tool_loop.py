"""Two tools, held-out questions, and the expected calls and answers of the embedded model's adapter "tools".

Start a server for it with `jaxllm serve --enable-lora --lora-modules tools=tools --tool-call-parser hermes`, model
"tools".
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from training.holdout import bucket
from training.tool_calls import TOOLS as TRAINED
from training.tool_calls import WRITTEN_CONDITIONS, ToolTurn, draw_held_out, make_turn

MODEL = "tools"
SERVER_FLAGS = ("--enable-lora", "--lora-modules", f"{MODEL}=tools", "--tool-call-parser", "hermes")
LEAST_RIGHT = 0.95  # promised share of right answers


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def get_weather(city: str) -> str:
    """Get the current weather in a city."""
    condition = WRITTEN_CONDITIONS[bucket(f"condition:{city}", len(WRITTEN_CONDITIONS))]
    return f"{condition} and {bucket(f'degrees:{city}', 30)} degrees"


FUNCTIONS: dict[str, Callable[..., Any]] = {"add": add, "get_weather": get_weather}
TOOLS: list[dict[str, Any]] = [tool.schema(FUNCTIONS[tool.name].__doc__ or "") for tool in TRAINED]


def held_out(count: int, seed: int = 0) -> list[ToolTurn]:
    """Draw questions that are not in the training set, alternating between the two tools, with the expected results.

    No two are equal. A turn's `name` and `arguments` are the one right call, `result` is the text that `FUNCTIONS`
    returns for it, `answer` the expected final sentence. At most 200: held-out cities are limited.
    """
    if count > 200:
        raise ValueError(f"there are no {count} questions for each seed")
    rng = random.Random(f"loop {seed}")
    turns: dict[str, ToolTurn] = {}
    while len(turns) < count:
        tool = TRAINED[len(turns) % len(TRAINED)]
        phrasing, arguments = draw_held_out(rng, tool)
        turn = make_turn(tool, phrasing, arguments, str(FUNCTIONS[tool.name](*arguments)))
        turns[turn.question] = turn
    return list(turns.values())


def is_right(turn: ToolTurn, calls: list[tuple[str, dict[str, Any]]], answer: str) -> bool:
    """Return whether exactly the right call was made, with the right arguments, and the right answer given."""
    return calls == [(turn.name, turn.arguments)] and answer.strip() == turn.answer
