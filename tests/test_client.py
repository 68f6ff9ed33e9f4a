"""The clients, over real loopback, against a server that does what the test says."""

from __future__ import annotations

import asyncio
import gc
import inspect
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from jaxllm import AsyncClient, Client, errors
from jaxllm.client import AuthError, Completion, TokenLogprob, ToolCall, Usage
from jaxllm.client.options import GenerateOptions, keyword_of
from jaxllm.client.reading import Joiner, read_completion
from jaxllm.client.requests import chat_request, generate_request
from jaxllm.types import SamplingParams
from jaxllm.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2

ROOT = Path(__file__).parent.parent
WAIT = 10.0  # seconds, for what happens at once


class FakeServer(
    inference_pb2_grpc.InferenceServiceServicer, control_pb2_grpc.ControlServiceServicer, health_pb2_grpc.HealthServicer
):
    """Answers a call with `answers[type of request]`, a message or its maker; a stream with `answers["stream"]`."""

    def __init__(self) -> None:
        self.answers: dict[Any, Any] = {}
        self.seen: list[tuple[Message, dict[str, Any]]] = []
        self.cancelled = threading.Event()
        for name in dir(self):
            if name[0].isupper():
                setattr(self, name, self._stream if name in ("StreamGenerate", "StreamKvEvents") else self._unary)

    @property
    def request(self) -> Any:
        return self.seen[-1][0]

    def _unary(self, request: Message, context: grpc.ServicerContext) -> Any:
        self.seen.append((request, dict(context.invocation_metadata())))
        answer = self.answers[type(request)]
        return answer(context) if callable(answer) else answer

    def _stream(self, request: Message, context: grpc.ServicerContext) -> Iterator[Message]:
        self.seen.append((request, dict(context.invocation_metadata())))
        context.add_callback(lambda: None if context.is_active() else self.cancelled.set())
        yield from self.answers["stream"](context)


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[FakeServer, str]]:
    servicer = FakeServer()
    server = grpc.server(futures.ThreadPoolExecutor(8), options=[("grpc.max_receive_message_length", 1 << 20)])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    control_pb2_grpc.add_ControlServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None)


@pytest.fixture
def server(running: tuple[FakeServer, str]) -> FakeServer:
    running[0].answers = {}
    running[0].seen = []
    running[0].cancelled = threading.Event()
    return running[0]


class Blocking:
    """An AsyncClient that is driven from outside its loop, so that one test can serve both clients."""

    def __init__(self, target: str, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = AsyncClient(target, **options)

    def run(self, awaitable: Any) -> Any:
        return self._loop.run_until_complete(awaitable)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        async def call(*args: Any, **options: Any) -> Any:
            returned = method(*args, **options)
            return await returned if inspect.isawaitable(returned) else BlockingStream(self, returned)

        return lambda *args, **options: self.run(call(*args, **options))

    def close(self) -> None:
        self.run(self._client.close())
        self._loop.close()


class BlockingStream:
    """The same of an AsyncStream."""

    def __init__(self, owner: Blocking, stream: Any) -> None:
        self._owner = owner
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stream, name)
        return (lambda: self._owner.run(value())) if callable(value) else value

    def __iter__(self) -> BlockingStream:
        return self

    def __next__(self) -> Any:
        try:
            return self._owner.run(anext(self._stream))
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> BlockingStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._owner.run(self._stream.__aexit__(None, None, None))


