"""A tool loop end to end: `jaxllm serve` with the adapter "tools" and OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.support import tool_loop
from tests.support.serving_process import QUICK, ServingProcess


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    with ServingProcess(*QUICK, *tool_loop.SERVER_FLAGS) as server:
        yield OpenAI(base_url=f"{server.http}/v1", api_key="none", max_retries=0)


def say(client: OpenAI, messages: list[Any], streams: bool) -> dict[str, Any]:
    """Return the model's next message."""
    asked: Any = {"model": tool_loop.MODEL, "messages": messages, "tools": tool_loop.TOOLS, "temperature": 0}
    if streams:
        with client.chat.completions.stream(**asked) as stream:
            message = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**asked).choices[0].message
    return message.to_dict()


@pytest.mark.parametrize("count", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_held_out_questions_are_answered_with_the_right_call_and_its_result(client: OpenAI, count: int) -> None:
    wrong = []
    for number, turn in enumerate(tool_loop.held_out(count)):
        messages: list[Any] = [{"role": "user", "content": turn.question}]
        if number % 3 == 0:
            messages.insert(0, {"role": "system", "content": "You are a helpful assistant."})
        made = []
        for _ in range(3):
            messages.append(say(client, messages, streams=number % 2 == 0))
            calls = messages[-1].get("tool_calls") or ()
            if not calls:
                break
            for call in calls:
                name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
                made.append((name, arguments))
                result = tool_loop.FUNCTIONS[name](**arguments)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})
        if not tool_loop.is_right(turn, made, messages[-1]["content"] or ""):
            wrong.append((turn, messages[-1]))
    assert len(wrong) <= count * (1 - tool_loop.LEAST_RIGHT), wrong


def test_a_question_that_needs_no_tool_is_answered_at_once(client: OpenAI) -> None:
    answer = say(client, [{"role": "user", "content": "What is the capital of France?"}], streams=False)
    assert answer["content"] == "The capital of France is Paris." and not answer.get("tool_calls")
