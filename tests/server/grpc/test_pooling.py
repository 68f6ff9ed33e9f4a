"""Embedding, classifying and scoring over gRPC: requests, answers, and a stream's flow control."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import status_pb2

from jaxllm import errors
from jaxllm.model.pooler import Pooler
from jaxllm.v1 import inference_pb2 as pb
from jaxllm.v1 import types_pb2 as ty
from jaxllm.v1.inference_pb2_grpc import InferenceServiceStub
from jaxllm_server.grpc import error_details, pooling_messages
from jaxllm_server.pooling.pool_calls import PoolCall, PoolResult
from tests.server.grpc.test_messages import leaves, set_leaf
from tests.support.grpc_site import SOON, Site, details_in, drained, error_of, pooled, reason_of, site

SLOTS = 18  # concurrent texts of a stream: half of the places left in the fake engine


# Requests.


def outcome(request: Any) -> Any:
    try:
        call = pooling_messages.pool_call_of(request, request.request_id)
        return replace(call, inputs=list(call.inputs), pairs=call.pairs and list(call.pairs))
    except errors.UserError as error:
        return error_details.path_of(error.parameter or "", request)


FIELDS = [
    (kind, path) for kind in (pb.EmbedRequest, pb.ClassifyRequest, pb.ScoreRequest) for path in leaves(kind.DESCRIPTOR)
]


@pytest.mark.parametrize(("kind", "path"), FIELDS, ids=lambda value: ".".join(value) if type(value) is tuple else "")
def test_no_field_of_a_request_is_ignored(kind: Any, path: tuple[str, ...]) -> None:
    text = {"text_1": ["a"], "text_2": ["b"]} if kind is pb.ScoreRequest else {"text": "a"}
    plain, changed = kind(**text), kind(**text)
    set_leaf(changed, path)
    assert changed != plain
    assert outcome(changed) != outcome(plain)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (pb.EmbedRequest(text="a", normalize=False, dimensions=0), {"normalize": False, "dimensions": 0}),
        (pb.EmbedRequest(token_ids={"ids": [7, 8]}, priority=-1), {"inputs": [[7, 8]], "priority": -1}),
        (pb.ClassifyRequest(text="a", use_activation=False), {"task": "classify", "use_activation": False}),
        (pb.ScoreRequest(text_1=["a"], text_2=["b", "c"]), {"inputs": ["a", "a"], "pairs": ["b", "c"]}),
        (pb.ScoreRequest(text_1=["a", "d"], text_2=["b", "c"]), {"inputs": ["a", "d"], "pairs": ["b", "c"]}),
        (pb.ScoreRequest(text_1=["a", "b"], text_2=["c"]), "text_1"),
        (pb.ScoreRequest(text_2=["c"]), "text_1"),
        (pb.EmbedRequest(), "input"),
        (pb.ClassifyRequest(token_ids={"ids": [7]}, add_special_tokens=True), "add_special_tokens"),
        (pb.EmbedRequest.FromString(b"\xc8\x3e\x01"), ""),
    ],
)
def test_requests_become_calls_or_are_refused(asked: Any, expected: Any) -> None:
    told = outcome(asked)
    if isinstance(expected, str):
        assert told == expected
    else:
        task = "score" if isinstance(asked, pb.ScoreRequest) else "embed"
        assert told == PoolCall(**{"task": task, "inputs": ["a"], "request_id": "", **expected})


@pytest.mark.parametrize(
    ("asked", "parameter", "path"),
    [
        (pb.EmbedRequest(text="a"), "inputs", "text"),
        (pb.ClassifyRequest(token_ids=ty.TokenIds()), "inputs", "token_ids"),
        (pb.ScoreRequest(), "inputs", "text_1"),
        (pb.ScoreRequest(), "pairs", "text_2"),
        (pb.EmbedRequest(), "truncate_prompt_tokens", "truncate_prompt_tokens"),
    ],
)
def test_a_parameter_is_named_by_its_path(asked: Any, parameter: str, path: str) -> None:
    assert error_details.path_of(parameter, asked) == path


# Answers.


async def test_unary_answers(run: Any) -> None:
    async with site() as own, own.channel() as channel:
        pooler = Pooler("cls", labels=("no", "yes"), dimensions=(4, 8))
        own.serving.engine.model_info = replace(own.serving.engine.model, pooler=pooler, pooled_size=2)
        own.serving.tasks = ("classify",)
        stub = InferenceServiceStub(channel)
        call = stub.Embed(pb.EmbedRequest(text="abc", request_id="r1", model="alias"))
        one = await call
        assert (list(one.values), one.usage.prompt_tokens, one.request_id, one.model, one.index) == (
            *([3.0, 0.0], 3, "r1", "m", 0),
        )
        assert dict(await call.initial_metadata())["x-request-id"] == "r1"
        hinted = await stub.Embed(pb.EmbedRequest(text="a"), metadata=(("x-request-id", "hint"),))
        assert hinted.request_id == "hint"
        of_text = await stub.Classify(pb.ClassifyRequest(text="abc"))
        assert (list(of_text.values), of_text.label, len(of_text.request_id)) == ([3.0, 0.0], "no", 32)
        of_pairs = await stub.Score(pb.ScoreRequest(text_1=["a"], text_2=["bcd", "e", "fg"]))
        assert (list(of_pairs.scores), of_pairs.usage.prompt_tokens) == ([3.0, 1.0, 2.0], 9)
        model = (await stub.ListModels(pb.ListModelsRequest())).models[0]
        assert list(model.tasks) == ["classify"] and not model.HasField("default_sampling")
        assert model.pooling == pb.Pooling(size=2, takes_dimensions=True, dimensions=[4, 8], labels=["no", "yes"])
        assert [call.task for call in own.serving.pool_calls] == ["embed", "embed", "classify", "score"]
        assert all(call.client == "loopback" for call in own.serving.pool_calls) and own.serving.num_open == 0


async def test_an_id_that_the_metadata_propose_is_made_unique(run: Any) -> None:
    async def script(call: PoolCall) -> AsyncIterator[PoolResult]:
        async for result in pooled(call):
            yield result
            if call.request_id == "taken":  # in use by a concurrent call
                raise errors.RequestIdInUseError("request id 'taken' is in use.", "request_id")

    async with site() as own, own.channel() as channel:
        own.serving.pool_script, stub = script, InferenceServiceStub(channel)
        made = await stub.Embed(pb.EmbedRequest(text="a"), metadata=(("x-request-id", "taken"),))
        assert made.request_id.startswith("taken-")
        pairs = pb.ScoreRequest(text_1=["a"], text_2=["bcd", "e", "fg"])
        assert list((await stub.Score(pairs, metadata=(("x-request-id", "taken"),))).scores) == [3.0, 1.0, 2.0]
        error = await error_of(stub.Embed(pb.EmbedRequest(text="a", request_id="taken")))
        assert reason_of(error) == "REQUEST_ID_IN_USE"


# Streams.


async def streamed(own: Site, requests: Any, **options: Any) -> list[pb.EmbedResponse]:
    async with own.channel(**options) as channel:
        return await drained(InferenceServiceStub(channel).StreamEmbed(requests))


def texts(count: int) -> Iterable[pb.EmbedRequest]:
    return [pb.EmbedRequest(text="x" * (i % 7 + 1), request_id=f"r{i}" if i % 2 else "") for i in range(count)]


async def test_a_stream_answers_each_request_once_in_any_order(run: Any) -> None:
    async def script(call: PoolCall) -> AsyncIterator[PoolResult]:
        await asyncio.sleep(0.002 * (len(call.inputs[0]) % 3))
        async for result in pooled(call):
            yield result

    async with site() as own:
        own.serving.pool_script = script
        answers = await streamed(own, texts(200))
        assert [answer.index for answer in answers] != sorted(range(200))
        for answer in answers:
            assert list(answer.values) == [answer.index % 7 + 1, 0]
            assert answer.request_id == (f"r{answer.index}" if answer.index % 2 else "")
        assert sorted(answer.index for answer in answers) == list(range(200))
        assert own.serving.num_open == 0 and [code for *_, code in own.observer.handled] == ["OK"]
        assert await streamed(own, []) == []


async def test_a_stream_is_read_as_there_is_room(run: Any) -> None:
    """Texts are not queued while the engine is slow, nor vectors while the client does not read."""
    gate, most, asked = asyncio.Event(), 0, 0

    async def script(call: PoolCall) -> AsyncIterator[PoolResult]:
        nonlocal most
        most = max(most, own.serving.num_open)
        await gate.wait()
        yield PoolResult(0, np.zeros(65_536, np.float32), 3)

    async def requests() -> AsyncIterator[pb.EmbedRequest]:
        nonlocal asked
        for _ in range(400):
            asked += 1
            yield pb.EmbedRequest(text="a" * 65_536)

    async with site() as own, own.channel() as channel:
        own.serving.pool_script = script
        stream = InferenceServiceStub(channel).StreamEmbed(requests())
        async with asyncio.timeout(SOON):
            while own.serving.num_open < SLOTS:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
        assert most == SLOTS and asked < 200  # gRPC's own buffers hold some megabytes
        gate.set()
        await asyncio.sleep(0.3)
        assert len(own.serving.pool_calls) < 200, "no more is computed than was read"
        assert len(await drained(stream)) == 400 and most == SLOTS


async def test_a_stream_waits_where_a_call_is_refused(run: Any) -> None:
    """A stream waits where a single call is refused: at a full queue, or at the client's limit of sequences."""
    full = 5

    async def script(call: PoolCall) -> AsyncIterator[PoolResult]:
        nonlocal full
        full -= 1
        if full >= 0:
            raise errors.OverloadedError("The queue is full.", retry_after=0.01)
        assert own.serving.num_open <= 3
        await asyncio.sleep(0.001)
        async for result in pooled(call):
            yield result

    async with site(max_sequences_per_client=3) as own:
        own.serving.pool_script = script
        assert len(await streamed(own, texts(40))) == 40
        assert len(own.serving.pool_calls) == 45


