"""Answers, errors, authentication and ends of gRPC calls, over real loopback with a fake `Serving`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxllm import errors
from jaxllm.engine.kv_events import BlockBatch
from jaxllm.scheduler.state import BlockStored
from jaxllm.v1 import control_pb2, control_pb2_grpc, types_pb2
from jaxllm.v1 import inference_pb2 as pb
from jaxllm.v1.inference_pb2_grpc import InferenceServiceStub
from jaxllm_server.access.auth import Keys
from jaxllm_server.generation.calls import Call, Chunk
from jaxllm_server.grpc.replies import kv_events_of
from jaxllm_server.grpc.server import INFERENCE
from jaxllm_server.grpc.service import InferenceService
from jaxllm_server.shared.options import ServerOptions
from tests.server.grpc.test_messages import ERRORS
from tests.support.grpc_site import (
    NOT_SERVING,
    SOON,
    ScriptedServing,
    Site,
    answer,
    ask,
    bearer,
    chunk,
    details_of,
    drained,
    error_of,
    failing,
    reason_of,
    silent,
    site,
)

# Answers.


async def test_a_stream_and_a_unary_answer(run: Any) -> None:
    async with site(answer) as own, own.channel() as channel:
        stub = InferenceServiceStub(channel)
        unary = stub.Generate(ask(request_id="r1"))
        whole = await unary
        assert dict(await unary.initial_metadata())["x-request-id"] == whole.request_id == "r1"
        assert (whole.model, whole.outputs[0].text, whole.prompt.token_count) == ("m", "one two", 3)
        stream = stub.StreamGenerate(ask(model="alias"))
        messages = await drained(stream)
        assert [message.deltas[0].text for message in messages] == ["one", "two"]
        assert messages[0].model == "m" and messages[0].prompt.cached_token_count == 1
        assert len(messages[0].request_id) == 32  # made by the server
        assert dict(await stream.initial_metadata())["x-request-id"] == messages[0].request_id
        assert messages[-1].usage.completion_tokens == 2 and messages[-1].timing.total.ToMilliseconds() == 400
        assert [call.stream for call in own.serving.calls] == [False, True]
        routes = [f"/{INFERENCE}/Generate", f"/{INFERENCE}/StreamGenerate"]
        assert own.observer.handled == [("grpc", route, "OK") for route in routes]
        assert own.serving.num_open == 0


async def test_nothing_is_sent_before_the_first_tokens(run: Any) -> None:
    """The server sends not even headers before the first tokens: gRPC clients retry a stream only until then."""
    attempts: list[Call] = []

    def script(call: Call) -> AsyncIterator[Chunk]:
        attempts.append(call)
        full = errors.OverloadedError("The queue is full.", retry_after=0.1)
        return failing(full) if len(attempts) < 3 else answer(call)

    retry = {
        **{"maxAttempts": 4, "initialBackoff": "5s", "maxBackoff": "5s", "backoffMultiplier": 1},
        "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
    }
    config = json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": retry}]})
    async with site(script) as own, own.channel(**{"grpc.service_config": config}) as channel:
        began = time.monotonic()
        messages = await drained(InferenceServiceStub(channel).StreamGenerate(ask()))
        assert len(messages) == 2 and len(attempts) == 3
        assert 0.2 <= time.monotonic() - began < 2.0  # twice the server's hint, not the client's own 5 s


async def test_ids(run: Any) -> None:
    """The id is the field, else the metadata's proposal, made unique if in use; else one from the server."""
    live: set[str] = {"taken"}

    async def script(call: Call) -> AsyncIterator[Chunk]:
        if call.request_id in live:
            raise errors.RequestIdInUseError(f"request id {call.request_id!r} is in use.", "request_id")
        async for own in answer(call):
            yield own

    async with site(script) as own, own.channel() as channel:
        stub = InferenceServiceStub(channel)
        taken = (("x-request-id", "taken"),)
        assert (await stub.Generate(ask(), metadata=(("x-request-id", "free"),))).request_id == "free"
        assert (await stub.Generate(ask(request_id="mine"), metadata=taken)).request_id == "mine"
        made = (await stub.Generate(ask(), metadata=taken)).request_id
        assert made.startswith("taken-") and len(made) > len("taken-")
        assert (await drained(stub.StreamGenerate(ask(), metadata=taken)))[0].request_id.startswith("taken-")
        long = "l" * own.serving.options.max_request_id_chars
        live.add(long)
        made = (await stub.Generate(ask(), metadata=(("x-request-id", long),))).request_id
        assert made not in live and len(made) == len(long) and made.startswith("lll")
        error = await error_of(stub.Generate(ask(request_id="taken")))
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_IN_USE")
        assert own.serving.num_open == 0


