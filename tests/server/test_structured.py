"""Structured output and forced calls end to end, over HTTP and gRPC, with the embedded model."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from jaxllm import Client

pytestmark = pytest.mark.ci  # starts a process; tests/server/openai covers the conversion

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
WRONG = {"type": "object", "properties": {"a": {"type": "strin"}}}
WRONG_FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": WRONG}}
WRONG_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": WRONG}}]
MESSAGES = [{"role": "user", "content": "Ada is 36 years old."}]
TOOLS = [
    {"type": "function", "function": {"name": "greet", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "greet"}}


def is_person(text: str) -> bool:
    value = json.loads(text)
    return value.keys() == {"name", "age"} and value["name"] in ("Ada", "Grace") and 0 <= value["age"] <= 99


def chat(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """Return the choices of an answer, joined if it is a stream."""
    body = {"messages": MESSAGES, "max_tokens": 200, "seed": 1, "temperature": 1.0, **body}
    if not body.get("stream"):
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]
    choices: dict[int, dict[str, Any]] = {}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for own in json.loads(line[6:])["choices"]:
                    add(choices.setdefault(own["index"], {"message": {"content": ""}, "logprobs": None}), own)
    return [choices[index] for index in sorted(choices)]


def add(choice: dict[str, Any], own: dict[str, Any]) -> None:
    """Join an event of a stream as OpenAI's clients do: a call's id and name are in its first delta only."""
    message, delta = choice["message"], own["delta"]
    message["content"] += delta.get("content") or ""
    for call in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            assert call["id"] and call["type"] == "function" and call["function"]["name"]
            calls.append({"id": call["id"], "function": dict(call["function"])})
        else:
            assert call["index"] == len(calls) - 1 and call["function"].keys() == {"arguments"}
            calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    if own["logprobs"] is not None:
        choice["logprobs"] = {
            "content": [*(choice["logprobs"] or {"content": []})["content"], *own["logprobs"]["content"]]
        }
    choice["finish_reason"] = own["finish_reason"] or choice.get("finish_reason")


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_follows_its_schema(http: httpx.Client, stream: bool) -> None:
    choices = chat(http, response_format=FORM, stream=stream, n=2, logprobs=True, top_logprobs=2)
    assert len(choices) == 2
    for choice in choices:
        assert is_person(choice["message"]["content"]) and choice["finish_reason"] == "stop"
        written = "".join(entry["token"] for entry in choice["logprobs"]["content"])
        assert written.removesuffix("<|im_end|>") == choice["message"]["content"]
        assert all(entry["logprob"] <= 0 for entry in choice["logprobs"]["content"])


@pytest.mark.parametrize("stream", [False, True])
def test_required_calls_are_calls_of_the_tools(http: httpx.Client, stream: bool) -> None:
    for choice in chat(http, tools=TOOLS, tool_choice="required", stream=stream, n=2, logprobs=True):
        calls = choice["message"].get("tool_calls", [])
        assert not choice["message"]["content"] or choice["finish_reason"] == "length"
        whole = calls if choice["finish_reason"] == "tool_calls" else calls[:-1]
        assert calls and choice["logprobs"]["content"]
        for call in whole:
            arguments = call["function"]["arguments"]
            assert is_person(arguments) if call["function"]["name"] == "greet" else json.loads(arguments) == {}
    (one,) = chat(http, tools=TOOLS, tool_choice="required", stream=stream, parallel_tool_calls=False)
    assert (len(one["message"]["tool_calls"]), one["finish_reason"]) == (1, "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_call_is_its_arguments(http: httpx.Client, stream: bool) -> None:
    for choice in chat(http, tools=TOOLS, tool_choice=NAMED, stream=stream, n=2, response_format=FORM):
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "greet" and is_person(call["function"]["arguments"])
        assert (choice["finish_reason"], choice["message"]["content"] or "") == ("stop", "")
    (choice,) = chat(http, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}}, stream=stream)
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {}


def test_over_grpc(client: Client) -> None:
    asked: dict[str, Any] = {"max_tokens": 200, "seed": 1, "temperature": 1.0}
    answer = client.generate("Ada", structured_outputs={"json": SCHEMA}, n=2, logprobs=1, **asked)
    assert [is_person(output.text) for output in answer.outputs] == [True, True]
    chosen = client.stream("It is", structured_outputs={"choice": ["a", "b"]})
    assert "".join(delta.text for delta in chosen) in ("a", "b")
    assert client.generate("1", structured_outputs={"regex": "[0-9]{3}"}, **asked).text.isdecimal()
    assert client.generate("1", structured_outputs={"grammar": 'start: "a" "b"'}, **asked).text == "ab"
    assert isinstance(json.loads(client.generate("1", structured_outputs={"json": {"type": "null"}}).text), type(None))
    named = client.chat(MESSAGES, tools=TOOLS, tool_choice=NAMED, **asked).outputs[0]
    assert [(call.name, is_person(call.arguments)) for call in named.tool_calls] == [("greet", True)]
    stream = client.stream_chat(MESSAGES, tools=TOOLS[:1], tool_choice="required", **asked)
    calls = stream.result().outputs[0].tool_calls
    assert calls and {call.name for call in calls} == {"greet"} and is_person(calls[0].arguments)


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": WRONG}}},
            "response_format",
        ),
        ({"structured_outputs": {"json": WRONG}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs"),
        ({"tools": WRONG_TOOLS}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "tool_choice"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(http: httpx.Client, body: dict[str, Any], parameter: str) -> None:
    forced = {"tool_choice": "required"} if "tools" in body else {}
    for stream in (False, True):
        asked = {"messages": MESSAGES, "max_tokens": 9, "stream": stream, **forced, **body}
        answer = http.post("/v1/chat/completions", json=asked)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, parameter), error
        assert "\n" not in error["message"] and len(error["message"]) < 1000
        if "strin" in json.dumps(body):
            assert "strin" in error["message"]


def test_a_bad_schema_leaves_others_unharmed(http: httpx.Client) -> None:
    def ask(number: int) -> tuple[int, str]:
        form = ({"response_format": WRONG_FORM}, {"response_format": FORM}, {})[number % 3]
        body = {"messages": MESSAGES, "max_tokens": 60, "temperature": 1.0, "seed": number}
        answer = http.post("/v1/chat/completions", json={**body, **form})
        told = answer.json()["choices"][0]["message"]["content"] if answer.status_code == 200 else ""
        return answer.status_code, told

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(24)))
    assert [status for status, _ in answers] == [400, 200, 200] * 8
    assert all(is_person(text) for _, text in answers[1::3])
