"""`anthropic`, the Python client."""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pydantic
import pytest

from tests.clients.common import (
    ANSWER,
    COLOUR,
    COLOUR_ANSWER,
    KEY,
    MESSAGES,
    SUM_MESSAGES,
    Call,
    Person,
    Site,
    check_tools,
    is_person,
)
from tests.support import tool_loop
from tests.support.failures import eventually
from tests.support.fake_serving import http_server
from tests.support.written_answers import WritingServing, written

TOOLS: Any = [
    {"name": tool["function"]["name"], "description": "", "input_schema": tool["function"]["parameters"]}
    for tool in tool_loop.TOOLS
]
# The current client has no argument for it.
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def client(site: Site) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=site.http, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def ask(site: Site) -> dict[str, Any]:
    return {"model": site.model, "messages": SUM_MESSAGES, "max_tokens": 100, "extra_body": GREEDY}


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_messages(client: anthropic.Anthropic, ask: dict[str, Any]) -> None:
    answer = client.messages.create(**ask, system="You are a helpful assistant.")
    assert ANSWER in text_of(answer) and (answer.type, answer.role, answer.stop_reason) == (
        "message",
        "assistant",
        "end_turn",
    )
    assert answer.usage.input_tokens > 0 and answer.usage.output_tokens > 0
    cut = client.messages.create(**ask | {"max_tokens": 2})
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)
    stopped = client.messages.create(**ask, stop_sequences=[ANSWER])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", ANSWER) and ANSWER not in text_of(stopped)


def test_messages_stream(client: anthropic.Anthropic, ask: dict[str, Any]) -> None:
    with client.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    whole = client.messages.create(**ask)
    assert text == text_of(final) == text_of(whole) and final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    kinds = [event.type for event in client.messages.create(**ask, stream=True)]
    assert [kinds[0], *kinds[-3:]] == ["message_start", "content_block_stop", "message_delta", "message_stop"]


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "Person"}], ids=str
)
def test_messages_with_a_forced_tool(client: anthropic.Anthropic, ask: dict[str, Any], choice: Any) -> None:
    tools = [{"name": "Person", "description": "Somebody", "input_schema": Person.model_json_schema()}]
    asked = ask | {"messages": MESSAGES, "tools": tools, "tool_choice": choice}
    with client.messages.stream(**asked) as stream:
        for message in (client.messages.create(**asked), stream.get_final_message()):
            (call,) = (block for block in message.content if block.type == "tool_use")
            assert message.stop_reason == "tool_use" and call.name == "Person" and is_person(Person(**call.input))


@pytest.mark.parametrize("streams", [False, True])
def test_messages_with_tools_and_their_results(client: anthropic.Anthropic, tools_site: Site, streams: bool) -> None:
    asked: Any = {"model": tools_site.model, "max_tokens": 100, "extra_body": GREEDY, "tools": TOOLS}

    def say(messages: list[Any]) -> Any:
        if not streams:
            return client.messages.create(**asked, messages=messages)
        with client.messages.stream(**asked, messages=messages) as stream:
            return stream.get_final_message()

    def ask(turn: tool_loop.ToolTurn) -> tuple[list[Call], str]:
        messages: list[Any] = [{"role": "user", "content": turn.question}]
        called = say(messages)
        calls = [block for block in called.content if block.type == "tool_use"]
        results = [str(tool_loop.FUNCTIONS[call.name](**call.input)) for call in calls]
        blocks = [
            {"type": "tool_result", "tool_use_id": call.id, "content": result}
            for call, result in zip(calls, results, strict=True)
        ]
        messages += [{"role": "assistant", "content": called.content}, {"role": "user", "content": blocks}]
        return [(call.name, call.input) for call in calls], text_of(say(messages))

    check_tools(ask)


