"""What the tests of all clients ask for, and by what they know a right answer."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.request import Request, urlopen

import pydantic

NODE = Path(__file__).parent / "node"
KEY = "none"
MODEL = "jaxllm-embedded"
EMBEDDER = "jaxllm-embedder"

# The embedded model knows sums.
SUM, ANSWER = "What is 47 + 38?", "85"
SUM_MESSAGES: Any = [{"role": "user", "content": SUM}]
ASKED = "Ada is 36 years old."
MESSAGES: Any = [{"role": "user", "content": ASKED}]
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
    """Tell whether a client made a `Person` of what it got."""
    return isinstance(value, Person) and value.name in ("Ada", "Grace") and 0 <= value.age <= 99


class Site(NamedTuple):
    """Where a server is, and the name of its model."""

    http: str
    grpc: str
    model: str

    @property
    def api(self) -> str:
        """The base URL of OpenAI's clients."""
        return f"{self.http}/v1"


def post(url: str, **body: Any) -> dict[str, Any]:
    """Ask without any client."""
    with urlopen(Request(url, json.dumps(body).encode(), {"content-type": "application/json"})) as answer:
        return json.load(answer)


def node(script: str, *arguments: str) -> Any:
    """Run a script of node/; return what it printed as JSON."""
    ran = subprocess.run(["node", str(NODE / script), *arguments], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)
