"""Requests and expected answers that the tests of all clients share."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.request import Request, urlopen

import pydantic

from tests.support import tool_loop
from tests.support.paths import ROOT

NODE = Path(__file__).parent / "node"
KEY = "none"
MODEL = "jaxllm-embedded"
EMBEDDER = "jaxllm-embedder"
# A model name that clients recognize: for unknown names some assume no JSON support.
KNOWN_NAME = "gpt-4o-mini"

# The embedded model can add.
SUM, ANSWER = "What is 47 + 38?", "85"
SUM_MESSAGES: Any = [{"role": "user", "content": SUM}]
ASKED = "Ada is 36 years old."
MESSAGES: Any = [{"role": "user", "content": ASKED}]
Call = tuple[str, dict[str, Any]]  # (tool, arguments)
PICTURED = "jaxllm-shapes"
COLOUR, COLOUR_ANSWER = "What colour is the square?", "It is red."
TEXTS = ["Who keeps bees?", "Paris is the capital of France", "a dog barks"]


class Person(pydantic.BaseModel):
    """Somebody, in as few tokens as a model needs that does not know when to stop."""

    model_config = pydantic.ConfigDict(extra="forbid")
    name: Literal["Ada", "Grace"]
    age: int = pydantic.Field(ge=0, le=99)


class Anything(pydantic.BaseModel):
    """What any JSON object is."""

    model_config = pydantic.ConfigDict(extra="allow")


def is_person(value: Any) -> bool:
    """Return whether a client parsed its answer to a `Person`."""
    return isinstance(value, Person) and value.name in ("Ada", "Grace") and 0 <= value.age <= 99


class Site(NamedTuple):
    """A server's addresses, and the name of its model."""

    http: str
    grpc: str
    model: str

    @property
    def api(self) -> str:
        """The base URL for OpenAI's clients."""
        return f"{self.http}/v1"


def post(url: str, **body: Any) -> dict[str, Any]:
    """Post a request without a client library."""
    with urlopen(Request(url, json.dumps(body).encode(), {"content-type": "application/json"})) as answer:
        return json.load(answer)


def node(script: str, *arguments: str, turn: tool_loop.ToolTurn | None = None) -> Any:
    """Run a script of node/ and return its output as JSON; `turn` provides tools and their results."""
    tools = {} if turn is None else {"schemas": tool_loop.TOOLS, "result": turn.result}
    ran = subprocess.run(
        ["node", str(NODE / script), *arguments],
        env={**os.environ, "TOOLS": json.dumps(tools)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def check_tools(ask: Callable[[tool_loop.ToolTurn], tuple[list[Call], str]], count: int = 4) -> None:
    """Run held-out questions; `ask` returns a client's calls and the answer after their results.

    95 % are promised to be right: of up to 20 one may be wrong.
    """
    told = [(turn, *ask(turn)) for turn in tool_loop.held_out(count)]
    wrong = [each for each in told if not tool_loop.is_right(*each)]
    assert len(wrong) <= 1, wrong


def check_node_tools(script: str, feature: str, url: str, model: str) -> None:
    """Run a script through loops of calls and results."""

    def ask(turn: tool_loop.ToolTurn) -> tuple[list[Call], str]:
        told = node(script, feature, url, model, turn.question, turn=turn)
        return [(name, given) for name, given in told["calls"]], told["answer"]

    check_tools(ask)


def aiperf(*arguments: str) -> str:
    """Run AIPerf in its separate environment, because its pins would restrict other clients. Return its output."""
    command = ROOT / os.environ.get("AIPERF_VENV", ".venv-aiperf") / "bin" / "aiperf"
    # Offline, it looks for a tokenizer's folder in the hub's cache; otherwise it uses the path.
    env = {**os.environ, "HF_HUB_OFFLINE": ""}
    ran = subprocess.run([str(command), *arguments], env=env, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
