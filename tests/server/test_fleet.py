"""`jaxllm serve --data-parallel-size 2`: both protocols, metrics and load by replica, a replica of another machine."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from websockets.sync.client import connect

from jaxllm import Client
from tests.support.failures import eventually
from tests.support.paths import ROOT
from tests.support.serving_process import QUICK, ServingProcess

pytestmark = pytest.mark.ci
KEY = "a key of the fleet"


def complete(client: httpx.Client, number: int) -> str:
    body = {"model": "jaxllm-embedded", "prompt": f"Once upon a time {number}", "max_tokens": 16, "temperature": 0}
    answer = client.post("/v1/completions", json=body)
    answer.raise_for_status()
    return answer.json()["choices"][0]["text"]


def test_two_replicas_behind_one_server() -> None:
    with ServingProcess(*QUICK, "--data-parallel-size", "2") as server:
        with httpx.Client(base_url=server.http, timeout=60.0) as http, Client(server.grpc) as client:
            with ThreadPoolExecutor(16) as pool:
                texts = list(pool.map(lambda number: complete(http, number), range(32)))
                again = list(pool.map(lambda number: client.generate(f"Once upon a time {number}").text[:8], range(4)))
            assert texts == [complete(http, number) for number in range(32)] and all(again)
            load = http.get("/load").json()
            assert [each["state"] for each in load["replicas"]] == ["serving", "serving"]
            assert load["max_running"] == sum(each["max_running"] for each in load["replicas"])
            metrics = http.get("/metrics").text
            made = re.findall(r'^jaxllm:generation_tokens_total\{engine="(\d)".*\} (\S+)$', metrics, re.MULTILINE)
            assert [engine for engine, _ in made] == ["0", "1"] and all(float(count) > 0 for _, count in made)
            assert metrics.count("# TYPE jaxllm:generation_tokens_total") == 1
            assert http.post("/drain", params={"replica": "0"}).json() == {"replica": 0}
            assert states(http) == ["serving", "serving"], "it answers when the replica is there again"
            assert http.post("/drain", params={"replica": "two"}).status_code == 400
            assert http.get("/ready").json() == {"state": "serving"}
            assert complete(http, 1) == texts[1]
            turns = [turn["output"][0]["content"][0]["text"] for turn in over_a_web_socket(server.http)]
            assert turns[0] and turns[1]
        children = psutil.Process(server.process.pid).children()
        server.signal()
        assert server.wait() == 0
        assert len(children) == 3, "two replicas, and the filter of gRPC"
        assert not any(each.is_running() for each in children)


def test_a_replica_of_another_machine(certificates: Path) -> None:
    """With a key and over TLS; it is refused with another key, and leaves at SIGTERM without losing a request."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = (*QUICK, "--data-parallel-address", address)
    own = ("--ssl-keyfile", str(certificates / "server.key"), "--ssl-certfile", str(certificates / "server.pem"))
    size = ("--data-parallel-size", "2", "--data-parallel-size-local", "1", "--admin-api-key", KEY)
    with ServingProcess(*flags, *own, *size) as server:
        trust = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
        headers = {"authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=server.http, timeout=60.0, headers=headers, verify=trust) as http:
            env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'server'}"}
            command = [sys.executable, "-m", "jaxllm", "serve", "--headless", *flags]
            command += ["--data-parallel-ca-certs", str(certificates / "ca.pem"), "--admin-api-key"]
            refused = subprocess.run([*command, "another"], env=env, timeout=60.0, stderr=subprocess.PIPE, text=True)
            assert refused.returncode == 2
            assert (
                "refuses this replica: its key is not the server's first --admin-api-key."
                in refused.stderr.splitlines()[-1]
            )
            node = subprocess.Popen([*command, KEY], env=env)
            try:
                eventually(lambda: states(http) == ["serving", "serving"], 60.0)
                with ThreadPoolExecutor(16) as pool:
                    found = [pool.submit(complete, http, number) for number in range(64)]
                    eventually(lambda: has_generated(http), 60.0)
                    node.terminate()
                    texts = [each.result() for each in found]
                assert node.wait(30.0) == 0
            finally:
                node.kill()
            assert has_generated(http)
            eventually(lambda: states(http) == ["serving", "loading"], 60.0)
            first, second = over_a_web_socket(server.http, ssl=trust, additional_headers=headers)
            assert second["previous_response_id"] == first["id"] and second["usage"]["input_tokens"] > 20
            assert [complete(http, number) for number in range(4)] == texts[:4]


def over_a_web_socket(base: str, **options: Any) -> list[dict[str, Any]]:
    """Return the responses to two questions; the second continues the first, which only the connection keeps."""
    ends: list[dict[str, Any]] = []
    with connect(f"{base.replace('http', 'ws', 1)}/v1/responses", **options) as socket:
        for question in ("What is 2 + 2?", "And 3 more?"):
            before = {"previous_response_id": ends[-1]["id"]} if ends else {}
            body = {"type": "response.create", "input": question, "store": False, "temperature": 0, **before}
            socket.send(json.dumps(body))
            while (event := json.loads(socket.recv(timeout=30)))["type"] != "response.completed":
                assert event["type"] != "error", event
            ends.append(event["response"])
    assert socket.close_code == 1000
    return ends


def has_generated(http: httpx.Client) -> bool:
    """Whether the second replica has generated a token; unlike a number of running requests this stays true."""
    return re.search(r'jaxllm:generation_tokens_total\{engine="1".*\} [1-9]', http.get("/metrics").text) is not None


def states(http: httpx.Client) -> list[str]:
    return [each["state"] for each in http.get("/load").json()["replicas"]]
