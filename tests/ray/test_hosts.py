"""`examples/ray_hosts.py`: two hosts in a placement group serve one model, come back after a kill, and drain."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
import requests

from tests.ray.conftest import Cluster, wait
from tests.support.paths import ROOT
from tests.support.sizes import SLOTS, flags

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

PROMPT = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}


@contextmanager
def started(cluster: Cluster, *options: str, serve: tuple[str, ...]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(ROOT / "examples" / "ray_hosts.py"), "--address", cluster.address, *options]
    environment = {**os.environ, "RAY_DEDUP_LOGS": "0"}
    process = subprocess.Popen(
        [*command, "--", *serve], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def followers() -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cmdline"]) if "--headless" in (each.info["cmdline"] or ())]


def is_ready(url: str) -> bool:
    try:
        return requests.get(f"{url}/ready", timeout=5.0).ok
    except requests.RequestException:
        return False


def complete(url: str) -> str:
    return requests.post(f"{url}/v1/completions", json=PROMPT, timeout=60.0).json()["choices"][0]["text"]


def test_two_bundles_serve_one_model(cluster: Cluster) -> None:
    from jaxllm import LLM, SamplingParams

    expected = LLM(**SLOTS).generate(PROMPT["prompt"], SamplingParams(temperature=0, max_tokens=24))[0].outputs[0].text
    port = free_port()
    serve = ("--tensor-parallel-size", "4", "--port", str(port), "--grpc-port", str(free_port()), *flags(SLOTS))
    devices = "XLA_FLAGS=--xla_force_host_platform_device_count=2"
    options = ("--hosts", "2", "--strategy", "PACK", "--env", devices, "--env", "JAX_PLATFORMS=cpu")
    url = f"http://127.0.0.1:{port}"
    with started(cluster, *options, serve=serve) as process:
        wait(lambda: is_ready(url), 240.0)
        assert complete(url) == expected

        followers()[0].kill()
        wait(lambda: not is_ready(url), 15.0)
        wait(lambda: is_ready(url), 240.0)
        assert complete(url) == expected

        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=90.0)
        assert process.returncode == 0, output[-4000:]
        assert "the group ended with an error (start 1 of 4)" in output
        assert not followers()


def test_too_large_a_group_is_one_line(cluster: Cluster) -> None:
    with started(cluster, "--hosts", "2", "--cpus", "99", "--placement-timeout", "3", serve=()) as process:
        output, _ = process.communicate(timeout=60.0)
        assert process.returncode == 1
        assert "error: Ray could not reserve 2 bundles of 99 CPUs" in output, output[-2000:]
