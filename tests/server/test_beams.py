"""Beam search end to end, over HTTP and gRPC, against `LLM.beam_search` with the embedded model."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from jaxllm import LLM, BeamSearchParams, Client, UserError

pytestmark = pytest.mark.ci  # a process of its own; the mapping is tested in tests/server/openai

PROMPT = "Once upon a time"
ASKED: dict[str, Any] = {"n": 4, "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def due() -> list[str]:
    with LLM(precompile="covering", max_num_seqs=8, max_num_batched_tokens=64) as llm:
        params = BeamSearchParams(4, 12, length_penalty=0.5, early_stopping="never")
        (output,) = llm.beam_search(PROMPT, params)
        return [each.text.removeprefix(PROMPT) for each in output.sequences]


def test_both_protocols_find_what_llm_finds(http: httpx.Client, client: Client, due: list[str]) -> None:
    body = ASKED | {"prompt": PROMPT, "use_beam_search": True, "length_penalty": 0.5, "early_stopping": "never"}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert [choice["text"] for choice in answer.json()["choices"]] == due
    assert answer.json()["usage"]["completion_tokens"] == 4 * 12
    found = client.generate(PROMPT, **ASKED, beam_search={"length_penalty": 0.5, "early_stopping": "never"})
    assert [output.text for output in found.outputs] == due


def test_a_conversation_is_searched(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Who is there?"}]
    body = {"messages": messages, "n": 2, "max_tokens": 6, "use_beam_search": True}
    choices = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert choices[0]["message"]["content"] != choices[1]["message"]["content"]


@pytest.mark.parametrize(
    ("given", "field", "path"),
    [
        ({"n": 100}, "n", "sampling.n"),
        ({"n": 5, "max_tokens": 4, "presence_penalty": 0.5}, "presence_penalty", "sampling.presence_penalty"),
        ({"temperature": 0.5}, "temperature", "sampling.temperature"),
        ({"logprobs": 2}, "logprobs", "output.logprobs"),
        ({"bad_words": ["a"]}, "bad_words", "sampling.bad_words"),
        ({"stop": ["a"]}, "stop", "stop.stop_strings"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "structured_output.regex"),
        ({"length_penalty": 11.0}, "length_penalty", "sampling.beam_search.length_penalty"),
    ],
)
def test_what_a_search_cannot_do_is_refused_by_name(
    given: dict[str, Any], field: str, path: str, http: httpx.Client, client: Client
) -> None:
    answer = http.post("/v1/completions", json=ASKED | {"prompt": PROMPT, "use_beam_search": True} | given)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
    beams = {"length_penalty": given["length_penalty"]} if "length_penalty" in given else {}
    options = {name: value for name, value in given.items() if name != "length_penalty"}
    with pytest.raises(UserError) as caught:
        client.generate(PROMPT, **ASKED | options, beam_search=beams)
    assert caught.value.parameter in (field, path.removeprefix("sampling."))


def test_a_search_has_no_stream(http: httpx.Client, client: Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": PROMPT, "use_beam_search": True, "stream": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")
    with pytest.raises(UserError, match="A beam search cannot stream"), client.stream(PROMPT, beam_search={}) as stream:
        next(stream)
