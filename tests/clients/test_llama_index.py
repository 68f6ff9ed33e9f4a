"""LlamaIndex: its models for servers like OpenAI's, and an agent."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai import OpenAIEmbedding
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses

from tests.clients.common import ANSWER, ASKED, EMBEDDER, KEY, SUM, TEXTS, Call, Person, Site, check_tools, is_person
from tests.support import tool_loop


def chat(site: Site, **settings: Any) -> OpenAILike:
    own = {"is_chat_model": True, "is_function_calling_model": True, "temperature": 0, "max_tokens": 100} | settings
    return OpenAILike(model=site.model, api_base=site.api, api_key=KEY, context_window=512, **own)


def responses(site: Site) -> OpenAILikeResponses:
    own: Any = {"is_function_calling_model": True, "temperature": 0, "max_output_tokens": 100, "context_window": 512}
    return OpenAILikeResponses(model=site.model, api_base=site.api, api_key=KEY, **own)


def check_text_and_stream(model: Any) -> None:
    asked = [ChatMessage(content=SUM)]
    text = model.chat(asked).message.content
    assert ANSWER in text and "".join(part.delta or "" for part in model.stream_chat(asked)) == text


def check_agent(model: Any) -> None:
    async def ask(turn: tool_loop.ToolTurn) -> tuple[list[Call], str]:
        agent = FunctionAgent(tools=list(tool_loop.FUNCTIONS.values()), llm=model)
        answer = await agent.run(turn.question)
        return [(call.tool_name, call.tool_kwargs) for call in answer.tool_calls], str(answer)

    check_tools(lambda turn: asyncio.run(ask(turn)))


def test_chat(site: Site) -> None:
    assert ANSWER in chat(site).chat([ChatMessage(content=SUM)]).message.content
    assert chat(site, is_chat_model=False).complete("Once upon a time").text


def test_stream(site: Site) -> None:
    check_text_and_stream(chat(site))


def test_tools_of_an_agent(tools_site: Site) -> None:
    check_agent(chat(tools_site))


@pytest.mark.parametrize("calls_functions", [True, False])
def test_structured_output(site: Site, calls_functions: bool) -> None:
    model = chat(
        site, is_function_calling_model=calls_functions, should_use_structured_outputs=not calls_functions
    ).as_structured_llm(Person)
    assert is_person(model.chat([ChatMessage(content=ASKED)]).raw)


def test_logprobs(site: Site) -> None:
    tokens = chat(site, logprobs=True, top_logprobs=2).chat([ChatMessage(content=SUM)]).logprobs
    assert tokens and all(each.logprob <= 0 for places in tokens for each in places)


def test_embeddings(embedder: Site, embeddings: Any) -> None:
    model = OpenAIEmbedding(model_name=EMBEDDER, api_base=embedder.api, api_key=KEY)
    assert np.allclose(model.get_text_embedding_batch(TEXTS), embeddings, atol=1e-6)
    assert np.allclose(model.get_query_embedding(TEXTS[0]), embeddings[0], atol=1e-6)


def test_responses(site: Site) -> None:
    check_text_and_stream(responses(site))


def test_responses_of_an_agent(tools_site: Site) -> None:
    check_agent(responses(tools_site))
