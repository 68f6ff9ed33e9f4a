"""The gRPC server as a server: bursts, pings, ports, TLS, health, reflection, stopping. Real loopback, no engine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import grpc.aio
import pytest
from google.protobuf.empty_pb2 import Empty
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxllm import errors
from jaxllm.v1 import inference_pb2 as pb
from jaxllm.v1.inference_pb2_grpc import InferenceServiceStub
from jaxllm_server.access.auth import Keys
from jaxllm_server.access.sockets import check_uds
from jaxllm_server.generation.calls import Call, Chunk
from jaxllm_server.grpc.server import CONTROL, INFERENCE
from tests.support.certificates import credentials
from tests.support.grpc_site import (
    NOT_SERVING,
    SERVING,
    SOON,
    Site,
    answer,
    ask,
    bearer,
    drained,
    error_of,
    reason_of,
    silent,
    site,
    words,
)
from tests.support.host_names import resolve, with_ipv6

BUF = Path(sys.executable).with_name("buf")
with_and_without_filter = pytest.mark.parametrize("grpc_filter", [False, pytest.param(True, marks=pytest.mark.ci)])


# Bursts and connections.


@pytest.mark.parametrize(("max_rpcs", "grpc_filter"), [(10_000, True), (64, False)])
@pytest.mark.ci
async def test_a_burst_of_calls_all_get_a_status(run: Any, max_rpcs: int, grpc_filter: bool) -> None:
    async def script(call: Call) -> AsyncIterator[Chunk]:
        await asyncio.sleep(0.2)  # so that all of them are there at once
        async for own in answer(call):
            yield own

    async with site(script, max_rpcs=max_rpcs, grpc_filter=grpc_filter) as own, own.channel() as channel:
        stub = InferenceServiceStub(channel)
        unary = [stub.Generate(ask()) for _ in range(1500)]
        streams = [drained(stub.StreamGenerate(ask())) for _ in range(1500)]
        results = await asyncio.gather(*unary, *streams, return_exceptions=True)
        refused = [own for own in results if isinstance(own, grpc.aio.AioRpcError)]
        assert all(reason_of(error) == "QUEUE_FULL" for error in refused)
        assert bool(refused) == (max_rpcs == 64)
        texts = {
            own.outputs[0].text if isinstance(own, pb.GenerateResponse) else " ".join(m.deltas[0].text for m in own)
            for own in results
            if not isinstance(own, BaseException)
        }
        assert texts == {"one two"}
        assert len(refused) + sum(not isinstance(own, BaseException) for own in results) == 3000
        await own.handled(3000)
        assert own.serving.num_open == 0 and len(own.observer.handled) == 3000


@pytest.mark.ci
async def test_pings_during_a_silent_call_are_no_offence(run: Any) -> None:
    """With gRPC's defaults the fourth ping without traffic ends the connection; clients ping once a second at most."""
    pings = {
        **{"grpc.keepalive_time_ms": 1000, "grpc.keepalive_permit_without_calls": 1},
        **{"grpc.http2.max_pings_without_data": 0, "grpc.keepalive_timeout_ms": 5000},
    }
    async with site(lambda call: words("late", wait=4.5)) as own, own.channel(**pings) as channel:
        assert (await InferenceServiceStub(channel).Generate(ask())).outputs[0].text == "late"


@with_and_without_filter
async def test_a_port_that_is_taken(run: Any, grpc_filter: bool) -> None:
    async with site(grpc_filter=grpc_filter) as own:
        with pytest.raises(errors.UserError, match="already in use") as caught:
            async with site(grpc_filter=grpc_filter, grpc_port=own.server.port):
                pass
        assert caught.value.parameter == "grpc_port" and str(own.server.port) in str(caught.value)
    with pytest.raises(errors.UserError, match=r"192\.0\.2\.1"):
        async with site(grpc_filter=grpc_filter, host="192.0.2.1"):
            pass