async def fail_bad(error: BaseException, call: PoolCall) -> AsyncIterator[PoolResult]:
    if call.inputs[0] == "bad":
        raise error
    async for result in pooled(call):
        yield result


MIXED = [pb.EmbedRequest(text=text, request_id=text) for text in ("a", "bad", "b", "", "c")] + [pb.EmbedRequest()]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.ContextLengthError("It is long.", 9, 8, "inputs"), "CONTEXT_LENGTH_EXCEEDED"),
        (errors.FeatureDisabledError("It generates.", "model"), "FEATURE_DISABLED"),
        (errors.RequestFailedError("It failed."), "ENGINE_ERROR"),
    ],
)
async def test_a_text_that_fails_is_an_answer(run: Any, error: Exception, reason: str) -> None:
    async with site() as own:
        own.serving.pool_script = functools.partial(fail_bad, error)
        answers = {answer.index: answer for answer in await streamed(own, MIXED)}
        assert [bool(answers[index].error) for index in range(6)] == [False, True, False, False, False, True]
        assert not answers[1].values and answers[1].request_id == "bad"
        for index, why, said, field in ((1, reason, str(error), "text"), (5, "INVALID_PARAMETER", "no input", "input")):
            status = status_pb2.Status.FromString(answers[index].error)
            details = details_in(status)
            assert details["ErrorInfo"].reason == why and status.message.startswith(f"Input {index}: ")
            assert said.removeprefix("Input 1: ") in status.message
            assert "BadRequest" not in details or details["BadRequest"].field_violations[0].field == field


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (errors.EngineDeadError("It died."), "UNAVAILABLE", "It died."),
        (ValueError("secret"), "INTERNAL", "The server failed"),
        (asyncio.CancelledError("secret"), "INTERNAL", "An input was not answered."),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_what_is_of_no_single_text_ends_the_stream(run: Any, error: BaseException, code: str, said: str) -> None:
    async def script(call: PoolCall) -> AsyncIterator[PoolResult]:
        if call.inputs[0] == "b" and not isinstance(error, asyncio.CancelledError):
            await asyncio.sleep(60)
        async for result in fail_bad(error, call):
            yield result

    async with site() as own:
        own.serving.pool_script = script
        # Last: a call that ends while the client writes gets a status from gRPC itself ("Internal error from Core").
        bad_is_last = [pb.EmbedRequest(text=text) for text in ("a", "b", "bad")]
        failed = await error_of(streamed(own, bad_is_last))
        assert failed.code() == grpc.StatusCode[code] and (failed.details() or "").startswith(said)
        await own.serving.closed()


