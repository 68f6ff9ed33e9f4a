"""Responses and streams become the results of the client's methods."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.message import Message

from jaxllm.client import Completion, TokenLogprob, ToolCall, Usage
from jaxllm.client.reading import Joiner, read_completion
from jaxllm.v1 import inference_pb2, types_pb2
from tests.client.fake_server import WAIT, WHOLE, FakeServer, deltas_of_whole


def test_a_completion_holds_what_the_server_sent(client: Any, server: FakeServer) -> None:
    server.answers[inference_pb2.GenerateRequest] = WHOLE
    completion = client.generate("Say hi")
    assert isinstance(completion, Completion)
    assert completion.text == str(completion) == "Hi!"
    assert completion.token_ids == [7, 8]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "\n")
    assert completion.logprobs == [
        TokenLogprob(7, -0.5, 1, "Hi", (TokenLogprob(7, -0.5, 1, "Hi"), TokenLogprob(9, -2.0, 2, "Ho"))),
        TokenLogprob(8, -1.0, 3, "!", (TokenLogprob(4, -0.25, 1, "a"), TokenLogprob(5, -0.75, 2, "b"))),
    ]
    assert (completion.request_id, completion.model, completion.seed) == ("r-1", "tiny", 0)
    assert completion.reasoning == "hm"
    assert completion.tool_calls == [ToolCall("c1", "add", '{"a": 1}')]
    assert completion.tool_calls[0].parsed() == {"a": 1}
    assert completion.usage == Usage(3, 3, 2, 1)
    assert (completion.timing.queue, completion.timing.prefill, completion.timing.total) == (0.25, None, 1.5)
    assert completion.prompt_token_ids == [1, 2, 3]
    other = completion.outputs[1]
    assert (other.text, other.finish_reason, other.stop_reason, other.logprobs) == ("Ho", "length", None, None)


def test_a_stream_adds_up_to_the_completion(client: Any, server: FakeServer) -> None:
    server.answers["stream"] = lambda _: iter(deltas_of_whole())
    stream = client.stream("Say hi", n=2)
    texts = {0: "", 1: ""}
    ends = []
    for delta in stream:
        texts[delta.index] += delta.text
        ends += [delta.index] if delta.finish_reason else []
        assert stream.request_id == "r-1"
    assert texts == {0: "Hi!", 1: "Ho"}
    assert ends == [1, 0]
    assert stream.so_far == read_completion(WHOLE)
    assert stream.usage == Usage(3, 3, 2, 1)
    assert stream.timing.total == 1.5


def test_a_stream_can_be_read_as_one_answer(client: Any, server: FakeServer) -> None:
    server.answers["stream"] = lambda _: iter(deltas_of_whole())
    assert client.stream_chat([{"role": "user", "content": "Say hi"}]).result() == read_completion(WHOLE)


def test_deltas_come_as_they_are_sent(client: Any, server: FakeServer) -> None:
    gate = threading.Event()

    def answer(_: object) -> Iterator[Message]:
        messages = deltas_of_whole()
        yield messages[0]
        assert gate.wait(WAIT)
        yield from messages[1:]

    server.answers["stream"] = answer
    stream = client.stream("Say hi", timeout=WAIT)
    assert next(stream).text == "H"
    assert stream.usage is None
    gate.set()
    assert stream.result().text == "Hi!"


@pytest.mark.parametrize("number", sorted(types_pb2.FinishReason.values()))
def test_every_finish_reason_has_a_name(number: Any) -> None:
    output = types_pb2.Output(finish_reason=number)
    read = read_completion(inference_pb2.GenerateResponse(outputs=[output])).finish_reason
    name = types_pb2.FinishReason.Name(number).removeprefix("FINISH_REASON_").lower()
    assert read == {"unspecified": None, "aborted": "abort"}.get(name, name)


def test_a_stop_token_is_told_from_a_stop_string() -> None:
    output = types_pb2.Output(finish_reason=types_pb2.FINISH_REASON_STOP, stop_token_id=0)
    assert read_completion(inference_pb2.GenerateResponse(outputs=[output])).stop_reason == 0


def test_logprobs_need_no_text() -> None:
    packed = types_pb2.Logprobs(logprobs=[-1.0], ranks=[2])
    output = types_pb2.Output(token_ids=[3], logprobs=packed)
    read = read_completion(inference_pb2.GenerateResponse(outputs=[output]))
    assert read.logprobs == [TokenLogprob(3, -1.0, 2, None, ())]


def test_an_answer_can_go_on_in_the_conversation(client: Any, server: FakeServer) -> None:
    server.answers[inference_pb2.GenerateRequest] = WHOLE
    messages: list[dict[str, Any]] = [{"role": "user", "content": "1 + 1?"}]
    messages.append(client.chat(messages).message)
    messages.append({"role": "tool", "content": "2", "tool_call_id": "c1"})
    client.chat(messages)
    sent = server.request.chat.messages
    assert [message.role for message in sent] == ["user", "assistant", "tool"]
    assert sent[1].tool_calls[0] == types_pb2.ToolCall(id="c1", name="add", arguments_json='{"a": 1}')
    assert sent[2].tool_call_id == "c1"


def test_joining_nothing_is_an_empty_completion() -> None:
    assert Joiner().completion() == Completion()