@with_ipv6
async def test_it_answers_at_every_address_of_a_host_name(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as names:
        resolve(names, "127.0.0.1", "::1")
        server = site(answer, grpc_filter=True, host="a.name")
        own = await server.__aenter__()
    try:
        for host in ("127.0.0.1", "[::1]"):
            async with grpc.aio.insecure_channel(f"{host}:{own.server.port}") as channel:
                assert (await InferenceServiceStub(channel).Generate(ask())).outputs[0].text == "one two"
    finally:
        await server.__aexit__(None, None, None)
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as late:
            assert late.connect_ex((host, own.server.port)) == errno.ECONNREFUSED


@with_and_without_filter
async def test_a_unix_socket(run: Any, tmp_path: Path, grpc_filter: bool) -> None:
    path = tmp_path / "s"
    async with site(answer, grpc_uds=str(path), grpc_filter=grpc_filter) as own, own.channel() as channel:
        assert own.server.port is None and path.stat().st_mode & 0o777 == 0o700
        assert (await InferenceServiceStub(channel).Generate(ask())).outputs[0].text == "one two"
        with pytest.raises(errors.UserError, match="another server"):
            async with site(grpc_uds=str(path), grpc_filter=grpc_filter):
                pass
        assert (await InferenceServiceStub(channel).Generate(ask())).outputs[0].text == "one two"
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))  # left over by a process that was killed
    async with site(answer, grpc_uds=str(path), grpc_filter=grpc_filter) as own, own.channel() as channel:
        # Channels of one process share what they know of an address, here that the server before has gone.
        unary = InferenceServiceStub(channel).Generate(ask(), wait_for_ready=True)
        assert (await unary).outputs[0].text == "one two"
    with pytest.raises(errors.UserError, match="folder is missing"):
        async with site(grpc_uds=str(tmp_path / "none" / "s"), grpc_filter=grpc_filter):
            pass


def test_only_a_socket_that_nobody_answers_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    check_uds(str(path), "uds")  # nothing there
    path.write_text("another user's file")
    check_uds(str(path), "uds")  # to bind there fails by itself
    assert path.read_text() == "another user's file"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as clients:
        listener.bind(str(path))
        listener.listen(0)
        for _ in range(4):  # the last ones find its backlog full
            with pytest.raises(errors.UserError, match="another server") as caught:
                check_uds(str(path), "uds")
            assert caught.value.parameter == "uds" and path.is_socket()
            client = clients.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            client.connect_ex(str(path))
    assert path.is_socket()
    check_uds(str(path), "uds")
    assert not path.exists()


# TLS.


@with_and_without_filter
@pytest.mark.parametrize("mutual", [False, True], ids=["TLS", "mTLS"])
async def test_tls(run: Any, certificates: Path, mutual: bool, grpc_filter: bool) -> None:
    options: dict[str, Any] = {
        "grpc_filter": grpc_filter,
        "ssl_keyfile": str(certificates / "server.key"),
        "ssl_certfile": str(certificates / "server.pem"),
    }
    if mutual:
        options |= {"ssl_ca_certs": str(certificates / "ca.pem"), "ssl_client_auth": True}
    async with site(answer, **options) as own:
        for name in (None, "client", "stranger"):
            is_welcome = not mutual or name == "client"
            async with grpc.aio.secure_channel(own.target, credentials(certificates, name)) as channel:
                call = InferenceServiceStub(channel).Generate(ask(), timeout=5)
                if is_welcome:
                    assert (await call).outputs[0].text == "one two"
                else:
                    assert (await error_of(call)).code() == grpc.StatusCode.UNAVAILABLE
        async with own.channel() as channel:  # in the clear
            error = await error_of(InferenceServiceStub(channel).Generate(ask(), timeout=5))
            assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert len(own.serving.calls) == (1 if mutual else 3)


@pytest.mark.parametrize("grpc_filter", [False, True])
async def test_a_key_of_another_certificate_is_refused(run: Any, certificates: Path, grpc_filter: bool) -> None:
    pair = {"ssl_keyfile": str(certificates / "client.key"), "ssl_certfile": str(certificates / "server.pem")}
    with pytest.raises(errors.UserError, match="ssl_keyfile"):
        async with site(**pair, grpc_filter=grpc_filter):
            pass


# Health, reflection, shutdown.


async def test_health_follows_the_engine(run: Any) -> None:
    async with site() as own, own.channel() as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def statuses() -> list[int]:
            names = ("", INFERENCE, CONTROL)
            checks = [await health.Check(health_pb2.HealthCheckRequest(service=name)) for name in names]
            if not hasattr(health_pb2, "HealthListResponse"):
                return [check.status for check in checks]  # grpcio-health-checking 1.81 has no List
            listed = (
                await channel.unary_unary(
                    "/grpc.health.v1.Health/List",
                    request_serializer=Empty.SerializeToString,
                    response_deserializer=health_pb2.HealthListResponse.FromString,  # pyright: ignore
                )(Empty())
            ).statuses
            assert {name: check.status for name, check in zip(names, checks, strict=True)} == {
                name: own.status for name, own in listed.items()
            }
            return [check.status for check in checks]

        watch = health.Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
        unknown = health.Watch(health_pb2.HealthCheckRequest(service="no.Such"))
        assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        assert (await watch.read()).status == NOT_SERVING
        assert await statuses() == [NOT_SERVING, NOT_SERVING, SERVING]  # it was loading
        for state, expected in (
            ("serving", [SERVING, SERVING, SERVING]),
            ("hung", [NOT_SERVING, NOT_SERVING, SERVING]),
            ("serving", [SERVING, SERVING, SERVING]),
            ("paused", [NOT_SERVING, NOT_SERVING, SERVING]),
            ("draining", [NOT_SERVING, NOT_SERVING, SERVING]),
            ("dead", [NOT_SERVING, NOT_SERVING, NOT_SERVING]),
        ):
            await own.server.set_state(state)
            assert await statuses() == expected
            if state in ("serving", "hung", "paused"):
                assert (await watch.read()).status == expected[1]
        error = await error_of(health.Check(health_pb2.HealthCheckRequest(service="no.Such")))
        assert error.code() == grpc.StatusCode.NOT_FOUND
        watch.cancel()
        unknown.cancel()


