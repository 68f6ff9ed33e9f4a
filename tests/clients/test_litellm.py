"""LiteLLM with each of the three APIs, by provider: `hosted_vllm/`, `openai/` and `anthropic/`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
import numpy as np
import pytest

from tests.clients.common import (
    ANSWER,
    ASKED,
    EMBEDDER,
    KEY,
    MESSAGES,
    SUM,
    SUM_MESSAGES,
    TEXTS,
    Call,
    Person,
    Site,
    check_tools,
    is_person,
)
from tests.support import tool_loop

CHAT, MESSAGES_API = "hosted_vllm", "anthropic"
PROVIDERS = (CHAT, "openai")


def ask(provider: str, site: Site, **settings: Any) -> Any:
    """Return a completion from one of its providers."""
    base = site.http if provider == MESSAGES_API else site.api
    own = {"messages": SUM_MESSAGES, "temperature": 0, "max_tokens": 100, "num_retries": 0} | settings
    return litellm.completion(f"{provider}/{site.model}", api_base=base, api_key=KEY, **own)


def check_text_and_stream(provider: str, site: Site) -> None:
    text = ask(provider, site).choices[0].message.content
    assert ANSWER in text
    assert "".join(chunk.choices[0].delta.content or "" for chunk in ask(provider, site, stream=True)) == text


def check_loop(provider: str, site: Site) -> None:
    def say(messages: list[Any]) -> Any:
        return ask(provider, site, messages=messages, tools=tool_loop.TOOLS).choices[0].message

    def loop(turn: tool_loop.ToolTurn) -> tuple[list[Call], str]:
        messages: list[Any] = [{"role": "user", "content": turn.question}]
        message = say(messages)
        made = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
        messages.append(message.model_dump())
        for call, (name, arguments) in zip(message.tool_calls or (), made, strict=True):
            result = str(tool_loop.FUNCTIONS[name](**arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return made, say(messages).content or ""

    check_tools(loop)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_chat(provider: str, site: Site) -> None:
    assert ANSWER in ask(provider, site).choices[0].message.content


@pytest.mark.parametrize("provider", PROVIDERS)
def test_stream(provider: str, site: Site) -> None:
    check_text_and_stream(provider, site)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_tools(provider: str, tools_site: Site) -> None:
    check_loop(provider, tools_site)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_structured_output(provider: str, site: Site) -> None:
    answer = ask(provider, site, messages=MESSAGES, response_format=Person)
    assert is_person(Person.model_validate_json(answer.choices[0].message.content))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_logprobs(provider: str, site: Site) -> None:
    (choice,) = ask(provider, site, logprobs=True, top_logprobs=2).choices
    tokens = choice.logprobs.content
    assert tokens and all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in tokens)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_embeddings(provider: str, embedder: Site, embeddings: Any) -> None:
    answer = litellm.embedding(f"{provider}/{EMBEDDER}", input=TEXTS, api_base=embedder.api, api_key=KEY)
    assert np.allclose([item["embedding"] for item in answer.data], embeddings, atol=1e-6)


@pytest.mark.parametrize("provider", ["ollama", "ollama_chat"])
def test_chat_as_ollama(provider: str, site: Site) -> None:
    own: Any = {"messages": SUM_MESSAGES, "temperature": 0, "num_retries": 0, "api_base": site.http}
    answer = litellm.completion(f"{provider}/{site.model}", **own).choices[0].message.content
    chunks = litellm.completion(f"{provider}/{site.model}", **own, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer
    assert provider == "ollama" or ANSWER in answer, "the older of the two writes a prompt of its own"


def test_responses(site: Site) -> None:
    own: Any = {"api_base": site.api, "api_key": KEY, "temperature": 0}
    answer = litellm.responses(model=f"openai/{site.model}", input=SUM, **own)
    assert ANSWER in answer.output_text
    events = list(litellm.responses(model=f"openai/{site.model}", input=SUM, stream=True, **own))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == answer.output_text and events[-1].type == "response.completed"
    made = litellm.responses(model=f"openai/{site.model}", input=ASKED, text_format=Person, **own)
    assert is_person(Person.model_validate_json(made.output_text))


def test_messages(site: Site) -> None:
    check_text_and_stream(MESSAGES_API, site)


def test_messages_call_tools(tools_site: Site) -> None:
    check_loop(MESSAGES_API, tools_site)


def test_messages_as_they_are(site: Site) -> None:
    asked: Any = {"messages": SUM_MESSAGES, "max_tokens": 100, "temperature": 0}
    own: Any = {"model": f"anthropic/{site.model}", "api_base": site.http, "api_key": KEY}
    answer = asyncio.run(litellm.anthropic.messages.acreate(**own, **asked))
    assert ANSWER in answer["content"][0]["text"] and answer["stop_reason"] == "end_turn"
