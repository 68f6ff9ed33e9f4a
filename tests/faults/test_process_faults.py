"""Faults of a `jaxllm serve` process: stopped, killed, out of file descriptors, with a full disk."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import psutil
import pytest

from jaxllm import AsyncClient, Client, errors
from tests.support.failures import eventually
from tests.support.serving_process import QUICK, ROOT, ServingProcess

ENDLESS: dict[str, Any] = {"max_tokens": 480, "ignore_eos": True}
EXPECTED: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0.0}


def canary(http: str) -> str:
    """Return the text of a request with a fixed answer."""
    answer = httpx.post(f"{http}/v1/completions", json=EXPECTED, timeout=10.0)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def status(http: str, path: str) -> int:
    return httpx.get(f"{http}{path}", timeout=5.0).status_code


async def ends_of(server: ServingProcess, count: int, **own: Any) -> AsyncIterator[tuple[str, float]]:
    """Run streams on both protocols; return how each ended, and when."""

    async def over_grpc(number: int) -> str:
        try:
            async for delta in client.stream("Once", seed=number, **own):
                reason = delta.finish_reason
            return str(reason)
        except errors.EngineError as error:
            return type(error).__name__

    async def over_http(number: int) -> str:
        body = {"prompt": "Once", "seed": number, "stream": True, **own}
        last = ""
        try:
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    last = line or last
        except httpx.TransportError as error:
            return type(error).__name__
        return last

    async def timed(end: Any) -> tuple[str, float]:
        return await end, time.monotonic()

    async with (
        AsyncClient(server.grpc, retries=False) as client,
        httpx.AsyncClient(base_url=server.http, timeout=60.0, limits=httpx.Limits(max_connections=None)) as http,
    ):
        tasks = [asyncio.ensure_future(timed((over_grpc if n % 2 else over_http)(n))) for n in range(count)]
        for task in asyncio.as_completed(tasks):
            yield await task


async def until_running(server: ServingProcess, count: int) -> None:
    async with httpx.AsyncClient(base_url=server.http) as http:
        async with asyncio.timeout(30.0):
            while (await http.get("/load")).json()["running"] < count:
                await asyncio.sleep(0.01)


def ends_after(server: ServingProcess, count: int, order: Callable[[], None]) -> tuple[list[str], float]:
    """Call `order` while a server serves streams; return their ends, and the seconds until the last one."""

    async def check() -> tuple[list[str], float]:
        async def later() -> float:
            await until_running(server, min(count, 16))
            await asyncio.to_thread(order)
            return time.monotonic()

        began = asyncio.ensure_future(later())
        ends = [end async for end in ends_of(server, count, **ENDLESS)]
        return [how for how, _ in ends], max(when for _, when in ends) - await began

    return asyncio.run(check())


@pytest.mark.ci
def test_it_hangs_it_is_stopped_it_has_no_descriptors_and_then_its_engine_dies() -> None:
    """Apply the faults to one process in turn, which saves starting a process for each."""
    with ServingProcess(*QUICK, "--hang-timeout", "0.5", module="tests.faults.breakable") as server:
        text = canary(server.http)
        hangs(server)
        assert canary(server.http) == text
        is_stopped(server)
        assert canary(server.http) == text
        has_no_descriptors(server)
        assert canary(server.http) == text
        ends, seconds = ends_after(server, 20, lambda: server.signal(signal.SIGUSR1))
        assert len(ends) == 20 and seconds < 4.0, (ends, seconds)
        # Over gRPC; a stream over HTTP; a stream not yet started, which gets an HTTP error status.
        assert all(end in ("EngineDeadError", "data: [DONE]") or "engine_dead" in end for end in ends), ends
        assert server.wait(10.0) == 1
        assert any("the engine died" in line for line in server.log)


def hangs(server: ServingProcess) -> None:
    """During a hang the server is live and not ready; then it is ready again, and the waiting streams continue."""

    def hang() -> None:
        server.signal(signal.SIGUSR2)
        eventually(lambda: status(server.http, "/ready") == 503, 10.0)
        assert status(server.http, "/live") == 200
        assert httpx.post(f"{server.http}/v1/completions", json=EXPECTED).status_code == 503
        with Client(server.grpc) as client:
            eventually(lambda: client.health() != "serving", 10.0)  # the server updates the status every 0.2 s
        server.signal(signal.SIGUSR2)

    ends, _ = ends_after(server, 2, hang)
    assert set(ends) == {"length", "data: [DONE]"}
    eventually(lambda: status(server.http, "/ready") == 200, 5.0)


def is_stopped(server: ServingProcess) -> None:
    """SIGSTOP: calls wait; after SIGCONT the server continues."""

    def stop() -> None:
        server.signal(signal.SIGSTOP)
        with pytest.raises(httpx.TimeoutException):
            httpx.get(f"{server.http}/ready", timeout=1.0)
        server.signal(signal.SIGCONT)

    ends, _ = ends_after(server, 4, stop)
    assert set(ends) == {"length", "data: [DONE]"}
    eventually(lambda: status(server.http, "/ready") == 200, 10.0)


def is_calm(server: ServingProcess) -> bool:
    """Return whether a process uses less than 0.3 s of processor time in a second."""
    process = psutil.Process(server.process.pid)
    used = process.cpu_times()
    time.sleep(1.0)
    now = process.cpu_times()
    return now.user + now.system - used.user - used.system < 0.3


def has_no_descriptors(server: ServingProcess) -> None:
    """With 64 file descriptors and 200 clients the server neither ends nor spins; when they leave, it serves again."""
    pid = server.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    eventually(lambda: is_calm(server), 120.0)  # a slow machine still compiles programs
    num_open = len(os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (max(64, num_open + 8), before[1]))
    addresses = [server.http.removeprefix("http://"), server.grpc]
    clients: list[socket.socket] = []
    try:
        for number in range(200):
            host, _, port = addresses[number % 2].rpartition(":")
            client = socket.socket()
            client.settimeout(2.0)
            clients.append(client)
            client.connect((host, int(port)))
        assert any(is_calm(server) for _ in range(5))  # accepts first; a spinning process never is
        assert server.process.poll() is None
    finally:
        for client in clients:
            client.close()
    eventually(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= num_open + 4, 10.0)
    with Client(server.grpc) as client:
        assert client.generate("Once", max_tokens=2).token_ids
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.ci
def test_a_killed_process_is_seen_at_once() -> None:
    with ServingProcess(*QUICK) as server:
        ends, seconds = ends_after(server, 16, lambda: server.signal(signal.SIGKILL))
        assert set(ends) <= {"UnavailableError", "EngineDeadError", "RemoteProtocolError", "ReadError"}, ends
        assert len(ends) == 16 and seconds < 4.0, seconds
        assert server.wait(5.0) == -signal.SIGKILL


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def without_a_log() -> Any:
    """Serve with standard error on a full disk; yield the process and its address."""
    port, grpc_port = free_port(), free_port()
    own = ["--port", str(port), "--grpc-port", str(grpc_port), "--log-stats-interval", "0.1", "--enable-log-requests"]
    with open("/dev/full", "wb") as full:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxllm", "serve", *QUICK, *own],
            stdout=full,
            stderr=full,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'server'}"},
        )
    http = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.poll() is None, process.returncode
        with contextlib.suppress(httpx.TransportError):
            return status(http, "/ready") == 200
        return False

    try:
        eventually(is_ready, 120.0)
        yield process, http
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10.0)


@pytest.mark.ci
def test_a_full_disk_for_the_log_hurts_nobody() -> None:
    """tests/server/test_serve.py covers how a queue is drained."""
    with without_a_log() as (process, http):
        text = canary(http)
        assert httpx.post(f"{http}/v1/completions", content=b"{").status_code == 415
        assert httpx.post(f"{http}/v1/completions", json={"prompt": ""}).status_code == 400
        assert canary(http) == text
        process.send_signal(signal.SIGTERM)
        assert process.wait(32.0) == 0


@pytest.mark.parametrize(
    "gibibytes", [pytest.param(0.5, marks=pytest.mark.ci), pytest.param(1.5, marks=pytest.mark.slow)]
)
def test_a_start_without_memory_ends_at_once_with_a_code(gibibytes: float) -> None:
    limit = int(gibibytes * 2**30)
    program = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit})); "
        "sys.argv = ['jaxllm', 'serve', '--port', '0', '--grpc-port', '0']; from jaxllm.commands import cli; cli.run()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60.0,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'server'}"},
    )
    # gRPC and XLA abort the process if they get no thread; the C library exits with 127.
    assert ran.returncode in (1, 127, -signal.SIGABRT), (ran.returncode, ran.stderr)
    assert ran.returncode != 1 or ran.stderr.splitlines()[-1].startswith("jaxllm: error: "), ran.stderr
    assert "Traceback" not in ran.stderr
