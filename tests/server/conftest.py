"""A server process with the embedded model, and a client for each of its protocols."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from jaxllm import Client
from tests.support.serving_process import QUICK, ServingProcess


@pytest.fixture(scope="module")
def server() -> Iterator[ServingProcess]:
    with ServingProcess(*QUICK) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: ServingProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.http, timeout=60.0) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: ServingProcess) -> Iterator[Client]:
    with Client(server.grpc, retries=False, timeout=60.0) as client:
        yield client