def test_messages_of_its_agent(client: anthropic.Anthropic, tools_site: Site) -> None:
    """Its loop requests a server-side thread, and continues without one when refused."""
    tools = [anthropic.beta_tool(function) for function in map(returning_text, tool_loop.FUNCTIONS.values())]
    asked: Any = {"model": tools_site.model, "max_tokens": 100, "extra_body": GREEDY, "tools": tools}

    def ask(turn: tool_loop.ToolTurn) -> tuple[list[Call], str]:
        said = list(client.beta.messages.tool_runner(**asked, messages=[{"role": "user", "content": turn.question}]))
        blocks = [block for message in said for block in message.content]
        return [(block.name, block.input) for block in blocks if block.type == "tool_use"], text_of(said[-1])

    check_tools(ask)


def returning_text(function: Callable[..., Any]) -> Callable[..., str]:
    """Make a tool return text, the only type that this client accepts."""

    @functools.wraps(function)
    def run(*values: Any, **named: Any) -> str:
        return str(function(*values, **named))

    return run


def test_structured_output(client: anthropic.Anthropic, ask: dict[str, Any]) -> None:
    assert is_person(client.messages.parse(**ask | {"messages": MESSAGES}, output_format=Person).parsed_output)


def test_messages_are_counted(client: anthropic.Anthropic, ask: dict[str, Any]) -> None:
    counted = client.messages.count_tokens(model=ask["model"], messages=SUM_MESSAGES)
    assert counted.input_tokens == client.messages.create(**ask).usage.input_tokens


def test_messages_that_are_wrong(client: anthropic.Anthropic, ask: dict[str, Any]) -> None:
    with pytest.raises(anthropic.BadRequestError, match="top_p"):
        client.messages.create(**ask | {"extra_body": {"top_p": 7}})
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**ask | {"model": "unknown"})


def test_messages_of_200_conversations() -> None:
    """Each whole, as a stream, and as an abandoned stream: every event conforms to the client's types."""
    of_event = pydantic.TypeAdapter(anthropic.types.RawMessageStreamEvent)
    serving = WritingServing()
    with (
        http_server(serving) as port,
        anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="x", max_retries=0) as client,
    ):
        for seed in range(200):
            answer = written(seed)
            asked: Any = {"model": "fake", "max_tokens": 64, "messages": MESSAGES}
            asked["extra_body"] = {"cache_salt": str(seed)}
            whole = client.messages.create(**asked)
            type(whole).model_validate_json(whole.model_dump_json(warnings="error"))
            deltas = {"text": "", "thinking": "", "partial_json": ""}
            with client.messages.create(**asked, stream=True) as stream:
                for event in stream:
                    of_event.validate_python(event.to_dict())
                    if event.type == "content_block_delta":
                        for name in deltas.keys() & event.delta.to_dict().keys():
                            deltas[name] += getattr(event.delta, name)
            assert deltas["text"] == "".join(block.text for block in whole.content if block.type == "text")
            assert deltas["thinking"] == "".join(b.thinking for b in whole.content if b.type == "thinking")
            assert deltas["partial_json"] == "".join(arguments for _, _, arguments in answer.calls)
            inputs = [block.input for block in whole.content if block.type == "tool_use"]
            if not any("INVALID_JSON" in each for each in inputs):  # the client's parser refuses some of those
                with client.messages.stream(**asked) as stream:
                    final = stream.get_final_message()
                assert final.stop_reason == whole.stop_reason and final.stop_sequence == whole.stop_sequence
                assert final.usage.output_tokens >= whole.usage.output_tokens
                assert [block.input for block in final.content if block.type == "tool_use"] == inputs
            with client.messages.create(**asked, stream=True) as stream:
                next(iter(stream))  # then the client disconnects
        eventually(lambda: serving.num_live == 0, seconds=3.0)
        assert len(serving.calls) >= 3 * 200


def test_messages_about_a_picture(pictured: Site, picture: bytes) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture).decode()}
    parts: Any = [{"type": "image", "source": source}, {"type": "text", "text": COLOUR}]
    messages: Any = [{"role": "user", "content": parts}]
    with anthropic.Anthropic(base_url=pictured.http, api_key=KEY, max_retries=0) as client:
        answer = client.messages.create(model=pictured.model, max_tokens=16, messages=messages, extra_body=GREEDY)
    assert answer.content[0].text == COLOUR_ANSWER
