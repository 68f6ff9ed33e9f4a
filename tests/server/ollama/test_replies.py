"""Ollama's API: bodies become calls or errors that name a field, chunks become lines; and over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from jaxllm.errors import RequestFailedError, UserError
from jaxllm_server.ollama.pooling import OllamaEmbedReply
from jaxllm_server.ollama.replies import PATHS, OllamaChatReply, OllamaGenerateReply
from jaxllm_server.shared.options import ServerOptions
from jaxllm_server.shared.strict_json import object_of
from tests.support.fake_serving import http_server, pooled
from tests.support.written_answers import WritingServing, written

OPTIONS = ServerOptions()
MESSAGES = [{"role": "user", "content": "Hi"}]
HEAD = {"id": "r", "created": 0, "model": "fake"}


def chat(**body: Any) -> OllamaChatReply:
    return OllamaChatReply({"messages": MESSAGES, **body}, OPTIONS, "r")


def generate(**body: Any) -> OllamaGenerateReply:
    return OllamaGenerateReply({"prompt": "Hi", **body}, OPTIONS, "r")


def test_a_body_becomes_a_call() -> None:
    options = {
        "temperature": 0.5,
        "num_predict": 7,
        "repeat_penalty": 1.1,
        "stop": ["x"],
        "num_ctx": 4096,
        "mirostat": 0,
    }
    call = chat(model="fake:latest", options=options, think="low", keep_alive="5m", tools=[]).calls[0]
    assert call.sampling == {"temperature": 0.5, "max_tokens": 7, "repetition_penalty": 1.1, "stop": ["x"]}
    assert (call.model, call.stream, call.tools, call.messages) == ("fake", True, None, MESSAGES)
    assert call.template_kwargs == {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}
    assert chat(options={"num_predict": -1}).calls[0].sampling == {}
    assert chat(think=False).calls[0].template_kwargs == {"enable_thinking": False, "thinking": False}
    told = [{"role": "assistant", "content": "", "thinking": "hm", "images": []}, {"role": "tool", "tool_name": "add"}]
    known = [{"role": "assistant", "content": "", "reasoning_content": "hm"}, {"role": "tool", "name": "add"}]
    assert chat(messages=told).calls[0].messages == known
    system = {"role": "system", "content": "s"}
    assert generate(system="s", stream=False).calls[0].messages == [system, *MESSAGES]
    raw = generate(raw=True, format="json").calls[0]
    assert (raw.prompt, raw.messages, raw.sampling) == ("Hi", None, {"structured_outputs": {"json_object": True}})
    assert chat(format={"type": "object"}).calls[0].sampling == {"structured_outputs": {"json": {"type": "object"}}}
    embed = OllamaEmbedReply({"input": ["a"], "model": "fake:latest", "dimensions": 3}, OPTIONS, "r").calls[0]
    assert (embed.model, embed.inputs, embed.truncate_prompt_tokens, embed.dimensions) == ("fake", ["a"], -1, 3)
    assert OllamaEmbedReply({"input": "a", "truncate": False}, OPTIONS, "r").calls[0].truncate_prompt_tokens is None


def test_options_follow_the_policy_of_unknown_fields() -> None:
    assert chat(options={"num_gqa": 1, "made_up": 1}).ignored == ["made_up"]
    with pytest.raises(UserError, match="Did you mean 'temperature'"):
        chat(options={"temprature": 1})


@pytest.mark.parametrize(
    ("make", "body", "parameter"),
    [
        (chat, {"messages": []}, "messages"),
        (chat, {"messages": [{"content": "a"}]}, "messages"),
        (chat, {"messages": [{**MESSAGES[0], "images": [5]}]}, "messages"),
        (chat, {"tools": {"a": 1}}, "tools"),
        (chat, {"think": 1}, "think"),
        (chat, {"format": "xml"}, "format"),
        (chat, {"options": []}, "options"),
        (chat, {"logprobs": True}, "logprobs"),
        (generate, {"prompt": ""}, "prompt"),
        (generate, {"suffix": "x"}, "suffix"),
        (generate, {"images": "x"}, "images"),
        (generate, {"images": ["x"], "raw": True}, "images"),
    ],
)
def test_what_is_wrong_is_named(make: Any, body: dict[str, Any], parameter: str) -> None:
    with pytest.raises(UserError) as caught:
        make(**body)
    assert caught.value.parameter == parameter


def test_lines_are_the_whole_answer_wherever_it_is_cut() -> None:
    for seed in range(200):
        answer = written(seed)
        for make, read in (
            (chat, lambda line: line["message"]),
            (generate, lambda line: {"content": line["response"], "thinking": line.get("thinking", "")}),
        ):
            streamed, unary = make(), make(stream=False)
            streamed.begin(HEAD)
            unary.begin(HEAD)
            lines = [line for chunk in answer.chunks(Random(seed)) for line in streamed.events(0, chunk)]
            lines += streamed.last_events()
            whole = unary.response(answer.chunks(None))
            assert "".join(read(line)["content"] for line in lines) == read(whole)["content"] == answer.text
            reasoning = "".join(read(line).get("thinking", "") for line in lines)
            assert reasoning == read(whole).get("thinking", "") == answer.reasoning
            assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
            ends = "length" if answer.finish in ("length", "context", "time_limit") else "stop"
            assert lines[-1]["done_reason"] == whole["done_reason"] == ends
            assert {name: lines[-1][f"{name}_duration"] for name in ("total", "load", "prompt_eval", "eval")} == {
                **{"total": 2 * 10**9, "load": 0, "prompt_eval": 25 * 10**7, "eval": 15 * 10**8}
            }
            if make is chat and answer.calls:
                calls = [line["message"]["tool_calls"] for line in lines if "tool_calls" in line["message"]]
                given = [(name, object_of(text.strip() or "{}", 64)) for _, name, text in answer.calls]
                told = [each for each in given if each[1] is not None]  # a truncated call is not returned
                assert calls == ([whole["message"]["tool_calls"]] if told else [])
                assert [tuple(each["function"].values()) for own in calls for each in own] == told


# Over HTTP.


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    serving = WritingServing()
    with http_server(serving) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        yield SimpleNamespace(serving=serving, http=http)


def test_every_path_answers_and_fails_in_ollamas_form(server: Any) -> None:
    post, get = server.http.post, server.http.get
    answer = post("/api/chat", json={"model": "fake", "messages": MESSAGES})
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert json.loads(answer.text.splitlines()[-1])["done"] is True
    (model, _) = get("/api/tags").json()["models"]
    assert (model["name"], model["context_length"], get("/api/ps").json()["models"][0]) == ("fake", 64, model)
    assert post("/api/show", json={"model": "fake"}).json()["model_info"]["jaxllm.context_length"] == 64
    assert get("/api/version").json().keys() == {"version"}
    embedded = post("/api/embed", json={"model": "fake", "input": ["a", "b"]}).json()
    (call,) = [call for call in server.serving.calls if hasattr(call, "inputs")]
    assert np.allclose(embedded["embeddings"], [pooled(index, call, 2) for index in (0, 1)])
    assert embedded["prompt_eval_count"] == 6
    for path in PATHS:
        answer = server.http.request("DELETE", path)
        assert (answer.status_code, list(answer.json())) == (405, ["error"])
    assert post("/api/show", json={"model": "x"}).json() == {"error": "The model `x` does not exist."}
    assert post("/api/chat", json={"model": "x:latest", "messages": MESSAGES}).status_code == 404


def test_a_stream_that_fails_ends_with_an_error(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def generate(call: Any, params: Any = None) -> Any:
        yield written(0).chunks(Random(0))[0]
        raise RequestFailedError("The step failed.")

    monkeypatch.setattr(server.serving, "generate", generate)
    answer = server.http.post("/api/generate", json={"model": "fake", "prompt": "Hi"})
    assert json.loads(answer.text.splitlines()[-1]) == {"error": "The step failed."}
