"""A scripted gRPC server, an adapter that unifies both clients, and one answer in both forms."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.duration_pb2 import Duration
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2_grpc
from grpc_status import rpc_status

from jaxllm import AsyncClient
from jaxllm.v1 import control_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2

WAIT = 10.0  # seconds; enough for immediate events
CODE = grpc.StatusCode


class FakeServer(
    inference_pb2_grpc.InferenceServiceServicer, control_pb2_grpc.ControlServiceServicer, health_pb2_grpc.HealthServicer
):
    """Answers a call with `answers[type of request]`, a message or its factory; a stream with `answers["stream"]`.

    StreamEmbed calls `answers["embed"]` with the iterator of requests and the context.
    """

    def __init__(self) -> None:
        self.answers: dict[Any, Any] = {}
        self.seen: list[tuple[Message, dict[str, Any]]] = []
        self.cancelled = threading.Event()
        for name in dir(self):
            if name[0].isupper():
                kinds = {"StreamGenerate": self._stream, "StreamKvEvents": self._stream, "StreamEmbed": self._embed}
                setattr(self, name, kinds.get(name, self._unary))

    @property
    def request(self) -> Any:
        return self.seen[-1][0]

    def _unary(self, request: Message, context: grpc.ServicerContext) -> Any:
        self.seen.append((request, dict(context.invocation_metadata())))
        answer = self.answers[type(request)]
        return answer(context) if callable(answer) else answer

    def _watch(self, context: grpc.ServicerContext) -> None:
        """Set `cancelled` if the call ends early; bound now, since the call may end during the next test."""
        cancelled = self.cancelled
        context.add_callback(lambda: None if context.is_active() else cancelled.set())

    def _stream(self, request: Message, context: grpc.ServicerContext) -> Iterator[Message]:
        self.seen.append((request, dict(context.invocation_metadata())))
        self._watch(context)
        yield from self.answers["stream"](context)

    def _embed(self, requests: Iterator[Message], context: grpc.ServicerContext) -> Iterator[Message]:
        self._watch(context)
        if "refusal" in self.answers:
            self.answers["refusal"](context)
        context.send_initial_metadata((("x-request-id", "r"),))
        yield from self.answers["embed"](requests, context)


class Blocking:
    """Runs an AsyncClient from outside its event loop, so that one test covers both clients."""

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
    """Likewise for an AsyncStream."""

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
    """Split WHOLE into messages: two interleaved sequences, several deltas in a message, a message without deltas."""
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
                delta(index=0, text="!", token_ids=[8], logprobs=logprobs(1), finish_reason=end, stop_string="\n"),
            ]
        ),
        inference_pb2.StreamGenerateResponse(usage=WHOLE.usage, timing=WHOLE.timing),
    ]


def plain(message: Message) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True)


def abort(code: grpc.StatusCode, message: str, *details: Message) -> Callable[[grpc.ServicerContext], Any]:
    """Return an answer that aborts with error details, as the server does."""

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


def until_gone(context: grpc.ServicerContext) -> Iterator[Message]:
    """Send a message, then wait until the client disconnects."""
    yield deltas_of_whole()[0]
    while context.is_active():
        time.sleep(0.01)
