"""smolagents: its model for servers, and an agent that calls tools."""

from __future__ import annotations

import json
from typing import Any

import smolagents

from tests.clients.common import ANSWER, KEY, MESSAGES, SUM, SUM_MESSAGES, Person, Site, is_person


def model(site: Site, **settings: Any) -> Any:
    return smolagents.OpenAIServerModel(model_id=site.model, api_base=site.api, api_key=KEY, **settings)


def test_chat(site: Site) -> None:
    assert ANSWER in model(site, temperature=0).generate(SUM_MESSAGES).content


def test_stream(site: Site) -> None:
    assert ANSWER in "".join(part.content or "" for part in model(site, temperature=0).generate_stream(SUM_MESSAGES))


def test_structured_output(site: Site) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": Person.model_json_schema()}}
    answer = model(site, temperature=0).generate(MESSAGES, response_format=form).content
    assert is_person(Person.model_validate_json(answer))


def test_tools_of_an_agent(long_site: Site, closing: dict[str, int]) -> None:
    """Its prompts are too long for the embedded model, so calls have the right form and random values."""

    @smolagents.tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: the first
            b: the second
        """
        return a + b

    bias = dict.fromkeys(closing, 6)  # high enough, and low enough for numbers of several digits
    own = model(long_site, max_tokens=400, temperature=1.0, logit_bias=bias)
    agent = smolagents.ToolCallingAgent(tools=[add], model=own, max_steps=3, verbosity_level=0)
    agent.run(SUM)
    steps = [step for step in agent.memory.steps if isinstance(step, smolagents.ActionStep)]
    messages = [step.model_output_message for step in steps if "max steps" not in str(step.error)]
    assert messages and None not in messages
    for step, message in zip(steps, messages, strict=False):
        if step.token_usage is not None and step.token_usage.output_tokens >= 400:
            continue  # truncated: a random model may write an endless argument
        assert message.tool_calls and {call.function.name for call in message.tool_calls} <= {"add", "final_answer"}
        for call in message.tool_calls:
            arguments = call.function.arguments
            assert isinstance(json.loads(arguments) if isinstance(arguments, str) else arguments, dict)
