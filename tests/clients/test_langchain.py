"""LangChain: `langchain-openai` over chat completions and Responses, `langchain-anthropic` over Messages, agents."""

from __future__ import annotations

import asyncio
from typing import Any

import faiss
import langchain.agents
import langchain_anthropic
import langchain_openai
import numpy as np
import pytest
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy

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
from training import meanings


def chat(site: Site, **settings: Any) -> Any:
    own = {"temperature": 0, "max_retries": 0} | settings
    return langchain_openai.ChatOpenAI(base_url=site.api, api_key=KEY, model=site.model, **own)


def responses(site: Site) -> Any:
    return chat(site, use_responses_api=True)


def messages(site: Site) -> Any:
    own: Any = {"temperature": 0, "max_retries": 0, "max_tokens": 100}
    return langchain_anthropic.ChatAnthropic(base_url=site.http, api_key=KEY, model=site.model, **own)


def check_text_and_stream(model: Any) -> None:
    answer = model.invoke(SUM)
    assert ANSWER in answer.text and answer.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.text for chunk in model.stream(SUM)) == answer.text


def check_agent(model: Any) -> None:
    agent = langchain.agents.create_agent(model, tools=list(tool_loop.FUNCTIONS.values()))

    def ask(turn: tool_loop.ToolTurn) -> tuple[list[Call], str]:
        said = agent.invoke({"messages": [{"role": "user", "content": turn.question}]})["messages"]
        calls = [call for message in said for call in getattr(message, "tool_calls", ())]
        return [(call["name"], call["args"]) for call in calls], said[-1].text

    check_tools(ask, 20)


def test_chat(site: Site) -> None:
    assert ANSWER in chat(site).invoke(SUM).text
    assert ANSWER in asyncio.run(chat(site).ainvoke(SUM)).text


def test_stream(site: Site) -> None:
    check_text_and_stream(chat(site, stream_usage=True))


def test_tools_of_an_agent(tools_site: Site) -> None:
    check_agent(chat(tools_site))


@pytest.mark.parametrize("choice", ["any", "Person"])
def test_tools_that_are_forced(site: Site, choice: str) -> None:
    (call,) = chat(site).bind_tools([Person], tool_choice=choice, parallel_tool_calls=False).invoke(ASKED).tool_calls
    assert call["name"] == "Person" and is_person(Person(**call["args"]))


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("streams", [False, True])
def test_structured_output(site: Site, method: Any, streams: bool) -> None:
    model = chat(site, streaming=streams).with_structured_output(Person, method=method)
    assert is_person(model.invoke(ASKED))


@pytest.mark.parametrize("streams", [False, True])
def test_structured_output_of_any_form(long_site: Site, streams: bool, closing: dict[str, int]) -> None:
    model = chat(long_site, streaming=streams, logit_bias=closing, max_tokens=400, temperature=1)
    assert isinstance(model.with_structured_output(Anything, method="json_mode").invoke(ASKED), Anything)


def test_structured_output_of_an_agent(site: Site) -> None:
    one_call = chat(site, model_kwargs={"parallel_tool_calls": False})  # the model would continue calling
    for model, strategy in ((chat(site), ProviderStrategy(Person)), (one_call, ToolStrategy(Person))):
        agent = langchain.agents.create_agent(model, response_format=strategy)
        answer = agent.invoke({"messages": [{"role": "user", "content": ASKED}]})
        assert is_person(answer["structured_response"])


def test_logprobs(site: Site) -> None:
    tokens = chat(site, logprobs=True, top_logprobs=2).invoke(SUM).response_metadata["logprobs"]["content"]
    assert tokens and all(token["logprob"] <= 0 and len(token["top_logprobs"]) == 2 for token in tokens)


def embedding_model(embedder: Site) -> Any:
    # Otherwise it sends ids of OpenAI's vocabulary.
    own = {"check_embedding_ctx_length": False}
    return langchain_openai.OpenAIEmbeddings(model=EMBEDDER, base_url=embedder.api, api_key=KEY, **own)


def test_embeddings(embedder: Site, embeddings: Any) -> None:
    model = embedding_model(embedder)
    assert np.allclose(model.embed_documents(TEXTS), embeddings, atol=1e-6)
    assert np.allclose(model.embed_query(TEXTS[1]), embeddings[1], atol=1e-6)
    assert np.allclose(asyncio.run(model.aembed_documents(TEXTS)), embeddings, atol=1e-6)


def test_embeddings_in_a_store_find_what_is_said_in_other_words(embedder: Site) -> None:
    model, world, asked = embedding_model(embedder), meanings.world(), meanings.held_out_pairs(0)
    vectors = np.array(model.embed_documents([text.text for text in world]), "float32")
    store = faiss.IndexFlatIP(vectors.shape[1])
    store.add(vectors)
    queries = np.array([model.embed_query(text.text) for text in asked], "float32")
    _, found = store.search(queries, 1)
    right = sum(text.fits(world[near]) for text, (near,) in zip(asked, found, strict=True))
    assert len(asked) == 200 and right >= 0.95 * len(asked)


def test_responses(site: Site) -> None:
    check_text_and_stream(responses(site))
    for method in ("json_schema", "function_calling"):
        assert is_person(responses(site).with_structured_output(Person, method=method).invoke(ASKED))


def test_responses_of_an_agent(tools_site: Site) -> None:
    check_agent(responses(tools_site))


def test_messages(site: Site) -> None:
    check_text_and_stream(messages(site))
    assert is_person(messages(site).with_structured_output(Person, method="function_calling").invoke(ASKED))


def test_messages_of_an_agent(tools_site: Site) -> None:
    check_agent(messages(tools_site))