async def test_the_other_calls(run: Any) -> None:
    async with site() as own, own.channel() as channel:
        stub = InferenceServiceStub(channel)
        tokens = await stub.Tokenize(pb.TokenizeRequest(text="abc", add_special_tokens=False))
        assert list(tokens.token_ids) == [0, 1, 2] and tokens.max_model_len == 128
        assert own.serving.calls[0].add_special_tokens is False
        chat = types_pb2.ChatPrompt(messages=[types_pb2.ChatMessage(role="user", content="x")])
        await stub.Tokenize(pb.TokenizeRequest(chat=chat))
        assert own.serving.calls[1].messages == [{"role": "user", "content": "x"}]
        assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=[4, 5]))).text == "4 5"
        model = (await stub.ListModels(pb.ListModelsRequest())).models[0]
        assert (model.name, list(model.aliases), list(model.eos_token_ids)) == ("m", ["alias"], [2, 5])
        assert list(model.tasks) == ["generate"] and not model.HasField("pooling")
        assert model.default_sampling.temperature == 0.6 and model.has_chat and not model.has_tool_calls
        assert not model.default_stop.HasField("max_tokens")
        own.serving.engine.model.tokenizer.has_chat_template = False
        assert not (await stub.ListModels(pb.ListModelsRequest())).models[0].has_chat
        error = await error_of(stub.Detokenize(pb.DetokenizeRequest(model="no")))
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")


async def test_the_revision_counts_what_the_proto_files_declare(run: Any) -> None:
    texts = [path.read_text() for path in (Path(__file__).parents[3] / "proto/jaxllm/v1").glob("*.proto")]
    declared = sum(len(re.findall(r"^  rpc |= \d+;", text, re.MULTILINE)) for text in texts)
    async with site() as own, own.channel() as channel:
        info = await control_pb2_grpc.ControlServiceStub(channel).GetServerInfo(control_pb2.GetServerInfoRequest())
    assert info.api_revision == declared > 300


