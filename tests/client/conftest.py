"""Fixtures of the client tests: a server on loopback, and a client of each kind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc

from jaxllm import Client
from jaxllm.v1 import control_pb2_grpc, inference_pb2_grpc
from tests.client.fake_server import Blocking, FakeServer


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[FakeServer, str]]:
    servicer = FakeServer()
    server = grpc.server(futures.ThreadPoolExecutor(8), options=[("grpc.max_receive_message_length", 1 << 20)])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    control_pb2_grpc.add_ControlServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None)


@pytest.fixture
def server(running: tuple[FakeServer, str]) -> FakeServer:
    running[0].answers = {}
    running[0].seen = []
    running[0].cancelled = threading.Event()
    return running[0]


@pytest.fixture(params=[Client, Blocking], ids=["blocking", "asynchronous"])
def connect(request: pytest.FixtureRequest, running: tuple[FakeServer, str]) -> Iterator[Callable[..., Any]]:
    clients = []

    def make(target: str = running[1], **options: Any) -> Any:
        clients.append(request.param(target, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def client(connect: Callable[..., Any], server: FakeServer) -> Any:
    return connect()