@with_and_without_filter
async def test_watches_are_few(run: Any, monkeypatch: pytest.MonkeyPatch, grpc_filter: bool) -> None:
    monkeypatch.setattr("jaxllm_server.grpc.health.MAX_WATCHES", 3)
    monkeypatch.setattr("jaxllm_server.grpc.health.MAX_WATCHES_EACH", 2)
    own_connection = {"grpc.use_local_subchannel_pool": 1}
    async with (
        site(grpc_filter=grpc_filter) as own,
        own.channel(**own_connection) as one,
        own.channel(**own_connection) as other,
    ):
        stubs = [health_pb2_grpc.HealthStub(channel) for channel in (one, other)]
        watches = []
        for stub, words in ((0, None), (0, None), (0, "connection already has 2"), (1, None), (1, "handling 3")):
            watch = stubs[stub].Watch(health_pb2.HealthCheckRequest())
            if words is None:
                assert (await watch.read()).status == NOT_SERVING
                watches.append(watch)
            else:
                error = await error_of(watch.read())
                assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                assert f"{words} watches" in (error.details() or "")
        assert (await stubs[0].Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
        watches[0].cancel()
        async with asyncio.timeout(SOON):  # its place is free once the server has heard of it
            while True:
                try:
                    assert (await stubs[1].Watch(health_pb2.HealthCheckRequest()).read()).status == NOT_SERVING
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.01)


@with_and_without_filter
async def test_stopping_lets_calls_finish_and_does_not_wait_for_watches(run: Any, grpc_filter: bool) -> None:
    async with site(lambda call: words("a", "b", wait=0.2), grpc_filter=grpc_filter) as own, own.channel() as channel:
        await own.server.set_state("serving")
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        stream = asyncio.ensure_future(drained(InferenceServiceStub(channel).StreamGenerate(ask())))
        await own.serving.started.wait()
        began = time.monotonic()
        stopping = asyncio.ensure_future(own.server.stop(20))
        assert (await watch.read()).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF
        assert [message.deltas[0].text for message in await stream] == ["a", "b"]
        await stopping
        assert time.monotonic() - began < 2.0


@with_and_without_filter
async def test_stopping_ends_what_does_not_finish(run: Any, grpc_filter: bool) -> None:
    async with site(lambda call: silent(1), grpc_filter=grpc_filter) as own, own.channel() as channel:
        stream = InferenceServiceStub(channel).StreamGenerate(ask())
        await stream.read()
        await own.server.stop(0.1)
        assert (await error_of(stream.read())).code() == grpc.StatusCode.UNAVAILABLE
        await own.serving.closed()