async def test_the_control_service(run: Any) -> None:
    async with site() as own, own.channel() as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        info = await stub.GetServerInfo(control_pb2.GetServerInfoRequest())
        assert info.state == control_pb2.SERVER_STATE_SERVING and info.kv_blocks_total == 99
        assert info.mesh["tp"] == 2 and info.dtype == "float32" and list(info.model_names) == ["m", "alias"]
        own.serving.engine.state = "loading"
        loading = await stub.GetServerInfo(control_pb2.GetServerInfoRequest())
        assert loading.state == control_pb2.SERVER_STATE_LOADING and loading.max_model_len == 0
        assert loading.instance_id == info.instance_id and loading.start_time == info.start_time
        load = await stub.GetLoad(control_pb2.GetLoadRequest())
        assert (load.running, load.waiting, load.waiting_prompt_tokens_uncached, load.max_running) == (1, 2, 3, 8)
        assert load.step_time.ToMilliseconds() == 500 and abs(load.snapshot_time.seconds - time.time()) < 60
        await stub.Abort(control_pb2.AbortRequest(request_ids=["a", "b"]))
        assert own.serving.engine.aborted == ["a", "b"]
        assert (await stub.ResetPrefixCache(control_pb2.ResetPrefixCacheRequest())).was_reset
        keep = control_pb2.PauseGenerationRequest(mode=control_pb2.PAUSE_MODE_KEEP, clear_cache=False)
        await stub.PauseGeneration(keep)
        assert own.serving.engine.paused == ("keep", False)
        await stub.PauseGeneration(control_pb2.PauseGenerationRequest(mode=control_pb2.PAUSE_MODE_KEEP))
        assert own.serving.engine.paused == ("keep", False)
        own.serving.engine.paused = None
        keep.clear_cache = True
        error = await error_of(stub.PauseGeneration(keep))
        assert details_of(error)["BadRequest"].field_violations[0].field == "clear_cache"
        assert own.serving.engine.paused is None
        await stub.PauseGeneration(control_pb2.PauseGenerationRequest())
        assert own.serving.engine.paused == ("abort", True)
        await stub.ResumeGeneration(control_pb2.ResumeGenerationRequest())
        assert own.serving.engine.paused is None
        unknown = control_pb2.PauseGenerationRequest(mode=99)  # pyright: ignore[reportArgumentType]
        assert (await error_of(stub.PauseGeneration(unknown))).code() == grpc.StatusCode.INVALID_ARGUMENT
        for call, request in (
            (stub.LoadAdapter, control_pb2.LoadAdapterRequest(name="a")),
            (stub.UnloadAdapter, control_pb2.UnloadAdapterRequest(name="a")),
        ):
            error = await error_of(call(request))
            assert (error.code(), reason_of(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "FEATURE_DISABLED")
        assert not (await stub.ListAdapters(control_pb2.ListAdaptersRequest())).adapters


async def test_adapters(run: Any, tmp_path: Path) -> None:
    for name in ("a", "bad"):
        (tmp_path / name).mkdir()
    async with site(lora_root=str(tmp_path)) as own, own.channel() as channel:
        control, inference = control_pb2_grpc.ControlServiceStub(channel), InferenceServiceStub(channel)
        await control.LoadAdapter(control_pb2.LoadAdapterRequest(name="poet", source="a"))
        (adapter,) = (await control.ListAdapters(control_pb2.ListAdaptersRequest())).adapters
        assert (adapter.name, adapter.source, adapter.rank) == ("poet", "a", 8)
        assert (await control.GetLoad(control_pb2.GetLoadRequest())).adapters == ["poet"]
        base, model = (await inference.ListModels(pb.ListModelsRequest())).models
        assert (base.name, base.parent, model.name, model.parent) == ("m", "", "poet", "m")
        assert not model.aliases and list(model.eos_token_ids) == [2] and model.has_chat
        assert model.default_sampling == base.default_sampling and model.max_model_len == base.max_model_len
        answers = [await inference.Generate(ask(**by)) for by in ({"adapter": "poet"}, {"model": "poet"}, {})]
        assert [answer.model for answer in answers] == ["poet", "poet", "m"]
        assert [(call.adapter, call.model) for call in own.serving.calls] == [("poet", ""), ("", "poet"), ("", "")]
        await control.LoadAdapter(control_pb2.LoadAdapterRequest(name="poet", source="a", load_inplace=True))
        for request, field in (
            (control_pb2.LoadAdapterRequest(name="poet", source="a"), "name"),
            (control_pb2.LoadAdapterRequest(name="x", source="bad"), "source"),
            (control_pb2.LoadAdapterRequest(name="x"), "source"),
        ):
            error = await error_of(control.LoadAdapter(request))
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert details_of(error)["BadRequest"].field_violations[0].field == field
        await control.UnloadAdapter(control_pb2.UnloadAdapterRequest(name="poet"))
        for call in (
            control.UnloadAdapter(control_pb2.UnloadAdapterRequest(name="poet")),
            control.LoadAdapter(control_pb2.LoadAdapterRequest(name="x", source="b")),
            inference.Generate(ask(adapter="poet")),
        ):
            error = await error_of(call)
            assert (error.code(), reason_of(error)) == (grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND")


def test_kv_events_of_several_adapters_are_several_events() -> None:
    stored = [BlockStored(bytes([own]) * 32, None, (own,), adapter) for own, adapter in enumerate([0, 0, 7, 7, 5])]
    sent = kv_events_of(BlockBatch(1, 1.0, 4, tuple(stored), {7: "poet", 5: "bard"})).events
    assert [(event.stored.adapter, len(event.stored.blocks)) for event in sent] == [("", 2), ("poet", 2), ("bard", 1)]


async def test_kv_events(run: Any) -> None:
    async with site() as own, own.channel() as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        (batch,) = await drained(stub.StreamKvEvents(control_pb2.StreamKvEventsRequest(start_sequence=3)))
        assert batch.sequence == 3 and batch.time.ToMilliseconds() == 1500
        assert [event.WhichOneof("event") for event in batch.events] == ["cleared", "stored", "stored", "removed"]
        first, second = batch.events[1].stored.blocks
        assert (first.hash, list(first.token_ids), batch.events[1].stored.block_size) == (1, [1, 2], 2)
        assert not first.HasField("parent_hash") and (second.hash, second.parent_hash) == (2**64 - 1, 1)
        assert [event.stored.adapter for event in batch.events[1:3]] == ["", "pirate"]
        assert list(batch.events[3].removed.hashes) == [2**64 - 1, 0]
        error = await error_of(drained(stub.StreamKvEvents(control_pb2.StreamKvEventsRequest(start_sequence=8))))
        assert error.code() == grpc.StatusCode.OUT_OF_RANGE
        assert details_of(error)["BadRequest"].field_violations[0].field == "start_sequence"


# Errors.

UNFORESEEN = [ValueError("secret /home/x"), errors.EngineError("secret"), KeyError("secret")]
UNFORESEEN.append(asyncio.CancelledError("secret"))  # not ours: the client must not hang
FAILURES = [
    *(row[:3] for row in ERRORS[:7:3]),
    *((error, "INTERNAL", "ENGINE_ERROR") for error in UNFORESEEN),
]  # all: test_messages


@pytest.mark.parametrize(("error", "code", "reason"), FAILURES, ids=lambda value: getattr(value, "__name__", None))
async def test_exceptions_become_statuses(
    run: Any, caplog: pytest.LogCaptureFixture, error: Exception, code: str, reason: str
) -> None:
    for after in (0, 1):
        script = functools.partial(failing, error, after)
        async with site(lambda _, script=script: script()) as own, own.channel() as channel:
            stub = InferenceServiceStub(channel)
            stream = stub.StreamGenerate(ask(request_id="r1"))
            messages = []
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for message in stream:
                    messages.append(message)
            told = [caught.value]
            assert len(messages) == after  # tokens generated before the error are delivered
            if after == 0:
                told.append(await error_of(stub.Generate(ask(request_id="r1"))))
            for own_error in told:
                details = details_of(own_error)
                assert own_error.code() == grpc.StatusCode[code]
                assert (details["ErrorInfo"].reason, details["ErrorInfo"].domain) == (reason, "jaxllm")
                assert details["ErrorInfo"].metadata["request_id"] == "r1"
                assert "secret" not in repr(own_error)
                trailers = dict(own_error.trailing_metadata() or ())
                assert trailers["x-request-id"] == "r1"
                assert trailers.get("grpc-retry-pushback-ms") == ("1500" if reason == "QUEUE_FULL" else None)
            assert own.serving.num_open == 0
            await own.handled(len(told))
            assert [handled[2] for handled in own.observer.handled] == [code] * len(told)
    is_unforeseen = code == "INTERNAL" and not isinstance(error, errors.EngineError)
    assert bool([record for record in caplog.records if record.exc_info]) == is_unforeseen
    assert (str(error) in caplog.text) == (code == "INTERNAL")


async def test_a_unary_call_has_one_message(run: Any) -> None:
    async with site() as own, own.channel() as channel:
        for messages in ([], [ask(), ask()]):
            raws = iter([message.SerializeToString() for message in messages])
            error = await error_of(drained(channel.stream_stream(f"/{INFERENCE}/Generate")(raws)))
            assert (error.code(), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER")
        assert own.serving.calls == []


async def test_a_message_that_does_not_come(run: Any) -> None:
    async with site(answer, max_rpcs=1, stall_timeout=0.2) as own, own.channel() as channel:
        began = time.monotonic()
        waiting = drained(channel.stream_stream(f"/{INFERENCE}/Generate")(endless()))
        error = await error_of(waiting)
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
        assert 0.2 <= time.monotonic() - began < SOON and "message was not received" in (error.details() or "")
        assert (await InferenceServiceStub(channel).Generate(ask())).outputs  # its place is free
        gone = channel.stream_stream(f"/{INFERENCE}/Generate")(endless())
        await asyncio.sleep(0.1)
        gone.cancel()
        await own.handled(3)
        assert [code for _, _, code in own.observer.handled] == ["DEADLINE_EXCEEDED", "OK", "CANCELLED"]


async def test_an_id_that_no_header_can_hold(run: Any) -> None:
    def script(call: Call) -> AsyncIterator[Chunk]:
        return failing(errors.UserError("request_id is bad.", "request_id"))

    async with site(script) as own, own.channel() as channel:
        for bad in ("a\nb", "é", "\0", "x" * 100_000):
            error = await error_of(InferenceServiceStub(channel).Generate(ask(request_id=bad)))
            assert (error.code(), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER")


# Authentication.


async def test_who_has_no_key_is_counted_and_waited_for_by_nobody(run: Any) -> None:
    """test_error_map and hostile/test_auth test every call with every kind of key."""
    async with site(answer, Keys(["user"], ["admin"])) as own, own.channel() as channel:
        stub, control = InferenceServiceStub(channel), control_pb2_grpc.ControlServiceStub(channel)
        await drained(stub.StreamGenerate(ask(), metadata=bearer("admin")))
        assert reason_of(await error_of(stub.Generate(ask()))) == "AUTH_MISSING"
        load = control.GetLoad(control_pb2.GetLoadRequest(), metadata=bearer("user"))
        assert reason_of(await error_of(load)) == "ADMIN_REQUIRED"
        for name in ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"):
            # No request is sent: a call without a key is refused at once.
            error = await error_of(drained(channel.stream_stream(f"/{name}/ServerReflectionInfo")(endless())))
            assert error.code() == grpc.StatusCode.UNAUTHENTICATED
        assert len(own.serving.calls) == 1
        await own.handled(5)
        assert {code for _, _, code in own.observer.handled} == {"OK", "UNAUTHENTICATED", "PERMISSION_DENIED"}


async def endless() -> AsyncIterator[bytes]:
    await asyncio.sleep(3600)
    yield b""


async def test_more_calls_than_the_bound(run: Any) -> None:
    async with site(lambda call: silent(), max_rpcs=3) as own, own.channel() as channel:
        stub, health = InferenceServiceStub(channel), health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        streams = [stub.StreamGenerate(ask()) for _ in range(3)]
        async with asyncio.timeout(SOON):
            while own.serving.num_open < 3:
                await asyncio.sleep(0.001)
        began = time.monotonic()
        error = await error_of(stub.Generate(ask()))
        assert time.monotonic() - began < 1.0
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert dict(error.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "1000"
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
        streams[0].cancel()
        async with asyncio.timeout(SOON):
            while own.serving.num_open == 3:
                await asyncio.sleep(0.001)
        own.serving.script = answer
        assert (await stub.Generate(ask())).outputs[0].text == "one two"
        watch.cancel()


async def test_traces_go_on(run: Any) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with site(answer) as own, own.channel() as channel:
        stub = InferenceServiceStub(channel)
        await stub.Generate(ask(), metadata=(("traceparent", parent),))
        own.serving.script = lambda call: failing(errors.UnavailableError("no."))
        await error_of(drained(stub.StreamGenerate(ask())))
        await own.handled(2)  # a client may see the end before the server's handler returns
        first, second = own.tracer.spans
        assert (first.traceparent, first.name, first.error) == (parent, f"{INFERENCE}/Generate", None)
        assert second.traceparent is None and isinstance(second.error, errors.UnavailableError)


# Ends of calls.


@pytest.mark.parametrize(("method", "after"), [("Generate", 0), ("StreamGenerate", 0), ("StreamGenerate", 1)])
async def test_a_cancelled_call_closes_its_request(run: Any, method: str, after: int) -> None:
    async with site(lambda call: silent(after)) as own, own.channel() as channel:
        for i in range(20):
            own.serving.started.clear()
            call = getattr(InferenceServiceStub(channel), method)(ask())
            for _ in range(after):
                await call.read()
            await own.serving.started.wait()
            call.cancel()
            await own.serving.closed()
            await own.handled(i + 1)
        assert {code for _, _, code in own.observer.handled} == {"CANCELLED"}


async def test_a_call_cancelled_at_once(run: Any) -> None:
    """Cancel before, while and after the call reaches the server."""
    async with site(lambda call: silent(1)) as own, own.channel() as channel:
        await channel.channel_ready()
        for i in range(100):
            call = InferenceServiceStub(channel).StreamGenerate(ask())
            await asyncio.sleep(i * 2e-5)
            call.cancel()
        await asyncio.sleep(0.05)
        await own.serving.closed()
        own.serving.script = answer
        assert (await InferenceServiceStub(channel).Generate(ask())).outputs


async def test_a_deadline_that_is_over_at_admission(run: Any) -> None:
    class Late:
        def time_remaining(self) -> float:
            return 0.0

    serving: Any = ScriptedServing(ServerOptions())
    context: Any = Late()
    with pytest.raises(errors.DeadlineError):
        await InferenceService(serving, 1.0, Keys()).Generate(ask(), context)
    assert serving.calls == []


async def flood(call: Call) -> AsyncIterator[Chunk]:
    """Send more than every buffer between the two ends holds."""
    for i in range(200):
        yield chunk("x" * 262_144, is_first=i == 0)


@contextlib.asynccontextmanager
async def flooded(**options: Any) -> AsyncIterator[tuple[Site, Any]]:
    """Start a stream of more data than the buffers hold; yield the site and the stream, still unread."""
    async with site(flood, **options) as own, own.channel(**{"grpc.max_receive_message_length": -1}) as channel:
        stream = InferenceServiceStub(channel).StreamGenerate(ask())
        await own.serving.started.wait()
        yield own, stream


async def test_a_reader_that_stalls_is_let_go(run: Any) -> None:
    async with flooded(stall_timeout=0.3) as (own, stream):
        began = time.monotonic()
        await own.serving.closed()  # its blocks are free, whatever the client does
        assert 0.25 < time.monotonic() - began < SOON
        messages = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for message in stream:
                messages.append(message)
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (caught.value.code(), reason_of(caught.value)) == (code, "SLOW_CONSUMER")
        assert 0 < len(messages) < 200
        await own.handled(1)
        assert [code for _, _, code in own.observer.handled] == ["RESOURCE_EXHAUSTED"]


async def test_a_slow_reader_that_reads_is_kept(run: Any) -> None:
    async with flooded(stall_timeout=0.5) as (_, stream):
        count = 0
        while (await stream.read()) is not grpc.aio.EOF:
            count += 1
            await asyncio.sleep(0.12 if count % 20 == 0 else 0)  # 1.2 s in all, but no write waits so long
        assert count == 200


async def test_without_a_timeout_no_reader_is_let_go(run: Any) -> None:
    async with flooded(stall_timeout=0) as (own, stream):
        await asyncio.sleep(0.3)  # blocked by now
        assert len(await drained(stream)) == 200
        await own.handled(1)
        assert [code for _, _, code in own.observer.handled] == ["OK"]


async def test_a_client_cancels_while_a_write_is_blocked(run: Any) -> None:
    async with flooded() as (own, stream):
        await asyncio.sleep(0.2)  # blocked by now
        assert own.serving.num_open == 1
        stream.cancel()
        await own.serving.closed()
        await own.handled(1)
        assert [code for _, _, code in own.observer.handled] == ["CANCELLED"]
