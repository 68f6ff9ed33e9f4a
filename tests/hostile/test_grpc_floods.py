"""Floods of gRPC's port, each kind from one connection and from eight: delays of other clients, and memory."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import psutil
import pytest

from jaxllm.v1 import inference_pb2
from tests.hostile.conftest import FakeSite
from tests.hostile.floods import KINDS
from tests.hostile.machine import growth
from tests.hostile.wire import address_of
from tests.support.paths import ROOT
from tests.support.serving_process import ServingProcess

SECONDS = 0.6
MOST_SECONDS = 0.5  # delay of other clients
MOST_MIB = 64
QUICK = ("CONTINUATION", "calls and small CONTINUATION", "resets", "large heads")


def asked_by(server: ServingProcess) -> dict[str, Callable[[], None]]:
    """Return requests of other clients, each on a new connection."""

    def over_http(method: str, path: str, body: str | None = None) -> None:
        connection = http.client.HTTPConnection(*address_of(server), timeout=20)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        connection.close()
        assert answer.status == 200

    def over_grpc() -> None:
        with grpc.insecure_channel(server.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            request = inference_pb2.GenerateRequest(text="a").SerializeToString()
            channel.unary_unary("/jaxllm.v1.InferenceService/Generate")(request, timeout=20)

    return {
        "health": lambda: over_http("GET", "/health"),
        "HTTP": lambda: over_http("POST", "/v1/completions", '{"prompt": "a"}'),
        "gRPC": over_grpc,
    }


@pytest.mark.parametrize("connections", [1, 8])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.ci if kind in QUICK else pytest.mark.slow) for kind in KINDS]
)
def test_floods_keep_nobody_waiting(fake: ServingProcess, kind: str, connections: int) -> None:
    if not is_bearable(fake, kind, connections):
        assert is_bearable(fake, kind, connections), "twice: it is not the machine"


def is_bearable(fake: ServingProcess, kind: str, connections: int) -> bool:
    """Flood the port; return whether others were answered in time and the server's memory grew little."""
    waits: dict[str, list[float]] = {name: [] for name in asked_by(fake)}
    end = threading.Event()

    def ask(name: str, one: Callable[[], None]) -> None:
        while not end.is_set() or not waits[name]:
            began = time.monotonic()
            one()
            waits[name].append(time.monotonic() - began)
            time.sleep(0.01)

    threads = [threading.Thread(target=ask, args=item) for item in asked_by(fake).items()]
    host, _, port = fake.grpc.rpartition(":")
    with growth(fake.process.pid) as grown:
        command = [sys.executable, "-m", "tests.hostile.floods", host, port, kind, str(connections), str(SECONDS)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as attacker:
            for thread in threads:
                thread.start()
            sent = int(attacker.communicate(timeout=20)[0])
        end.set()
        for thread in threads:
            thread.join(20)
        mib = grown() >> 20
    most = {name: max(times) for name, times in waits.items()}
    print(
        kind,
        connections,
        {name: f"{1e3 * seconds:.0f} ms" for name, seconds in most.items()},
        f"{mib} MiB held, {sent >> 20} sent",
    )
    assert sent > 1 << 20
    return max(most.values()) < MOST_SECONDS and mib < MOST_MIB


@pytest.mark.ci
def test_a_server_that_is_killed_leaves_no_process_and_no_folder() -> None:
    with FakeSite() as server:
        asked_by(server)["gRPC"]()
        (child,) = psutil.Process(server.process.pid).children()
        folder = Path(json.loads(child.cmdline()[-1])["folder"])
        assert folder.is_dir()
        server.process.kill()
        child.wait(5)
        assert not folder.exists()
