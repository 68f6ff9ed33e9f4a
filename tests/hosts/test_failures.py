"""A lost, stopped or stuck process of a group: clients get UNAVAILABLE, every process fails, and `--restart` helps."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.hosts import group
from tests.support.paths import STORIES
from tests.support.serving_process import ServingProcess
from tests.support.sizes import SLOTS
from tests.support.sizes import flags as size_flags

pytestmark = pytest.mark.ci
NOTICED = 10.0  # seconds
SIZES = ("--model", str(STORIES), *size_flags(SLOTS))
LONG = {"prompt": "Once upon a time", "max_tokens": 480, "ignore_eos": True, "temperature": 0}


def group_of_two(stack: ExitStack, *further: str, fault: str = "") -> tuple[ServingProcess, subprocess.Popen[str]]:
    """Start a server and its follower; return them once they serve."""
    address, env = group.free_address(), group.environment(FAULT=fault)
    module = "tests.hosts.faulty_host" if fault else "jaxllm"
    follower = stack.enter_context(group.process(module, "serve", *SIZES, *group.flags(1, address), *further, env=env))
    server = stack.enter_context(ServingProcess(*SIZES, *group.flags(0, address), *further, env=env, ready=False))
    server.wait_for("(ready) after", 200.0)
    return server, follower


def child_of(process: subprocess.Popen[Any]) -> int:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True)
    return int(found.stdout.split()[0])


def status(server: ServingProcess, path: str = "/ready") -> int:
    try:
        return httpx.get(server.http + path, timeout=2.0).status_code
    except httpx.HTTPError:
        return 0


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)


def nothing(process: subprocess.Popen[str]) -> None:
    """The process hangs by itself."""


@pytest.mark.parametrize(
    ("harm", "fault", "why"),
    [
        (kill, "", "its process has ended"),
        (stop, "", "no message for"),
        (nothing, group.HANG, r"is stuck|takes \d+ s on host 0; host 1 .* works on step"),
    ],
)
def test_a_failure_is_noticed(harm: Callable[[subprocess.Popen[str]], None], fault: str, why: str) -> None:
    with ExitStack() as stack:
        server, follower = group_of_two(stack, fault=fault)
        answers: list[tuple[int, float, str]] = []

        def call() -> None:
            answer = httpx.post(f"{server.http}/v1/completions", json=LONG, timeout=60.0)
            answers.append((answer.status_code, time.monotonic(), answer.text))

        assert status(server) == 200
        client = threading.Thread(target=call)
        client.start()
        time.sleep(0.3)
        harmed = time.monotonic()
        harm(follower)
        client.join(60.0)
        assert answers, "".join(server.log)
        code, answered, text = answers[0]
        assert code == 503, text
        assert status(server) != 200
        assert answered - harmed < NOTICED
        assert server.wait(20.0) == 1
        assert re.search(rf"The group of 2 hosts has stopped: .*({why})", "".join(server.log))
        if harm is stop:
            follower.send_signal(signal.SIGCONT)
        assert follower.wait(20.0) != 0


def test_a_drained_group_ends_with_code_0() -> None:
    """SIGTERM to both, as a cluster sends it: the follower ends with the leader, which answers first."""
    with ExitStack() as stack:
        server, follower = group_of_two(stack)
        body = LONG | {"max_tokens": 60, "stream": True}
        answer = stack.enter_context(httpx.stream("POST", f"{server.http}/v1/completions", json=body, timeout=60.0))
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        follower.terminate()
        server.signal()
        rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and not any('"error"' in line for line in rest)
        assert server.wait() == 0 and follower.wait(20.0) == 0


def test_a_group_comes_back_with_restart() -> None:
    """A killed follower and a stopped one: each process is started again, and the group serves."""
    with ExitStack() as stack:
        server, follower = group_of_two(stack, "--restart")
        stack.callback(lambda: os.killpg(child_of(follower), signal.SIGKILL) if follower.poll() is None else None)
        os.kill(child_of(follower), signal.SIGSTOP)
        server.log.clear()
        server.wait_for(r"(ready) after", 200.0)
        address = server.wait_for(r"HTTP on (\S+)")
        answer = httpx.post(f"{address}/v1/completions", json=LONG | {"max_tokens": 5}, timeout=60.0)
        assert answer.status_code == 200
        server.signal()
        assert server.wait() == 0 and follower.wait(20.0) == 0


@pytest.mark.parametrize(
    ("further", "what"),
    [
        (("--block-size", "8"), "host 1 differs from host 0: block_size is 8, not 16"),
        (("--model", "/no/such/model"), "there is no folder /no/such/model"),
    ],
)
def test_a_mismatch_is_a_line_on_every_host(further: tuple[str, ...], what: str) -> None:
    address, env = group.free_address(), group.environment()
    ports = ("--port", "0", "--grpc-port", "none")
    with (
        group.process("jaxllm", "serve", *SIZES, *group.flags(0, address), *ports, env=env) as leader,
        group.process("jaxllm", "serve", *SIZES, *group.flags(1, address), *further, env=env) as follower,
    ):
        logs = [each.communicate(timeout=60)[1] for each in (leader, follower)]
        assert (leader.returncode, follower.returncode) == (1, 1)
        assert sum(line.startswith("jaxllm: error") for line in logs[0].splitlines()) == 1
        for log in logs:
            assert any(what in line and "error" in line.lower() for line in log.splitlines()), logs
            assert "Traceback" not in log and "stack trace" not in log