async def test_a_stream_is_accepted_before_anything_is_sent(run: Any) -> None:
    async with site() as own, own.channel() as channel:
        stream = InferenceServiceStub(channel).StreamEmbed(never(), metadata=(("x-request-id", "mine"),))
        assert dict(await stream.initial_metadata())["x-request-id"] == "mine"
        stream.cancel()


async def never() -> AsyncIterator[pb.EmbedRequest]:
    yield pb.EmbedRequest(text="a")
    await asyncio.sleep(3600)


async def test_a_stream_whose_next_request_does_not_come(run: Any) -> None:
    async with site(stall_timeout=0.2) as own:
        began = time.monotonic()
        failed = await error_of(streamed(own, never()))
        assert failed.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert 0.2 <= time.monotonic() - began < SOON


@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "not read"])
async def test_a_stream_that_ends_early_ends_what_runs(run: Any, is_cancelled: bool) -> None:
    async def script(call: PoolCall) -> AsyncIterator[PoolResult]:
        if len(own.serving.pool_calls) > 200:
            await asyncio.sleep(3600)
        yield PoolResult(0, np.zeros(65_536, np.float32), 3)

    async with site(stall_timeout=0.3) as own, own.channel(**{"grpc.max_receive_message_length": -1}) as channel:
        own.serving.pool_script = script
        stream = InferenceServiceStub(channel).StreamEmbed(texts(400))
        await own.serving.started.wait()
        if is_cancelled:
            stream.cancel()
        else:
            await asyncio.sleep(0.6)  # twice the time that a stream has
        await own.serving.closed()
        if not is_cancelled:
            assert reason_of(await error_of(drained(stream))) == "SLOW_CONSUMER"
        await own.handled(1)
        assert [code for *_, code in own.observer.handled] == ["CANCELLED" if is_cancelled else "RESOURCE_EXHAUSTED"]
