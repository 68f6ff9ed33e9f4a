"""DSPy: signatures, typed outputs, a stream, an agent, and both of its request types.

Its prompts are too long for the embedded model, so answers have the right form and random values.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import dspy
import numpy as np
import pytest

from tests.clients.common import ANSWER, ASKED, EMBEDDER, KEY, KNOWN_NAME, SUM, TEXTS, Site

ENGINES = ("litellm", "lm15")


class Named(dspy.Signature):
    """Say who it is."""

    text: str = dspy.InputField()
    name: Literal["Ada", "Grace"] = dspy.OutputField()
    is_old: bool = dspy.OutputField()


def model(site: Site, kind: str = "openai", **settings: Any) -> dspy.LM:
    own = {"temperature": 0, "max_tokens": 100, "num_retries": 0, "cache": False} | settings
    # One of its engines adds /v1 to Anthropic's base URL, the other does not.
    base = site.http if kind == "anthropic" and own.get("engine") == "litellm" else site.api
    return dspy.LM(f"{kind}/{site.model}", api_base=base, api_key=KEY, **own)


@pytest.fixture
def known_site(long_site: Site) -> Site:
    """The server with a model name for which DSPy uses schemas."""
    return long_site._replace(model=KNOWN_NAME)


@pytest.mark.parametrize("engine", ENGINES)
def test_chat(site: Site, engine: str) -> None:
    (text,) = model(site, engine=engine)(SUM)
    assert ANSWER in text


@pytest.mark.parametrize("engine", ENGINES)
def test_structured_output(known_site: Site, engine: str) -> None:
    with dspy.context(lm=model(known_site, engine=engine), adapter=dspy.JSONAdapter()):
        answer = dspy.Predict(Named)(text=ASKED)
    assert answer.name in ("Ada", "Grace") and isinstance(answer.is_old, bool)


def test_stream(known_site: Site) -> None:
    async def ask() -> list[Any]:
        return [part async for part in dspy.streamify(dspy.Predict(Named))(text=ASKED)]

    with dspy.context(lm=model(known_site), adapter=dspy.JSONAdapter()):
        *parts, last = asyncio.run(ask())
    assert len(parts) > 2 and last.name in ("Ada", "Grace")


def test_tools(known_site: Site, closing: dict[str, int]) -> None:
    def age_of(name: Literal["Ada", "Grace"]) -> int:
        """Say how old somebody is."""
        return {"Ada": 36, "Grace": 85}[name]

    class Ask(dspy.Signature):
        """Find out what is needed."""

        text: str = dspy.InputField()
        tools: list[dspy.Tool] = dspy.InputField()
        calls: dspy.ToolCalls = dspy.OutputField()

    own = model(known_site, tool_choice="required", parallel_tool_calls=False, logit_bias=closing)
    with dspy.context(lm=own, adapter=dspy.ChatAdapter(use_native_function_calling=True)):
        (call,) = dspy.Predict(Ask)(text=ASKED, tools=[dspy.Tool(age_of)]).calls.tool_calls
    assert call.name == "age_of" and age_of(**call.args) in (36, 85)


def test_logprobs(site: Site) -> None:
    (answer,) = model(site, logprobs=True)(SUM)
    assert ANSWER in answer["text"] and all(token.logprob <= 0 for token in answer["logprobs"].content)


def test_embeddings(embedder: Site, embeddings: Any) -> None:
    embed = dspy.Embedder(f"openai/{EMBEDDER}", api_base=embedder.api, api_key=KEY, caching=False)
    assert np.allclose(embed(TEXTS), embeddings, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_responses(site: Site, engine: str) -> None:
    (answer,) = model(site, model_type="responses", engine=engine)(SUM)
    assert ANSWER in (answer if isinstance(answer, str) else answer["text"])


@pytest.mark.parametrize("engine", ENGINES)
def test_messages(site: Site, engine: str) -> None:
    (text,) = model(site, "anthropic", engine=engine)(SUM)
    assert ANSWER in text