@pytest.mark.skipif(not BUF.exists(), reason="buf is not installed")
@pytest.mark.parametrize("protocol", ["grpc-v1", "grpc-v1alpha"])
async def test_reflection_tells_an_independent_client_everything(run: Any, protocol: str) -> None:
    async def buf(own: Site, *arguments: str) -> tuple[int, str]:
        flags = ("--protocol", "grpc", "--http2-prior-knowledge", "--reflect-protocol", protocol)
        process = await asyncio.create_subprocess_exec(
            *(str(BUF), "curl", *flags, *arguments),
            env={**os.environ, "BUF_BETA_SUPPRESS_WARNINGS": "1"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        return process.returncode or 0, output.decode()

    async with site(answer, Keys(["k"])) as own:
        url = f"http://{own.target}"
        key = ("-H", "authorization: Bearer k")
        reflect = ("--reflect-header", "authorization: Bearer k")
        code, listed = await buf(own, *key, *reflect, "--list-methods", url)
        assert code == 0, listed
        assert {f"{INFERENCE}/StreamGenerate", f"{CONTROL}/GetLoad"} <= set(listed.split())
        request = ("-d", '{"text": "a", "sampling": {"temperature": 0}}')
        code, told = await buf(own, *key, *reflect, *request, f"{url}/{INFERENCE}/StreamGenerate")
        assert code == 0, told
        assert '"text":"one"' in told.replace(" ", "") and "FINISH_REASON_STOP" in told
        assert own.serving.calls[0].sampling == {"temperature": 0.0}
        unknown = ("-d", '{"text": "a", "model": "x"}')
        code, told = await buf(own, *key, *reflect, *unknown, f"{url}/{INFERENCE}/Generate")
        assert code != 0 and json.loads(told)["code"] == "not_found"
        assert json.loads(told)["details"][0]["type"] == "google.rpc.ErrorInfo"
        code, told = await buf(own, "--list-methods", url)
        assert code != 0 and "not authenticated" in told


async def test_channelz_is_off_unless_it_can_be_on(run: Any) -> None:
    async with site() as own, own.channel() as channel:
        call = channel.unary_unary("/grpc.channelz.v1.Channelz/GetServers")
        assert (await error_of(call(b""))).code() == grpc.StatusCode.UNIMPLEMENTED
    keys = Keys(["user"], ["admin"])
    try:
        import grpc_channelz  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        with pytest.raises(errors.UserError, match="grpcio-channelz"):
            async with site(enable_channelz=True):
                pass
    else:
        async with site(None, keys, enable_channelz=True) as own, own.channel() as channel:
            call = channel.unary_unary("/grpc.channelz.v1.Channelz/GetServers")
            assert await call(b"", metadata=bearer("admin"))
            error = await error_of(call(b"", metadata=bearer("user")))
            assert error.code() == grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux's /proc")
@with_and_without_filter
async def test_no_file_descriptor_is_left(run: Any, grpc_filter: bool) -> None:
    async def one() -> None:
        async with site(answer, grpc_filter=grpc_filter) as own, own.channel() as channel:
            await InferenceServiceStub(channel).Generate(ask())

    await one()
    await asyncio.sleep(0.1)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        await one()
    await asyncio.sleep(0.2)
    assert len(os.listdir("/proc/self/fd")) <= before + 2


# The process in front.


@pytest.mark.ci
async def test_the_process_in_front_is_started_again(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the system refuses it a process twice."""
    monkeypatch.setattr("jaxllm_server.grpc.filter_process.RESTART_SECONDS", 0.1)
    popen, refusals = subprocess.Popen, [errno.EAGAIN, errno.ENOMEM]

    def refused(*args: Any, **options: Any) -> Any:
        if refusals:
            raise OSError(refusals.pop(), "refused")
        return popen(*args, **options)

    async with site(lambda call: words("a", "b", wait=0.05), grpc_filter=True) as own, own.channel() as channel:
        generate = InferenceServiceStub(channel).Generate
        assert await generate(ask())
        front: Any = own.server.front
        folder = Path(front.folder)
        own.serving.started.clear()
        call = generate(ask())
        await own.serving.started.wait()
        monkeypatch.setattr(subprocess, "Popen", refused)
        front.process.kill()
        assert (await error_of(call)).code() == grpc.StatusCode.UNAVAILABLE
        assert await generate(ask(), wait_for_ready=True, timeout=SOON)
        assert not refusals and folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


async def test_a_server_without_its_process_in_front_does_not_start(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", mock.Mock(side_effect=OSError(errno.EAGAIN, "refused")))
    before = set(Path(tempfile.gettempdir()).glob("jaxllm-grpc-*"))
    with pytest.raises(errors.UserError, match=r"cannot be started \(refused\): try --no-grpc-filter") as caught:
        async with site(grpc_filter=True):
            pass
    assert caught.value.parameter == "grpc_filter"
    assert set(Path(tempfile.gettempdir()).glob("jaxllm-grpc-*")) <= before


@pytest.mark.ci
@pytest.mark.parametrize("with_tls", [False, True])
async def test_a_connection_that_does_not_begin_is_ended(run: Any, certificates: Path, with_tls: bool) -> None:
    """Half of a handshake, half of HTTP/2's preface: it has as long as a call."""
    options: dict[str, Any] = {"grpc_filter": True, "stall_timeout": 0.5}
    if with_tls:
        options |= {
            "ssl_keyfile": str(certificates / "server.key"),
            "ssl_certfile": str(certificates / "server.pem"),
        }
    async with site(**options) as own:
        for sent in (b"", b"\x16\x03\x01\x02\x00\x01" if with_tls else b"PRI * HTTP/2.0"):
            began = time.monotonic()
            reader, writer = await asyncio.open_connection("127.0.0.1", own.server.port)
            writer.write(sent)
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), SOON)  # perhaps the server's half of the preface
            assert time.monotonic() - began < 1.5
            writer.close()
