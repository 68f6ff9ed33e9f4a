"""A Ray that the tests of this folder share, and `examples/ray_serve.py` on it, started like users start it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.sizes import SLOTS

# Ray's processes inherit these: examples are importable, the controller gets the loads twice a second instead of
# every 10 s, and no usage statistics are sent.
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "server")]),
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_USAGE_STATS_ENABLED": "0",
}


class Cluster:
    """A Ray on this machine: the address for its drivers, and for HTTP clients."""

    def __init__(self, address: str, url: str) -> None:
        self.address = address
        self.url = url

    @contextmanager
    def serving(self, **settings: Any) -> Iterator[Any]:
        """Start the application with its documented command; yield the handle of its engines."""
        from ray import serve

        values = {"engine": json.dumps(SLOTS), **settings}
        command = [sys.executable, "-m", "ray.serve.scripts", "run", "examples.ray_serve:app", "--non-blocking"]
        command += ["--address", self.address, *(f"{name}={value}" for name, value in values.items())]
        started = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180.0)
        assert started.returncode == 0, started.stderr[-4000:]
        try:
            yield serve.get_deployment_handle("Engine", "default")
        finally:
            serve.delete("default")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Start Ray and its proxy, with more logical processors than the machine has, since a third engine needs one."""
    ray = pytest.importorskip("ray")
    from ray import serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        context = ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield Cluster(context.address_info["gcs_address"], f"http://127.0.0.1:{port}")
        serve.shutdown()
        ray.shutdown()


def wait(is_so: Callable[[], object], seconds: float) -> None:
    """Wait until `is_so()` is true."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"not so after {seconds} s"
        time.sleep(0.1)
