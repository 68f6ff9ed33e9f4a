"""Servers that the hostile tests share, and checks after each test for leftovers and disclosures.

`fake` has only the front ends, `server` is all of `jaxllm serve`. Both stall for two seconds at most.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.hostile.machine import num_descriptors
from tests.support.failures import eventually
from tests.support.serving_process import ROOT, ServingProcess
from tests.support.sizes import SLOTS, flags

STALL_SECONDS = 2.0
MAX_BODY_BYTES = 1 << 20
AUDIT = Path(__file__).parent / "audit"  # its sitecustomize.py is imported when the process starts
if not Path("/proc/self/fd").is_dir():
    collect_ignore_glob = ["test_*.py"]  # they read Linux's /proc


class FakeSite(ServingProcess):
    """The process of `tests.hostile.fake_site`."""

    module = "tests.hostile.fake_site"
    command = ()


@pytest.fixture(scope="session")
def fake_process() -> Iterator[ServingProcess]:
    with FakeSite("--stall-timeout", f"{STALL_SECONDS}", "--max-body-bytes", f"{MAX_BODY_BYTES}") as process:
        httpx.get(f"{process.http}/version")
        yield process


@pytest.fixture
def fake(fake_process: ServingProcess) -> Iterator[ServingProcess]:
    """The front ends alone; fails the test that leaves them changed."""
    yield from _unharmed(fake_process)


@pytest.fixture(scope="session")
def server_process() -> Iterator[ServingProcess]:
    own = (*flags(SLOTS), "--max-queued-requests", "400", "--stall-timeout", f"{STALL_SECONDS}")
    env = {"PYTHONPATH": os.pathsep.join(map(str, (AUDIT, ROOT, ROOT / "server")))}
    with ServingProcess(*own, "--enable-log-requests", env=env) as process:
        yield process


@pytest.fixture(scope="session")
def canary(server_process: ServingProcess) -> str:
    """The server's answer before any attack."""
    return canary_of(server_process)


@pytest.fixture
def server(server_process: ServingProcess, canary: str) -> Iterator[ServingProcess]:
    """All of `jaxllm serve`; fails the test that changes its answers or leaves blocks in use."""
    yield from _unharmed(server_process)
    wait_idle(server_process)
    assert canary_of(server_process) == canary


def _unharmed(process: ServingProcess) -> Iterator[ServingProcess]:
    before, start = num_descriptors(process.process.pid), len(process.log)
    yield process
    assert process.process.poll() is None
    eventually(lambda: num_descriptors(process.process.pid) <= before + 1)  # one for the probe of `server`
    log = "".join(process.log[start:])
    assert "Traceback" not in log, log


def wait_idle(process: ServingProcess, seconds: float = 5.0) -> None:
    """Wait until no request runs or waits and no block is in use."""
    end = time.monotonic() + seconds
    while True:
        load = httpx.get(f"{process.http}/load", timeout=5).json()
        if not (load["running"] or load["waiting"] or load["kv_blocks_used"]):
            return
        assert time.monotonic() < end, load
        time.sleep(0.01)


def canary_of(process: ServingProcess) -> str:
    """Return the answer to a question, which never changes."""
    asked = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 16}
    answer = httpx.post(f"{process.http}/v1/completions", json=asked, timeout=20)
    return answer.json()["choices"][0]["text"]
