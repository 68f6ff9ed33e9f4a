"""Embedding, classifying and scoring by both clients; the stream of embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as Packed
from google.rpc import status_pb2

from jaxllm import AsyncClient, errors
from jaxllm.client import Classification, Embedding, Scores
from jaxllm.v1 import inference_pb2 as pb
from jaxllm.v1 import types_pb2
from tests.client.fake_server import CODE, WAIT, FakeServer, abort, reason, violation

USAGE = types_pb2.Usage(prompt_tokens=3)


def test_what_comes_back(client: Any, server: FakeServer) -> None:
    own: Any = {"request_id": "r1", "model": "m", "usage": USAGE}
    read: Any = {"request_id": "r1", "model": "m", "prompt_tokens": 3}
    server.answers[pb.EmbedRequest] = pb.EmbedResponse(values=[0.5, -1.0], **own)
    assert client.embed("Hi", dimensions=2) == Embedding(values=[0.5, -1.0], **read)
    assert (server.request.text, server.request.dimensions) == ("Hi", 2)
    server.answers[pb.ClassifyRequest] = pb.ClassifyResponse(values=[0.25, 0.75], label="yes", **own)
    assert client.classify([1, 2]) == Classification(values=[0.25, 0.75], label="yes", **read)
    server.answers[pb.ScoreRequest] = pb.ScoreResponse(scores=[0.5, 1.0], **own)
    assert client.score("a", ["b", "c"]) == Scores(values=[0.5, 1.0], **read)


def backwards(requests: Iterator[pb.EmbedRequest], _: Any) -> Iterator[pb.EmbedResponse]:
    """Answer in pairs, the second one first, with the length of the text."""
    for number, first in enumerate(requests):
        second = next(requests, None)
        if second is not None:
            yield pb.EmbedResponse(index=2 * number + 1, values=[len(second.text)], usage=USAGE)
        yield pb.EmbedResponse(index=2 * number, values=[len(first.text)], usage=USAGE)


def test_a_stream_of_any_length(client: Any, server: FakeServer) -> None:
    server.answers["embed"] = backwards
    lengths = [number % 9 for number in range(1001)]
    stream = client.stream_embed("x" * length for length in lengths)
    first = next(stream)
    assert (first.index, first.values, first.prompt_tokens) == (1, [1.0], 3)
    rest = stream.result()
    assert [one.index for one in rest] == [0, *range(2, 1001)]
    assert [one.values[0] for one in rest] == [0, *lengths[2:]]
    assert client.stream_embed([]).result() == []


def test_prompts_are_taken_as_the_server_asks(client: Any, server: FakeServer) -> None:
    taken = 0

    def prompts() -> Iterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield "x" * 65_536

    def slow(requests: Iterator[pb.EmbedRequest], context: grpc.ServicerContext) -> Iterator[pb.EmbedResponse]:
        next(requests)
        yield pb.EmbedResponse(values=[1.0])
        while context.is_active():
            server.cancelled.wait(0.01)

    server.answers["embed"] = slow
    with client.stream_embed(prompts()) as stream:
        next(stream)
        assert not server.cancelled.wait(0.3)
    assert taken < 200, "gRPC's buffers hold some megabytes"
    assert server.cancelled.wait(WAIT)


@pytest.mark.parametrize("bad", [7, ValueError("The file ended.")])
def test_a_prompt_that_cannot_be_sent_is_raised_after_those_before_it(
    client: Any, server: FakeServer, bad: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server.answers["embed"] = backwards

    def prompts() -> Iterator[Any]:
        yield from ("a", "b", "c")
        if isinstance(bad, Exception):
            raise bad
        yield bad

    stream = client.stream_embed(prompts())
    assert sorted(next(stream).index for _ in range(3)) == [0, 1, 2]
    with pytest.raises(ValueError, match="must be a text" if bad == 7 else "The file ended") as caught:
        next(stream)
    assert isinstance(caught.value, errors.UserError) == (bad == 7) and not caplog.records


def test_the_first_text_that_fails_ends_the_stream(client: Any, server: FakeServer) -> None:
    detail, status = Packed(), status_pb2.Status(code=CODE.INVALID_ARGUMENT.value[0], message="Input 2: too long")
    detail.Pack(violation("text"))
    status.details.append(detail)

    def third_fails(requests: Iterator[pb.EmbedRequest], context: Any) -> Iterator[pb.EmbedResponse]:
        for number, _ in enumerate(requests):
            failed = {"error": status.SerializeToString()} if number == 2 else {"values": [1.0]}
            yield pb.EmbedResponse(index=number, **failed)

    server.answers["embed"] = third_fails
    stream = client.stream_embed("x" for _ in iter(int, 1))
    assert [next(stream).index for _ in range(2)] == [0, 1]
    with pytest.raises(errors.UserError, match=r"^Input 2: too long$") as caught:
        next(stream)
    assert caught.value.parameter == "prompt"
    assert server.cancelled.wait(WAIT)
    assert stream.result() == []


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_a_stream_that_is_refused_says_why(connect: Callable[..., Any], server: FakeServer, count: int) -> None:
    server.answers["refusal"] = abort(CODE.UNAVAILABLE, "It drains.", reason("DRAINING"))
    client = connect(retries=False)
    for _ in range(20):
        with pytest.raises(errors.DrainingError, match=r"It drains\.$"):
            client.stream_embed("x" * 9999 for _ in range(count)).result()


async def test_prompts_may_come_asynchronously(running: tuple[FakeServer, str], server: FakeServer) -> None:
    server.answers["embed"] = backwards

    async def prompts() -> AsyncIterator[str]:
        for length in range(3):
            await asyncio.sleep(0.001)
            yield "x" * length
        raise ValueError("The queue has gone.")

    async with AsyncClient(running[1]) as client:
        stream = client.stream_embed(prompts())
        assert sorted([(await anext(stream)).values[0] for _ in range(3)]) == [0, 1, 2]
        with pytest.raises(ValueError, match="The queue has gone"):
            await anext(stream)
