"""200 generated conversations through OpenAI's client: its types, its accumulator, streams against whole answers.

The model's texts are generated, some of them hostile, split anywhere, and read by the server's parsers.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import openai
import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from pydantic import TypeAdapter

from jaxllm.outputs import Logprob
from jaxllm_server.generation.calls import Chunk, Part, PromptInfo, TokenUsage
from jaxllm_server.parsers.table import REASONING_PARSERS, TOOL_PARSERS
from jaxllm_server.parsers.tool_parsers import ToolCallDelta
from jaxllm_server.responses.reply import REPEATED_NUMBERS, ResponseReply
from jaxllm_server.shared.options import ServerOptions
from tests.support.fake_serving import FakeServing, http_server

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ITEMS: TypeAdapter[Any] = TypeAdapter(list[ResponseItem])
NUMBERS = dict.fromkeys(REPEATED_NUMBERS, 1.0)
TOOLS = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]
WORDS = ["Once", " upon", " a", "\n", " ", "é", "中", "<", "</", "<tool", '{"a":', "\U0001f98a", "<think>", "."]
ENDS = {"stop": "completed", "length": "incomplete", "context": "incomplete", "abort": "cancelled"}


class Speaker(FakeServing):
    """Outputs `text`, split at `cuts` if it streams, whole otherwise."""

    text, ending = "", "stop"
    cuts: tuple[int, ...] = ()

    async def generate(self, call, params=None):
        self.calls.append(call)
        self.num_live += 1
        reasoning = REASONING_PARSERS["qwen3"].form.parser()
        tools = TOOL_PARSERS["hermes"].parser(lambda name: f"call_{random.random()}")
        ends = [0, *(self.cuts if call.stream else ()), len(self.text)]
        try:
            for number, (start, end) in enumerate(pairwise(ends)):
                is_last = number == len(ends) - 2
                await asyncio.sleep(self.delay)
                thought, said = reasoning.push(self.text[start:end])
                if is_last:
                    thought, said = (a + b for a, b in zip((thought, said), reasoning.finish(), strict=True))
                content, calls = tools.push(said)
                if is_last:
                    rest, more = tools.finish()
                    content, calls = content + rest, calls + more
                finish = self.ending if is_last else None
                logprobs = None
                if "logprobs" in call.sampling:
                    logprobs = [{ord(each): Logprob(-0.5, 1, each)} for each in self.text[start:end]]
                part = Part(0, content, thought, calls, [1], logprobs, finish, None, None)
                prompt = PromptInfo([7, 8, 9], 1) if number == 0 else None
                yield Chunk(call.request_id, [part], prompt, TokenUsage(3, number + 1, 1, 0), None, is_last)
        finally:
            self.num_live -= 1


def drawn_text(rng: random.Random) -> str:
    """Draw a model's output: optional reasoning, then texts and calls, sometimes truncated."""
    said = [f"<think>{''.join(rng.choices(WORDS[:8], k=rng.randrange(6)))}</think>"] if rng.random() < 0.4 else []
    for _ in range(rng.randrange(4)):
        if rng.random() < 0.5:
            arguments = {f"{number}": rng.choice(["é", 1, [{}], None]) for number in range(rng.randrange(3))}
            call = json.dumps({"name": "add", "arguments": arguments}, ensure_ascii=rng.random() < 0.5)
            said.append(f"<tool_call>\n{call}\n</tool_call>")
        else:
            said.append("".join(rng.choices(WORDS, k=rng.randrange(1, 8))))
    text = "".join(said)
    return text[: rng.randrange(len(text) + 1)] if rng.random() < 0.15 else text


def read(events: list[Any]) -> Response:
    """Check a stream with the client's types and accumulator; return its response, which equals the deltas."""
    raw = [event.to_dict() for event in events]
    assert [event["sequence_number"] for event in raw] == list(range(len(raw)))
    assert [event["type"] for event in raw[:2]] == ["response.created", "response.in_progress"]
    state: Any = ResponseStreamState(input_tools=TOOLS, text_format=omit)
    done, deltas, open_item = [], {}, None
    for event in raw:
        state.handle_event(EVENTS.validate_python(event))
        match event["type"].removeprefix("response."):
            case "output_item.added":
                assert open_item is None, "items follow each other"
                assert event["output_index"] == len(done) and event["item"]["status"] == "in_progress"
                open_item, deltas[event["output_index"]] = event["item"]["id"], ""
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                assert event["item_id"] == open_item
                deltas[event["output_index"]] += event["delta"]
            case "output_text.done" | "reasoning_text.done" | "function_call_arguments.done":
                assert event.get("text", event.get("arguments")) == deltas[event["output_index"]]
            case "output_item.done":
                assert event["item"]["id"] == open_item
                done.append(event["item"])
                open_item = None
    last = raw[-1]["response"]
    assert raw[-1]["type"] == f"response.{'completed' if last['status'] == 'completed' else 'incomplete'}"
    assert open_item is None and last["output"] == done
    assert len({item["id"] for item in done}) == len(done)
    return Response.model_validate(last)


def said(response: Response) -> dict[str, Any]:
    """Return the contents of a response, independent of how its texts are divided into messages."""
    output = [item.to_dict() for item in response.output]
    texts = {
        kind: "".join(part["text"] for item in output if item["type"] == kind for part in item["content"])
        for kind in ("reasoning", "message")
    }
    calls = [(item["name"], item["arguments"]) for item in output if item["type"] == "function_call"]
    return {**texts, "calls": calls, "status": response.status, "details": response.incomplete_details}