@pytest.fixture(params=[Client, Blocking], ids=["blocking", "asynchronous"])
def connect(request: pytest.FixtureRequest, running: tuple[FakeServer, str]) -> Iterator[Callable[..., Any]]:
    clients = []

    def make(target: str = running[1], **options: Any) -> Any:
        clients.append(request.param(target, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(connect: Callable[..., Any], server: FakeServer) -> Any:
    return connect()


def duration(seconds: float) -> Duration:
    made = Duration()
    made.FromNanoseconds(round(seconds * 1e9))
    return made


WHOLE = inference_pb2.GenerateResponse(
    request_id="r-1",
    model="tiny",
    outputs=[
        types_pb2.Output(
            index=0,
            text="Hi!",
            token_ids=[7, 8],
            logprobs=types_pb2.Logprobs(
                logprobs=[-0.5, -1.0],
                ranks=[1, 3],
                top_k=2,
                top_token_ids=[7, 9, 4, 5],
                top_logprobs=[-0.5, -2.0, -0.25, -0.75],
                texts=["Hi", "!"],
                top_texts=["Hi", "Ho", "a", "b"],
            ),
            finish_reason=types_pb2.FINISH_REASON_STOP,
            stop_string="\n",
            reasoning_text="hm",
            tool_calls=[types_pb2.ToolCall(id="c1", name="add", arguments_json='{"a": 1}')],
            seed=0,
        ),
        types_pb2.Output(index=1, text="Ho", token_ids=[9], finish_reason=types_pb2.FINISH_REASON_LENGTH, seed=5),
    ],
    prompt=types_pb2.PromptInfo(token_count=3, cached_token_count=2, token_ids=[1, 2, 3]),
    usage=types_pb2.Usage(prompt_tokens=3, completion_tokens=3, cached_prompt_tokens=2, reasoning_tokens=1),
    timing=types_pb2.Timing(queue=duration(0.25), first_token=duration(0.5), total=duration(1.5)),
)


def deltas_of_whole() -> list[inference_pb2.StreamGenerateResponse]:
    """Cut WHOLE into messages: two sequences interleaved, several deltas in a message, one message without any."""
    first = WHOLE.outputs[0]

    def logprobs(i: int) -> types_pb2.Logprobs:
        packed = first.logprobs
        return types_pb2.Logprobs(
            first_position=i,
            logprobs=packed.logprobs[i : i + 1],
            ranks=packed.ranks[i : i + 1],
            top_k=2,
            top_token_ids=packed.top_token_ids[2 * i : 2 * i + 2],
            top_logprobs=packed.top_logprobs[2 * i : 2 * i + 2],
            texts=packed.texts[i : i + 1],
            top_texts=packed.top_texts[2 * i : 2 * i + 2],
        )

    call, delta = types_pb2.ToolCallDelta, types_pb2.OutputDelta
    end = types_pb2.FINISH_REASON_STOP
    return [
        inference_pb2.StreamGenerateResponse(
            request_id="r-1",
            model="tiny",
            prompt=WHOLE.prompt,
            deltas=[
                delta(index=1, text="H", token_ids=[9], seed=5),
                delta(index=0, token_ids=[7], logprobs=logprobs(0), reasoning_text="h", seed=0),
            ],
        ),
        inference_pb2.StreamGenerateResponse(
            deltas=[
                delta(index=0, text="Hi", reasoning_text="m", tool_calls=[call(id="c1", name="add")]),
                delta(index=0, tool_calls=[call(arguments_json='{"a"')]),
                delta(index=1, text="o", finish_reason=types_pb2.FINISH_REASON_LENGTH),
            ]
        ),
        inference_pb2.StreamGenerateResponse(
            deltas=[
                delta(index=0, tool_calls=[call(arguments_json=": 1}")]),
                delta(
                    index=0,
                    text="!",
                    token_ids=[8],
                    logprobs=logprobs(1),
                    finish_reason=end,
                    stop_string="\n",
                ),
            ]
        ),
        inference_pb2.StreamGenerateResponse(usage=WHOLE.usage, timing=WHOLE.timing),
    ]


# What comes back.


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


# What goes out.

OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "temperature": (0, {"sampling": {"temperature": 0.0}}),
    "top_p": (0.9, {"sampling": {"top_p": 0.9}}),
    "top_k": (-1, {"sampling": {"top_k": -1}}),
    "min_p": (0.25, {"sampling": {"min_p": 0.25}}),
    "presence_penalty": (0.5, {"sampling": {"presence_penalty": 0.5}}),
    "frequency_penalty": (-2, {"sampling": {"frequency_penalty": -2.0}}),
    "repetition_penalty": (1.1, {"sampling": {"repetition_penalty": 1.1}}),
    "seed": (-(2**63), {"sampling": {"seed": str(-(2**63))}}),
    "n": (3, {"sampling": {"n": 3}}),
    "logit_bias": ({5: -100}, {"sampling": {"logit_bias": {"5": -100.0}}}),
    "allowed_token_ids": ([1], {"sampling": {"allowed_token_ids": [1]}}),
    "bad_words": (["x"], {"sampling": {"bad_words": ["x"]}}),
    "max_tokens": (64, {"stop": {"max_tokens": 64}}),
    "min_tokens": (0, {"stop": {"min_tokens": 0}}),
    "stop": ("\n\n", {"stop": {"stop_strings": ["\n\n"]}}),
    "stop_token_ids": ((2, 3), {"stop": {"stop_token_ids": [2, 3]}}),
    "include_stop_str_in_output": (True, {"stop": {"include_stop": True}}),
    "ignore_eos": (False, {"stop": {"ignore_eos": False}}),
    "time_limit": (1.5, {"stop": {"time_limit": "1.500s"}}),
    "truncate_prompt_tokens": (-1, {"stop": {"truncate_prompt_tokens": -1}}),
    "detokenize": (False, {"output": {"text": False}}),
    "return_token_ids": (False, {"output": {"token_ids": False}}),
    "return_prompt_token_ids": (True, {"output": {"prompt_token_ids": True}}),
    "logprobs": (0, {"output": {"logprobs": 0, "logprob_texts": True}}),
    "logprob_texts": (False, {"output": {"logprob_texts": False}}),
    "prompt_logprobs": (2, {"output": {"prompt_logprobs": 2}}),
    "logprob_token_ids": ([4], {"output": {"logprob_token_ids": [4]}}),
    "skip_special_tokens": (False, {"output": {"skip_special_tokens": False}}),
    "include_reasoning": (False, {"output": {"reasoning": False}}),
    "structured_outputs": ({"choice": ["a", "b"]}, {"structured_output": {"choice": {"values": ["a", "b"]}}}),
    "model": ("tiny", {"model": "tiny"}),
    "adapter": ("poet", {"adapter": "poet"}),
    "request_id": ("r-1", {"request_id": "r-1"}),
    "priority": (-5, {"priority": -5}),
    "cache_salt": ("s", {"cache_salt": "s"}),
    "add_special_tokens": (False, {"add_special_tokens": False}),
}


def plain(message: Message) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True)


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_an_option_fills_its_field_and_no_other(name: str) -> None:
    value, filled = OPTIONS[name]
    assert plain(generate_request("Hi", {name: value})) == {"text": "Hi", **filled}
    assert plain(generate_request("Hi", {name: None})) == {"text": "Hi"}


