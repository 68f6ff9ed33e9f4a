"""`openai-agents`: its loops of calls and results, over chat completions and over Responses, its default."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import agents
import openai
import pytest
from agents.models.interface import Model

from tests.clients.common import ANSWER, ASKED, KEY, SUM, Call, Person, Site, check_tools, is_person
from tests.support import tool_loop

MakeModel = Callable[[Site], Model]


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_traced() -> Iterator[None]:
    agents.set_tracing_disabled(True)
    yield


def chat(site: Site) -> Model:
    client = openai.AsyncOpenAI(base_url=site.api, api_key=KEY, max_retries=0)
    return agents.OpenAIChatCompletionsModel(site.model, openai_client=client)


def responses(site: Site) -> Model:
    client = openai.AsyncOpenAI(base_url=site.api, api_key=KEY, max_retries=0)
    return agents.OpenAIResponsesModel(site.model, openai_client=client)


def agent(model: Model, **settings: Any) -> agents.Agent:
    own = agents.ModelSettings(temperature=0)
    return agents.Agent(
        name="Ada", instructions="You are a helpful assistant.", model=model, model_settings=own, **settings
    )


def check_text(model: Model) -> None:
    assert ANSWER in agents.Runner.run_sync(agent(model), SUM).final_output


def check_stream(model: Model) -> None:
    async def ask() -> tuple[str, str]:
        run, text = agents.Runner.run_streamed(agent(model), SUM), ""
        async for event in run.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                text += event.data.delta
        return text, run.final_output

    text, final = asyncio.run(ask())
    assert ANSWER in text and text == final


def check_agent(model: Model) -> None:
    tools = [agents.function_tool(function) for function in tool_loop.FUNCTIONS.values()]

    def ask(turn: tool_loop.ToolTurn) -> tuple[list[Call], str]:
        run = agents.Runner.run_sync(agent(model, tools=tools), turn.question, max_turns=3)
        calls = [item.raw_item for item in run.new_items if item.type == "tool_call_item"]
        return [(call.name, json.loads(call.arguments)) for call in calls], run.final_output

    check_tools(ask, 20)


def check_object(model: Model) -> None:
    assert is_person(agents.Runner.run_sync(agent(model, output_type=Person), ASKED).final_output)


def test_chat(site: Site) -> None:
    check_text(chat(site))


def test_stream(site: Site) -> None:
    check_stream(chat(site))


def test_tools(tools_site: Site) -> None:
    check_agent(chat(tools_site))


def test_structured_output(site: Site) -> None:
    check_object(chat(site))


def test_responses(site: Site) -> None:
    check_text(responses(site))
    check_object(responses(site))


def test_responses_stream(site: Site) -> None:
    check_stream(responses(site))


def test_responses_call_tools(tools_site: Site) -> None:
    check_agent(responses(tools_site))


def test_responses_keep_a_conversation(site: Site) -> None:
    first = agents.Runner.run_sync(agent(responses(site)), SUM)
    again = agents.Runner.run_sync(agent(responses(site)), SUM, previous_response_id=first.last_response_id)
    assert again.final_output and again.last_response_id != first.last_response_id