@pytest.fixture(scope="module")
def speaker() -> Iterator[tuple[Speaker, openai.OpenAI]]:
    serving = Speaker()
    with http_server(serving) as port, openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k") as client:
        yield serving, client


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 200), marks=pytest.mark.ci)], ids=str)
def test_generated_conversations(speaker: tuple[Speaker, openai.OpenAI], seeds: range) -> None:
    serving, client = speaker
    num_disconnected = 0
    for seed in seeds:
        rng = random.Random(seed)
        previous: str | None = None
        told = {"user": [], "message": [], "reasoning": [], "calls": []}
        for turn in range(rng.randrange(1, 4)):
            serving.text, serving.ending = drawn_text(rng), rng.choice(["stop", "stop", *ENDS])
            places = range(len(serving.text) + 1)
            count = rng.choice([len(places), rng.randrange(min(12, len(places)))])  # single characters, or pieces
            serving.cuts = tuple(sorted(rng.sample(places, count)))
            asked: dict[str, Any] = {"model": "fake", "input": f"turn {turn}", "tools": TOOLS}
            if rng.random() < 0.3:
                asked |= {"include": ["message.output_text.logprobs"]}
            if rng.random() < 0.2:
                asked |= {"instructions": "Be short.", "metadata": {"a": "b"}, "reasoning": {"effort": "low"}}
            follows = previous or omit
            whole = client.responses.create(**asked, previous_response_id=follows)
            Response.model_validate(whole.to_dict())
            if rng.random() < 0.15 and count > 3:
                serving.delay = 0.02
                with client.responses.create(**asked, previous_response_id=follows, stream=True) as stream:
                    left = next(iter(stream)).response.id
                serving.delay = 0.0
                with pytest.raises(openai.NotFoundError):
                    client.responses.retrieve(left)
                num_disconnected += 1
            with client.responses.create(**asked, previous_response_id=follows, stream=True) as stream:
                streamed = read(list(stream))
            assert said(streamed) == said(whole) and whole.usage is not None
            assert whole.status == ENDS[serving.ending]
            kinds = {item.type for item in whole.output}
            assert whole.status != "completed" or kinds & {"message", "function_call"}, "there is something to show"
            assert whole.output_text == streamed.output_text == said(whole)["message"]
            assert client.responses.retrieve(streamed.id) == streamed
            # The model's prompt consists of the earlier conversation and this turn's input.
            shown = serving.calls[-1].messages
            told["user"].append(f"turn {turn}")
            assert [message["content"] for message in shown if message["role"] == "user"] == told["user"]
            own = [message for message in shown if message["role"] == "assistant"]
            functions = [call["function"] for message in own for call in message.get("tool_calls", [])]
            assert "".join(message["content"] for message in own) == "".join(told["message"])
            assert "".join(message.get("reasoning_content", "") for message in own) == "".join(told["reasoning"])
            assert [(call["name"], call["arguments"]) for call in functions] == told["calls"]
            chosen = rng.choice([whole, streamed])
            for kind in ("message", "reasoning", "calls"):
                told[kind] += said(chosen)[kind]
            previous = chosen.id
        assert previous is not None
        listed = client.responses.input_items.list(previous, limit=100, order="asc")
        ITEMS.validate_python([item.to_dict() for item in listed.data])
        assert listed.data[-1].to_dict()["content"][0]["text"] == told["user"][-1]
    assert num_disconnected >= len(seeds) // 20
    until = time.monotonic() + 5
    while serving.num_live and time.monotonic() < until:
        time.sleep(0.01)
    assert serving.num_live == 0


def test_log_probabilities_are_those_of_the_message() -> None:
    """Without those of reasoning, tags and calls; those of withheld text are sent with the next text."""
    tokens = ["<think>", "hm", "</think>", "A", " fox", " ", "<tool_call>", '{"name"']
    calls = [ToolCallDelta(0, "c", "add", "{}")]
    pieces = [
        (tokens[:2], "hm", "", [], 2),
        (tokens[2:4], "", "A", [], 0),
        (tokens[4:5], "", "", [], 0),
        (tokens[5:6], "", " fox ", [], 0),
        (tokens[6:7], "", "", [], 0),
        (tokens[7:], "", "", calls, 0),
    ]
    channels = ["<|channel|>", "analysis", "<|message|>", "hm", "<|end|>", "<|channel|>", "final", "<|message|>"]
    harmony = [(channels[:4], "hm", "", [], 1), (channels[4:], "", "", [], 0), (tokens[3:6], "", "A fox ", [], 0)]
    whole = [(tokens, "hm", "A fox ", calls, 2)], [([*channels, *tokens[3:6]], "hm", "A fox ", [], 1)]
    for parts in (pieces, *whole, pieces[:4], pieces[:3], harmony):
        body = {"input": "Hi", "include": ["message.output_text.logprobs"], "tools": TOOLS}
        reply = ResponseReply(body, ServerOptions(reasoning_parser="qwen3"), "r1")
        reply.begin({"id": "resp_r1", "created": 1, "model": "m", **NUMBERS, "clock": lambda: 7.5})
        told = []
        for number, (own, thought, text, made, num_reasoning) in enumerate(parts):
            logprobs = [{each: Logprob(-0.5, 1, token)} for each, token in enumerate(own)]
            finish = "stop" if number == len(parts) - 1 else None
            part = Part(0, text, thought, made, [1], logprobs, finish, None, None, num_reasoning)
            events = reply.events(0, Chunk("r1", [part], None, TokenUsage(), None, finish is not None))
            deltas = [event for event in events if event["type"] == "response.output_text.delta"]
            told += [entry["token"] for event in deltas for entry in event["logprobs"]]
        (message,) = (item for item in reply.snapshot()["output"] if item["type"] == "message")
        wanted = ["A", " fox", " "][: 2 if parts == pieces[:3] else 3]
        assert told == [entry["token"] for entry in message["content"][0]["logprobs"]] == wanted