def test_every_option_is_tested() -> None:
    assert set(GenerateOptions.__annotations__) == set(OPTIONS)


def test_options_are_named_as_sampling_parameters_are() -> None:
    """Every parameter that the engine has built can be given by the same name, but the two that are of Python's API."""
    built = set(SamplingParams.__dataclass_fields__) - {"output_kind", "stream_interval"}
    not_built = {name for name, field in SamplingParams.__dataclass_fields__.items() if "InitVar" in str(field.type)}
    assert built - not_built <= set(GenerateOptions.__annotations__)


def test_doubles_are_not_rounded() -> None:
    assert generate_request("", {"top_p": 0.1}).sampling.top_p == 0.1


@pytest.mark.parametrize(
    ("prompt", "filled"),
    [
        ("", {"text": ""}),
        ("é\n", {"text": "é\n"}),
        ([1, 2], {"token_ids": {"ids": [1, 2]}}),
        (range(2), {"token_ids": {"ids": [0, 1]}}),
        ([], {"token_ids": {}}),
    ],
)
def test_a_prompt_is_text_or_token_ids(prompt: Any, filled: dict[str, Any]) -> None:
    request = generate_request(prompt, {})
    assert plain(request) == filled
    assert request.WhichOneof("prompt") == next(iter(filled))


