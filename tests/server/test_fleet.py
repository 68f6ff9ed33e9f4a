"""`jaxllm serve --data-parallel-size 2`: both protocols, metrics and load by replica, a replica of another machine."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from jaxllm import Client
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
            assert http.post("/drain", params={"replica": "two"}).status_code == 400
            assert http.get("/ready").json() == {"state": "serving"}
            assert complete(http, 1) == texts[1]


def test_a_replica_of_another_machine() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = (*QUICK, "--data-parallel-address", address, "--admin-api-key", KEY)
    local = "--data-parallel-size", "2", "--data-parallel-size-local", "1"
    with ServingProcess(*flags, *local) as server:
        headers = {"authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=server.http, timeout=60.0, headers=headers) as http:
            command = [sys.executable, "-m", "jaxllm", "serve", "--headless", *flags]
            env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'server'}"}
            other = [each if each != KEY else "another" for each in command]
            subprocess.run(other, env=env, timeout=60.0, check=True)  # the server has closed the connection
            node = subprocess.Popen(command, env=env)
            try:
                states: list[str] = []
                end = time.monotonic() + 60.0
                while states != ["serving", "serving"]:
                    assert time.monotonic() < end, states
                    states = [each["state"] for each in http.get("/load").json()["replicas"]]
                    time.sleep(0.1)
                with ThreadPoolExecutor(16) as pool:
                    texts = list(pool.map(lambda number: complete(http, number), range(32)))
                load = http.get("/metrics").text
                assert re.search(r'jaxllm:generation_tokens_total\{engine="1".*\} [1-9]', load)
            finally:
                node.kill()
                node.wait()
            assert complete(http, 3) == texts[3]
