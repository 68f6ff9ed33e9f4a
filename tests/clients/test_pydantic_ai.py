"""Pydantic AI: its models over chat completions and Responses.

Not over Messages: that model of pydantic-ai 2.31 instantiates a union type of `anthropic` 2, which fails.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pydantic_ai
import pytest
from pydantic_ai import messages as parts
from pydantic_ai.embeddings import Embedder
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.common import (
    ANSWER,
    ASKED,
    EMBEDDER,
    KEY,
    SUM,
    TEXTS,
    Anything,
    Call,
    Person,
    Site,
    check_tools,
    is_person,
)
from tests.support import tool_loop


def chat(site: Site) -> Any:
    return OpenAIChatModel(site.model, provider=OpenAIProvider(base_url=site.api, api_key=KEY))


def responses(site: Site) -> Any:
    return OpenAIResponsesModel(site.model, provider=OpenAIProvider(base_url=site.api, api_key=KEY))


def agent(model: Any, **settings: Any) -> Any:
    own = {"temperature": 0, "max_tokens": 100} | settings.pop("model_settings", {})
    return pydantic_ai.Agent(model, retries=0, model_settings=own, **settings)


def check_text(model: Any) -> None:
    assert ANSWER in agent(model).run_sync(SUM).output


def check_stream(model: Any) -> None:
    async def ask() -> str:
        async with agent(model).run_stream(SUM) as run:
            return "".join([text async for text in run.stream_text(delta=True)])

    assert ANSWER in asyncio.run(ask())


def check_agent(model: Any) -> None:
    def ask(turn: tool_loop.ToolTurn) -> tuple[list[Call], str]:
        run = agent(model, tools=list(tool_loop.FUNCTIONS.values())).run_sync(turn.question)
        told = [part for message in run.all_messages() for part in message.parts]
        calls = [part for part in told if isinstance(part, parts.ToolCallPart)]
        return [(call.tool_name, call.args_as_dict()) for call in calls], run.output

    check_tools(ask)


def check_object(model: Any, output: Any) -> None:
    async def ask() -> Any:
        async with agent(model, output_type=output).run_stream(ASKED) as run:
            return await run.get_output()

    assert is_person(agent(model, output_type=output).run_sync(ASKED).output) and is_person(asyncio.run(ask()))


def test_chat(site: Site) -> None:
    check_text(chat(site))


def test_stream(site: Site) -> None:
    check_stream(chat(site))


def test_tools(tools_site: Site) -> None:
    check_agent(chat(tools_site))


@pytest.mark.parametrize("output", ["ToolOutput", "NativeOutput"])
def test_structured_output(site: Site, output: str) -> None:
    check_object(chat(site), getattr(pydantic_ai, output)(Person))


def test_structured_output_by_a_prompt(long_site: Site, closing: dict[str, int]) -> None:
    settings = {"logit_bias": closing, "max_tokens": 400, "temperature": 1}
    asked = agent(chat(long_site), output_type=pydantic_ai.PromptedOutput(Anything), model_settings=settings)
    assert isinstance(asked.run_sync(ASKED).output, Anything)


def test_logprobs(site: Site) -> None:
    asked = agent(chat(site), model_settings={"openai_logprobs": True, "openai_top_logprobs": 2})
    tokens = asked.run_sync(SUM).response.provider_details["logprobs"]
    assert tokens and all(token["logprob"] <= 0 and len(token["top_logprobs"]) == 2 for token in tokens)


def test_embeddings(embedder: Site, embeddings: Any) -> None:
    model = OpenAIEmbeddingModel(EMBEDDER, provider=OpenAIProvider(base_url=embedder.api, api_key=KEY))
    found = asyncio.run(Embedder(model).embed_documents(TEXTS)).embeddings
    assert np.allclose(found, embeddings, atol=1e-6)


def test_responses(site: Site) -> None:
    check_text(responses(site))
    check_stream(responses(site))


@pytest.mark.parametrize("output", ["ToolOutput", "NativeOutput"])
def test_responses_with_an_object(site: Site, output: str) -> None:
    check_object(responses(site), getattr(pydantic_ai, output)(Person))


def test_responses_call_tools(tools_site: Site) -> None:
    check_agent(responses(tools_site))