def test_a_conversation_is_sent_whole() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    request = chat_request(
        [
            {"role": "system", "content": ""},
            {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "1 + 1?"}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "add",
                "tool_calls": [{"id": "c", "function": {"name": "add", "arguments": {"a": 1}}}],
            },
        ],
        {
            "tools": tools,
            "tool_choice": "none",
            "chat_template_kwargs": {"enable_thinking": False},
            "add_generation_prompt": False,
            "continue_final_message": True,
            "temperature": 0,
        },
    )
    assert plain(request) == {
        "sampling": {"temperature": 0.0},
        "chat": {
            "messages": [
                {"role": "system", "content": ""},
                {"role": "user", "name": "Ann", "parts": [{"text": "1 + 1?"}]},
                {
                    "role": "assistant",
                    "reasoning_text": "add",
                    "tool_calls": [{"id": "c", "name": "add", "arguments_json": '{"a": 1}'}],
                },
            ],
            "tools_json": '[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]',
            "tool_choice": "TOOL_CHOICE_NONE",
            "template_kwargs": {"enable_thinking": False},
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    }


def test_only_streams_take_a_streams_options(client: Any, server: FakeServer) -> None:
    server.answers["stream"] = lambda _: iter(deltas_of_whole())
    client.stream("Hi", stream_interval=4, usage_every_message=True).result()
    assert server.request.stream == types_pb2.StreamOptions(interval_tokens=4, usage_every_message=True)
    with pytest.raises(errors.UserError, match=r"^'stream_interval' is not an option of this call\.$"):
        client.generate("Hi", stream_interval=4)


@pytest.mark.parametrize(
    ("options", "message", "parameter"),
    [
        ({"temprature": 1}, "'temprature' is not an option of this call. Did you mean 'temperature'?", "temprature"),
        ({"max_token": 1}, "'max_token' is not an option of this call. Did you mean 'max_tokens'?", "max_token"),
        ({"timeouts": 1}, "'timeouts' is not an option of this call. Did you mean 'timeout'?", "timeouts"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'.", "temperature"),
        ({"temperature": True}, "temperature must be a number, got True.", "temperature"),
        ({"temperature": 10**400}, None, "temperature"),
        ({"seed": 10**5000}, "an integer from -9223372036854775808 to 9223372036854775807", "seed"),
        ({"n": -1}, "n must be an integer from 0 to 4294967295, got -1.", "n"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer from 0 to 4294967295, got 1.5.", "max_tokens"),
        ({"max_tokens": True}, "max_tokens must be an integer", "max_tokens"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got 1.", "ignore_eos"),
        ({"stop": [b"x"]}, "stop must be a list of valid texts, got [b'x'].", "stop"),
        ({"stop": 5}, "stop must be a list of valid texts, got 5.", "stop"),
        ({"stop_token_ids": [-1]}, "must be a list of integers from 0 to 4294967295, got [-1].", "stop_token_ids"),
        ({"stop_token_ids": "ab"}, "stop_token_ids must be a list of integers", "stop_token_ids"),
        ({"logit_bias": [1]}, "logit_bias must be a mapping of token ids to numbers, got [1].", "logit_bias"),
        ({"logit_bias": {"5": 1}}, "logit_bias must be a mapping of token ids to numbers", "logit_bias"),
        ({"time_limit": "1s"}, "time_limit must be a number of seconds, got '1s'.", "time_limit"),
        ({"time_limit": float("nan")}, "time_limit must be a number of seconds, got nan.", "time_limit"),
        ({"time_limit": True}, "time_limit must be a number of seconds, got True.", "time_limit"),
        ({"model": "\ud800"}, "model must be a valid text", "model"),
        ({"structured_outputs": {"json": {}}}, "one of json_schema, json_object, regex", "structured_outputs"),
    ],
)
def test_a_bad_option_is_named_before_anything_is_sent(options: dict[str, Any], message: str, parameter: str) -> None:
    with pytest.raises(errors.UserError) as caught:
        generate_request("Hi", options)
    assert (message or "") in str(caught.value)
    assert caught.value.parameter == parameter
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("prompt", [None, 5, b"text", {"a": 1}, ["one", "two"], [[1], [2]], [1.5], [-1], "\ud800"])
def test_a_bad_prompt_is_named(prompt: Any) -> None:
    with pytest.raises(errors.UserError, match=r"^prompt must be") as caught:
        generate_request(prompt, {})
    assert caught.value.parameter == "prompt"


@pytest.mark.parametrize(
    ("messages", "options", "parameter"),
    [
        ("Hi", {}, "messages"),
        (["Hi"], {}, "messages[0]"),
        ([{"content": "Hi"}], {}, "messages[0].role"),
        ([{"role": "user", "contents": "Hi"}], {}, "messages[0].contents"),
        ([{"role": "user", "content": 5}], {}, "messages[0].content"),
        ([{"role": 5, "content": "Hi"}], {}, "messages[0].role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], {}, "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], {}, "messages[0].tool_calls[0]"),
        ([], {"tools": [object()]}, "tools"),
        ([], {"tool_choice": "required"}, "tool_choice"),
        ([], {"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ([], {"chat_template_kwargs": {"a": object()}}, "chat_template_kwargs"),
    ],
)
def test_a_bad_conversation_is_named(messages: Any, options: dict[str, Any], parameter: str) -> None:
    with pytest.raises(errors.UserError) as caught:
        chat_request(messages, options)
    assert caught.value.parameter == parameter
    assert "\n" not in str(caught.value)


# The other calls.


def test_tokenize_and_detokenize(client: Any, server: FakeServer) -> None:
    server.answers[inference_pb2.TokenizeRequest] = inference_pb2.TokenizeResponse(token_ids=[1, 2])
    server.answers[inference_pb2.DetokenizeRequest] = inference_pb2.DetokenizeResponse(text="Hi")
    assert client.tokenize("Hi", add_special_tokens=False) == [1, 2]
    assert plain(server.request) == {"text": "Hi", "add_special_tokens": False}
    assert client.tokenize([{"role": "user", "content": "Hi"}], add_generation_prompt=True) == [1, 2]
    chat = {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": True}
    assert plain(server.request) == {"chat": chat}
    assert client.detokenize([1, 2], model="tiny") == "Hi"
    assert plain(server.request) == {"token_ids": [1, 2], "model": "tiny"}


def test_models_tell_what_calls_leave_open(client: Any, server: FakeServer) -> None:
    model = inference_pb2.Model(
        name="tiny",
        aliases=["t"],
        max_model_len=512,
        vocab_size=100,
        eos_token_ids=[2],
        default_sampling=types_pb2.SamplingParams(temperature=0.0, top_k=20),
        default_stop=types_pb2.StopConditions(max_tokens=16, include_stop=False),
        has_chat=True,
    )
    server.answers[inference_pb2.ListModelsRequest] = inference_pb2.ListModelsResponse(models=[model])
    (read,) = client.models()
    assert (read.name, read.aliases, read.max_model_len, read.eos_token_ids) == ("tiny", ("t",), 512, (2,))
    assert (read.has_chat, read.has_tool_calls) == (True, False)
    expected = {"temperature": 0.0, "top_k": 20, "max_tokens": 16, "include_stop_str_in_output": False}
    assert read.defaults == expected
    assert generate_request("Hi", read.defaults).sampling == model.default_sampling


def test_server_info_and_load(client: Any, server: FakeServer) -> None:
    info = control_pb2.GetServerInfoResponse(
        version="0.1.0", state=control_pb2.SERVER_STATE_DRAINING, model_names=["tiny"], mesh={"tensor": 4}
    )
    info.start_time.FromSeconds(10)
    server.answers[control_pb2.GetServerInfoRequest] = info
    server.answers[control_pb2.GetLoadRequest] = control_pb2.GetLoadResponse(
        running=3, waiting=2, waiting_prompt_tokens_uncached=9, prefix_hit_rate=0.5, step_time=duration(0.25)
    )
    read = client.server_info()
    assert (read.version, read.state, read.model_names, read.mesh) == ("0.1.0", "draining", ("tiny",), {"tensor": 4})
    assert read.start_time.timestamp() == 10
    load = client.load()
    assert (load.running, load.waiting, load.waiting_tokens) == (3, 2, 9)
    assert (load.prefix_hit_rate, load.step_seconds) == (0.5, 0.25)


def test_control(client: Any, server: FakeServer) -> None:
    server.answers[control_pb2.AbortRequest] = control_pb2.AbortResponse()
    server.answers[control_pb2.PauseGenerationRequest] = control_pb2.PauseGenerationResponse()
    server.answers[control_pb2.ResumeGenerationRequest] = control_pb2.ResumeGenerationResponse()
    server.answers[control_pb2.ResetPrefixCacheRequest] = control_pb2.ResetPrefixCacheResponse(was_reset=True)
    client.abort("r-1")
    assert list(server.request.request_ids) == ["r-1"]
    client.abort(["r-1", "r-2"])
    assert list(server.request.request_ids) == ["r-1", "r-2"]
    client.pause("keep", clear_cache=False)
    assert server.request.mode == control_pb2.PAUSE_MODE_KEEP
    assert server.request.HasField("clear_cache")
    assert not server.request.clear_cache
    with pytest.raises(errors.UserError, match=r"^mode must be 'abort' or 'wait' or 'keep', got 'stop'\.$"):
        client.pause("stop")
    client.resume()
    assert isinstance(server.request, control_pb2.ResumeGenerationRequest)
    assert client.reset_prefix_cache() is True


def test_health(client: Any, server: FakeServer) -> None:
    states = health_pb2.HealthCheckResponse
    server.answers[health_pb2.HealthCheckRequest] = states(status=states.NOT_SERVING)
    assert client.health("jaxllm.v1.InferenceService") == "not_serving"
    assert server.request.service == "jaxllm.v1.InferenceService"
    with pytest.raises(errors.UnavailableError, match=r"was not ready within 0\.2 s: not_serving$"):
        client.wait_until_ready(0.2)
    started = time.monotonic()
    server.answers[health_pb2.HealthCheckRequest] = lambda _: states(
        status=states.SERVING if time.monotonic() > started + 0.3 else states.NOT_SERVING
    )
    client.wait_until_ready(WAIT)
    assert 0.3 < time.monotonic() - started < WAIT / 2


def test_waiting_for_a_server_that_starts_late(connect: Callable[..., Any], tmp_path: Path) -> None:
    client = connect(f"unix:{tmp_path}/socket")
    with pytest.raises(errors.UnavailableError, match=r"was not ready within 0\.2 s: .*cannot be reached"):
        client.wait_until_ready(0.2)
    late = grpc.server(futures.ThreadPoolExecutor(1))
    servicer = FakeServer()
    states = health_pb2.HealthCheckResponse
    servicer.answers[health_pb2.HealthCheckRequest] = states(status=states.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, late)
    late.add_insecure_port(f"unix:{tmp_path}/socket")
    starter = threading.Timer(0.3, late.start)
    starter.start()
    client.wait_until_ready(WAIT)
    starter.join()
    late.stop(None)


# What goes wrong.


def abort(code: grpc.StatusCode, message: str, *details: Message) -> Callable[[grpc.ServicerContext], Any]:
    """Make an answer that is an error with details, as the server sends them."""

    def answer(context: grpc.ServicerContext) -> None:
        packed = []
        for detail in details:
            packed.append(Packed())
            packed[-1].Pack(detail)
        status = status_pb2.Status(code=code.value[0], message=message, details=packed)
        context.abort_with_status(rpc_status.to_status(status))

    return answer


def reason(name: str, **metadata: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=name, domain="jaxllm", metadata=metadata)


def violation(field: str) -> error_details_pb2.BadRequest:
    made = error_details_pb2.BadRequest()
    made.field_violations.add(field=field, description="…")
    return made


CODE = grpc.StatusCode
FAILURES = [
    (CODE.INVALID_ARGUMENT, [reason("INVALID_PARAMETER"), violation("sampling.top_p")], errors.UserError, "top_p"),
    (CODE.INVALID_ARGUMENT, [violation("stop.stop_strings")], errors.UserError, "stop"),
    (CODE.INVALID_ARGUMENT, [violation("text")], errors.UserError, "prompt"),
    (CODE.INVALID_ARGUMENT, [], errors.UserError, None),
    (
        CODE.INVALID_ARGUMENT,
        [reason("UNSUPPORTED_PARAMETER"), violation("sampling.bad_words")],
        errors.UnsupportedError,
        "bad_words",
    ),
    (
        CODE.INVALID_ARGUMENT,
        [reason("CONTEXT_LENGTH_EXCEEDED", prompt_tokens="600", max_model_len="512")],
        errors.ContextLengthError,
        "prompt",
    ),
    (CODE.NOT_FOUND, [reason("MODEL_NOT_FOUND")], errors.NotFoundError, None),
    (CODE.FAILED_PRECONDITION, [reason("FEATURE_DISABLED")], errors.FeatureDisabledError, None),
    (CODE.UNIMPLEMENTED, [], errors.FeatureDisabledError, None),
    (CODE.ALREADY_EXISTS, [reason("REQUEST_ID_IN_USE")], errors.RequestIdInUseError, "request_id"),
    (CODE.OUT_OF_RANGE, [violation("start_sequence")], errors.UserError, "start_sequence"),
    (CODE.UNAUTHENTICATED, [reason("AUTH_MISSING")], AuthError, "api_key"),
    (CODE.PERMISSION_DENIED, [reason("ADMIN_REQUIRED")], AuthError, "api_key"),
    (CODE.RESOURCE_EXHAUSTED, [reason("QUEUE_FULL")], errors.OverloadedError, None),
    (CODE.RESOURCE_EXHAUSTED, [reason("SLOW_CONSUMER")], errors.SlowConsumerError, None),
    (CODE.UNAVAILABLE, [reason("NOT_READY")], errors.UnavailableError, None),
    (CODE.UNAVAILABLE, [reason("DRAINING")], errors.DrainingError, None),
    (CODE.UNAVAILABLE, [reason("ENGINE_DEAD")], errors.EngineDeadError, None),
    (CODE.INTERNAL, [reason("ENGINE_ERROR")], errors.RequestFailedError, None),
    (CODE.INTERNAL, [], errors.EngineError, None),
    (CODE.UNKNOWN, [], errors.EngineError, None),
    (CODE.DEADLINE_EXCEEDED, [], errors.DeadlineError, None),
]


@pytest.mark.parametrize(("code", "details", "error", "parameter"), FAILURES)
@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
def test_a_status_becomes_the_engines_own_exception(
    connect: Callable[..., Any],
    server: FakeServer,
    code: grpc.StatusCode,
    details: list[Message],
    error: type[Exception],
    parameter: str | None,
    is_stream: bool,
) -> None:
    client = connect(retries=False)
    failing = abort(code, "top_p must be in (0, 1],\n got 2.", *details)
    server.answers[inference_pb2.GenerateRequest] = server.answers["stream"] = failing
    with pytest.raises(error) as caught:
        client.stream("Hi").result() if is_stream else client.generate("Hi")
    assert type(caught.value) is error
    assert getattr(caught.value, "parameter", None) == parameter
    assert str(caught.value).endswith("top_p must be in (0, 1], got 2.")
    assert caught.value.__suppress_context__


def test_a_context_length_error_knows_the_lengths(client: Any, server: FakeServer) -> None:
    detail = reason("CONTEXT_LENGTH_EXCEEDED", prompt_tokens="600", max_model_len="512")
    server.answers[inference_pb2.GenerateRequest] = abort(CODE.INVALID_ARGUMENT, "too long", detail)
    with pytest.raises(errors.ContextLengthError) as caught:
        client.generate("Hi")
    assert (caught.value.num_prompt_tokens, caught.value.max_model_len) == (600, 512)


def test_an_overloaded_server_says_when_to_come_back(connect: Callable[..., Any], server: FakeServer) -> None:
    hint = error_details_pb2.RetryInfo(retry_delay=duration(2.5))
    failing = abort(CODE.RESOURCE_EXHAUSTED, "The queue is full.", reason("QUEUE_FULL"), hint)
    server.answers[inference_pb2.GenerateRequest] = failing
    with pytest.raises(errors.OverloadedError) as caught:
        connect(retries=False).generate("Hi")
    assert caught.value.retry_after == 2.5


def test_details_of_another_form_leave_the_status(connect: Callable[..., Any], server: FakeServer) -> None:
    def answer(context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata((("grpc-status-details-bin", b"\xff\xff"),))
        context.abort(CODE.NOT_FOUND, "no such thing")

    server.answers[inference_pb2.GenerateRequest] = answer
    with pytest.raises(errors.NotFoundError, match=r"^no such thing$"):
        connect().generate("Hi")


def test_a_request_that_is_too_large_is_the_callers_fault(connect: Callable[..., Any], server: FakeServer) -> None:
    with pytest.raises(errors.UserError, match=r"^The request is larger than 127\.0\.0\.1:\d+ takes: ") as caught:
        connect(retries=False).generate("x" * (2 << 20))
    assert caught.value.parameter == "prompt"
    assert not server.seen


def test_a_server_that_is_not_there_is_named(connect: Callable[..., Any]) -> None:
    started = time.monotonic()
    with pytest.raises(errors.UnavailableError, match=r"^127\.0\.0\.1:1 cannot be reached: "):
        connect("127.0.0.1:1").generate("Hi")
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("code", [CODE.UNAVAILABLE, CODE.RESOURCE_EXHAUSTED])
@pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
def test_a_busy_server_is_asked_four_times(
    connect: Callable[..., Any], server: FakeServer, code: grpc.StatusCode, is_stream: bool
) -> None:
    def busy(context: grpc.ServicerContext) -> Any:
        if len(server.seen) < 4:
            context.set_trailing_metadata((("grpc-retry-pushback-ms", "20"),))
            context.abort(code, "busy")
        return iter(deltas_of_whole()) if is_stream else WHOLE

    server.answers[inference_pb2.GenerateRequest] = server.answers["stream"] = busy
    client = connect()
    answer = client.stream("Hi").result() if is_stream else client.generate("Hi")
    assert answer.text == "Hi!"
    assert len(server.seen) == 4


def test_retries_can_be_switched_off(connect: Callable[..., Any], server: FakeServer) -> None:
    server.answers[inference_pb2.GenerateRequest] = abort(CODE.UNAVAILABLE, "busy", reason("NOT_READY"))
    with pytest.raises(errors.UnavailableError, match=r"^busy$"):
        connect(retries=False).generate("Hi")
    assert len(server.seen) == 1


def test_a_stream_that_fails_leaves_what_came_before(client: Any, server: FakeServer) -> None:
    def answer(context: grpc.ServicerContext) -> Iterator[Message]:
        yield deltas_of_whole()[0]
        abort(CODE.UNAVAILABLE, "The engine has stopped.", reason("ENGINE_DEAD"))(context)

    server.answers["stream"] = answer
    stream = client.stream("Hi")
    with pytest.raises(errors.EngineDeadError, match=r"^The engine has stopped\.$"):
        stream.result()
    assert [output.token_ids for output in stream.so_far.outputs] == [[7], [9]]
    assert stream.so_far.finish_reason is None
    assert len(server.seen) == 1  # a stream that has begun is not repeated


def until_gone(context: grpc.ServicerContext) -> Iterator[Message]:
    """Send a message, then nothing until the client has gone."""
    yield deltas_of_whole()[0]
    while context.is_active():
        time.sleep(0.01)


@pytest.mark.parametrize("way", ["close", "with", "break"])
def test_leaving_a_stream_ends_it_on_the_server(client: Any, server: FakeServer, way: str) -> None:
    server.answers["stream"] = until_gone
    if way == "with":
        with client.stream("Hi") as stream:
            next(stream)
    else:
        stream = client.stream("Hi")
        for _ in stream:
            break
        if way == "close":
            stream.close()
            assert len(list(stream)) <= 1  # what had come already, and no exception
        else:
            del stream, _
            gc.collect()
            if isinstance(client, Blocking):
                client.run(asyncio.sleep(0.05))  # what was let go is cancelled by its loop
    assert server.cancelled.wait(WAIT)


def test_timeouts_are_of_a_client_or_of_a_call(connect: Callable[..., Any], server: FakeServer) -> None:
    left = []

    def answer(context: grpc.ServicerContext) -> Message:
        left.append(context.time_remaining())
        return WHOLE

    server.answers[inference_pb2.GenerateRequest] = answer
    connect().generate("Hi")
    connect(timeout=100).generate("Hi")
    connect(timeout=100).generate("Hi", timeout=50)
    assert left[0] is None or left[0] > 1e6
    assert 90 < left[1] < 102  # it crosses the wire in units that round up
    assert 40 < left[2] < 52
    release = threading.Event()
    server.answers[inference_pb2.GenerateRequest] = lambda _: release.wait(WAIT) and WHOLE
    with pytest.raises(errors.DeadlineError):
        connect().generate("Hi", timeout=0.1)
    release.set()


# Reaching a server.


def test_the_key_and_metadata_go_with_every_call(connect: Callable[..., Any], server: FakeServer) -> None:
    client = connect(api_key="secret", metadata={"X-Data-Parallel-Rank": "1"})
    server.answers[inference_pb2.GenerateRequest] = WHOLE
    server.answers["stream"] = lambda _: iter(deltas_of_whole())
    server.answers[control_pb2.AbortRequest] = control_pb2.AbortResponse()
    client.generate("Hi")
    client.stream("Hi").result()
    client.abort([])
    assert len(server.seen) == 3
    for _, metadata in server.seen:
        assert metadata["authorization"] == "Bearer secret"
        assert metadata["x-data-parallel-rank"] == "1"
        assert metadata["user-agent"].startswith("jaxllm-python/")


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("http://localhost:8000", {}, "target must be host:port or unix:/path, got 'http://localhost:8000'."),
        ("localhost", {}, "target needs a port, as in localhost:50051."),
        ("", {}, "target needs a port, as in localhost:50051."),
        ("localhost:1", {"ssl_certfile": "cert.pem"}, "ssl_certfile and ssl_keyfile go together."),
        ("localhost:1", {"ssl_ca_certs": "/no/such.pem"}, "/no/such.pem cannot be read: No such file or directory."),
    ],
)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_bad_address_is_refused(kind: type, target: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.UserError) as caught:
        kind(target, **options)
    assert str(caught.value) == message


def test_a_client_does_not_show_its_key() -> None:
    with Client("localhost:1", api_key="secret") as client:
        assert repr(client) == "Client('localhost:1')"


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        own = {name: method for name, method in vars(kind).items() if not name.startswith("_")}
        return {name: [str(p) for p in inspect.signature(method).parameters.values()] for name, method in own.items()}

    assert methods(Client) == methods(AsyncClient)


def test_many_calls_share_an_asynchronous_client(running: tuple[FakeServer, str], server: FakeServer) -> None:
    server.answers[inference_pb2.GenerateRequest] = WHOLE

    async def ask() -> list[Completion]:
        async with AsyncClient(running[1]) as client:
            return await asyncio.gather(*(client.generate("Hi") for _ in range(50)))

    assert [completion.text for completion in asyncio.run(ask())] == ["Hi!"] * 50


def test_a_cancelled_task_ends_its_stream(running: tuple[FakeServer, str], server: FakeServer) -> None:
    server.answers["stream"] = until_gone

    async def ask() -> None:
        async with AsyncClient(running[1]) as client:
            stream = client.stream("Hi")
            await anext(stream)
            reading = asyncio.create_task(stream.result())
            await asyncio.sleep(0.05)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading

    asyncio.run(ask())
    assert server.cancelled.wait(WAIT)


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_a_client_loads_no_jax_and_no_numpy() -> None:
    ran = run(
        "import sys; from jaxllm import AsyncClient, Client; Client('localhost:1'); AsyncClient('localhost:1');"
        "print(sorted({'jax', 'numpy', 'tokenizers', 'flax'} & set(sys.modules)))"
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "[]\n", "")


@pytest.mark.parametrize("missing", ["grpc", "google.protobuf", "google.rpc", "grpc_health"])
def test_what_is_missing_is_named_with_the_command_that_brings_it(missing: str) -> None:
    ran = run(f"import sys; sys.modules[{missing!r}] = None; from jaxllm import Client")
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].endswith("pip install 'jaxllm[client]'")


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("stop.include_stop", "include_stop_str_in_output"),
        ("structured_output.regex", "structured_outputs"),
        ("chat.messages[0].role", "messages[0].role"),
        ("chat.tools_json", "tools"),
        ("token_ids.ids", "prompt"),
        ("prompt", "prompt"),
        ("extensions", "extensions"),
    ],
)
def test_a_field_at_fault_is_named_as_the_caller_knows_it(field: str, name: str) -> None:
    assert keyword_of(field) == name


def test_joining_nothing_is_an_empty_completion() -> None:
    assert Joiner().completion() == Completion()
