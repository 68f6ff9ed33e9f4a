"""`ollama`, the Python client: chats, texts, calls, objects, embeddings, and its list of models."""

from __future__ import annotations

from typing import Any

import numpy as np
import ollama
import pytest

from tests.clients.common import (
    ANSWER,
    COLOUR,
    COLOUR_ANSWER,
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

GREEDY = {"temperature": 0}


@pytest.fixture
def client(site: Site) -> ollama.Client:
    return ollama.Client(site.http)


def test_chat(client: ollama.Client, site: Site) -> None:
    answer = client.chat(site.model, SUM_MESSAGES, options=GREEDY)
    assert ANSWER in answer.message.content and answer.done_reason == "stop" and answer.total_duration > 0
    assert client.chat(site.model, SUM_MESSAGES, options=GREEDY | {"num_predict": 2}).done_reason == "length"
    assert ANSWER in client.generate(site.model, SUM, options=GREEDY).response
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        client.chat("unknown", SUM_MESSAGES)


def test_chat_models(client: ollama.Client, site: Site) -> None:
    assert [each.model for each in client.list().models] == [site.model, tool_loop.MODEL]
    assert "completion" in client.show(site.model).capabilities and client.ps().models[0].context_length > 0


def test_stream(client: ollama.Client, site: Site) -> None:
    whole = client.chat(site.model, SUM_MESSAGES, options=GREEDY).message.content
    lines = list(client.chat(site.model, SUM_MESSAGES, options=GREEDY, stream=True))
    assert len(lines) > 2 and "".join(line.message.content for line in lines) == whole
    pieces = client.generate(site.model, SUM, options=GREEDY, stream=True)
    assert "".join(line.response for line in pieces) == client.generate(site.model, SUM, options=GREEDY).response


@pytest.mark.parametrize("streams", [False, True])
def test_tools(client: ollama.Client, tools_site: Site, streams: bool) -> None:
    def say(messages: list[Any]) -> tuple[str, list[Call]]:
        asked: Any = {"tools": tool_loop.TOOLS, "options": GREEDY}
        told = client.chat(tools_site.model, messages, **asked, stream=streams)
        said = [line.message for line in (told if streams else [told])]
        calls = [call.function for message in said for call in message.tool_calls or ()]
        return "".join(message.content or "" for message in said), [(call.name, dict(call.arguments)) for call in calls]

    def ask(turn: tool_loop.ToolTurn) -> tuple[list[Call], str]:
        messages: list[Any] = [{"role": "user", "content": turn.question}]
        content, calls = say(messages)
        made = [{"function": {"name": name, "arguments": given}} for name, given in calls]
        messages.append({"role": "assistant", "content": content, "tool_calls": made})
        for name, given in calls:
            result = str(tool_loop.FUNCTIONS[name](**given))
            messages.append({"role": "tool", "tool_name": name, "content": result})
        return calls, say(messages)[0]

    check_tools(ask)


def test_structured_output(client: ollama.Client, site: Site) -> None:
    answer = client.chat(site.model, MESSAGES, format=Person.model_json_schema(), options=GREEDY)
    assert is_person(Person.model_validate_json(answer.message.content))


def test_embeddings(embedder: Site, embeddings: Any) -> None:
    found = ollama.Client(embedder.http).embed(embedder.model, TEXTS).embeddings
    assert np.allclose(found, embeddings, atol=1e-6)


def test_chat_about_a_picture(pictured: Site, picture: bytes) -> None:
    client = ollama.Client(pictured.http)
    messages = [{"role": "user", "content": COLOUR, "images": [picture]}]
    assert client.chat(pictured.model, messages, options=GREEDY).message.content == COLOUR_ANSWER
    assert client.generate(pictured.model, COLOUR, images=[picture], options=GREEDY).response == COLOUR_ANSWER
