"""`openai`, the Python client."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from jaxllm.embedded import SPEECH_DIR
from tests.clients.common import (
    ANSWER,
    COLOUR,
    COLOUR_ANSWER,
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
from tests.support import sound_models, tool_loop
from tests.support.serving_process import ServingProcess
from tests.support.sizes import SLOTS, flags


@pytest.fixture(scope="module")
def client(site: Site) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=site.api, api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def ask(client: openai.OpenAI, site: Site) -> dict[str, Any]:
    return {"model": site.model, "messages": SUM_MESSAGES, "temperature": 0}


def test_chat(client: openai.OpenAI, ask: dict[str, Any]) -> None:
    answer = client.chat.completions.create(**ask)
    assert ANSWER in answer.choices[0].message.content and answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream(client: openai.OpenAI, ask: dict[str, Any]) -> None:
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    whole = client.chat.completions.create(**ask)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Person"}}], ids=str)
def test_tools_that_are_forced(client: openai.OpenAI, site: Site, choice: Any) -> None:
    tools = [openai.pydantic_function_tool(Person)]
    asked: Any = {"model": site.model, "messages": MESSAGES, "tools": tools, "tool_choice": choice}
    answer = client.chat.completions.parse(**asked, parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "Person" and is_person(call.function.parsed_arguments)
    with client.chat.completions.stream(**asked, parallel_tool_calls=False) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert is_person(call.function.parsed_arguments) and "tool_calls.function.arguments.done" in kinds


def test_tools_and_their_results(client: openai.OpenAI, tools_site: Site) -> None:
    asked: Any = {"model": tools_site.model, "tools": tool_loop.TOOLS, "temperature": 0}

    def ask(turn: tool_loop.ToolTurn) -> tuple[list[Call], str]:
        messages: list[Any] = [{"role": "user", "content": turn.question}]
        message = client.chat.completions.create(**asked, messages=messages).choices[0].message
        made = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
        messages.append(message)
        for call, (name, arguments) in zip(message.tool_calls or (), made, strict=True):
            result = str(tool_loop.FUNCTIONS[name](**arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return made, client.chat.completions.create(**asked, messages=messages).choices[0].message.content or ""

    check_tools(ask)


def test_structured_output(client: openai.OpenAI, site: Site) -> None:
    answer = client.chat.completions.parse(model=site.model, messages=MESSAGES, response_format=Person)
    assert is_person(answer.choices[0].message.parsed)


def test_structured_output_while_it_comes(client: openai.OpenAI, site: Site) -> None:
    with client.chat.completions.stream(model=site.model, messages=MESSAGES, response_format=Person) as stream:
        kinds = {event.type for event in stream}
        assert is_person(stream.get_final_completion().choices[0].message.parsed)
    assert {"content.delta", "content.done"} <= kinds


def test_logprobs(client: openai.OpenAI, ask: dict[str, Any], site: Site) -> None:
    (choice,) = client.chat.completions.create(**ask, logprobs=True, top_logprobs=3).choices
    tokens = choice.logprobs.content
    assert b"".join(bytes(token.bytes or ()) for token in tokens).decode() in choice.message.content + "<|im_end|>"
    assert all(token.logprob == max(each.logprob for each in token.top_logprobs) for token in tokens)
    (scored,) = client.completions.create(model=site.model, prompt=SUM, echo=True, max_tokens=1, logprobs=0).choices
    assert scored.logprobs.token_logprobs[0] is None and all(each <= 0 for each in scored.logprobs.token_logprobs[1:])
    assert "".join(scored.logprobs.tokens[:-1]) == SUM and scored.text.startswith(SUM)


@pytest.mark.parametrize("form", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}], ids=str)
def test_embeddings(embedder: Site, form: dict[str, Any], embeddings: Any) -> None:
    with openai.OpenAI(base_url=embedder.api, api_key=KEY) as client:
        answer = client.embeddings.create(model=EMBEDDER, input=TEXTS, **form)
    found: Any = [item.embedding for item in answer.data]
    if form.get("encoding_format") == "base64":
        found = [np.frombuffer(base64.b64decode(text), "<f4") for text in found]
    assert np.allclose(found, embeddings, atol=1e-6) and answer.usage.prompt_tokens > 0


def test_responses(client: openai.OpenAI, site: Site) -> None:
    asked: Any = {"model": site.model, "input": SUM, "temperature": 0}
    answer = client.responses.create(**asked, instructions="You are a helpful assistant.")
    assert ANSWER in answer.output_text and answer.status == "completed" and answer.usage.output_tokens > 0
    counted = client.responses.input_tokens.count(model=site.model, input=SUM, instructions=answer.instructions)
    assert counted.input_tokens == answer.usage.input_tokens
    more = client.responses.input_tokens.count(model=site.model, input=SUM, previous_response_id=answer.id)
    assert more.input_tokens > counted.input_tokens
    assert client.responses.retrieve(answer.id).output_text == answer.output_text
    client.responses.create(model=site.model, input="And 1 + 1?", previous_response_id=answer.id, store=False)
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_responses_stream(client: openai.OpenAI, site: Site) -> None:
    asked: Any = {"model": site.model, "input": SUM, "temperature": 0}
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == final.output_text and ANSWER in text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_responses_parse_an_object(client: openai.OpenAI, site: Site) -> None:
    answer = client.responses.parse(model=site.model, input="Ada is 36 years old.", text_format=Person)
    assert is_person(answer.output_parsed)


@pytest.mark.parametrize("streams", [False, True])
def test_responses_call_tools(client: openai.OpenAI, tools_site: Site, streams: bool) -> None:
    tools: Any = [
        {"type": "function", **{key: tool["function"][key] for key in ("name", "description", "parameters")}}
        for tool in tool_loop.TOOLS
    ]
    say: Callable[..., Any] = client.responses.create

    def say_in_a_stream(**asked: Any) -> Any:
        with client.responses.stream(**asked) as stream:
            return stream.get_final_response()

    say = say_in_a_stream if streams else say
    asked: Any = {"model": tools_site.model, "tools": tools, "temperature": 0}

    def ask(turn: tool_loop.ToolTurn) -> tuple[list[Call], str]:
        called = say(**asked, input=turn.question)
        calls = [item for item in called.output if item.type == "function_call"]
        made = [(call.name, json.loads(call.arguments)) for call in calls]
        results: Any = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": str(tool_loop.FUNCTIONS[name](**arguments)),
            }
            for call, (name, arguments) in zip(calls, made, strict=True)
        ]
        answer = say(**asked, previous_response_id=called.id, input=results)
        whole: Any = [{"role": "user", "content": turn.question}, *called.output, *results]
        assert say(**asked, input=whole, store=False).output_text == answer.output_text
        return made, answer.output_text

    check_tools(ask)


def test_chat_about_a_picture(pictured: Site, picture: bytes) -> None:
    url = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
    parts: Any = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": COLOUR}]
    items: Any = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": COLOUR}]
    with openai.OpenAI(base_url=pictured.api, api_key=KEY, max_retries=0) as client:
        asked: Any = {"model": pictured.model, "messages": [{"role": "user", "content": parts}], "temperature": 0}
        assert client.chat.completions.create(**asked).choices[0].message.content == COLOUR_ANSWER
        chunks = list(client.chat.completions.create(**asked, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == COLOUR_ANSWER
        own: Any = [{"role": "user", "content": items}]
        answer = client.responses.create(model=pictured.model, input=own, temperature=0)
        assert answer.output_text == COLOUR_ANSWER


def test_chat_written_from_a_recording() -> None:
    with (
        ServingProcess("jaxllm-speech", *flags(SLOTS)) as server,
        openai.OpenAI(base_url=f"{server.http}/v1", api_key=KEY, max_retries=0) as client,
        (SPEECH_DIR / "example.wav").open("rb") as file,
    ):
        found = client.audio.transcriptions.create(model="jaxllm-speech", file=file)
    assert found.text == "set the alarm for two thirty on thursday switch off the fan in the bedroom"


def test_chat_about_a_sound(tmp_path: Path) -> None:
    """Test recordings with a random model: equal ones get equal answers, others another."""
    folder = sound_models.write_sound_model(tmp_path)
    with (
        ServingProcess(str(folder), *flags(SLOTS)) as server,
        openai.OpenAI(base_url=f"{server.http}/v1", api_key=KEY, max_retries=0) as client,
    ):
        (model,) = client.models.list().data

        def ask(seed: int) -> str | None:
            data = base64.b64encode(sound_models.wav(seed)).decode()
            part: Any = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
            messages: Any = [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]
            answer = client.chat.completions.create(model=model.id, messages=messages, temperature=0, max_tokens=8)
            return answer.choices[0].message.content

        assert ask(3) == ask(3) != ask(4)
