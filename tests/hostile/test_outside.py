"""The server's connections: it listens on the configured addresses and calls no other machine."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import httpx
import pytest

from jaxllm.v1 import inference_pb2
from tests.hostile.machine import tcp_sockets
from tests.hostile.wire import address_of
from tests.support.serving_process import ROOT, ServingProcess
from tests.support.sizes import SLOTS, flags

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1 in the kernel's format, also of IPv6 sockets


def test_it_listens_where_it_was_told_and_nowhere_else(server: ServingProcess, fake: ServingProcess) -> None:
    for process in (server, fake):
        ports = {address_of(process)[1], int(process.grpc.rpartition(":")[2])}
        listening = [own for own in tcp_sockets(process.process.pid) if own.is_listening]
        assert {own.port for own in listening} == ports and {own.local for own in listening} <= LOOPBACK


def test_loopback_is_the_default() -> None:
    from jaxllm_server.shared.options import ServerOptions

    assert ServerOptions().host == "127.0.0.1" and ServerOptions().is_loopback


@contextmanager
def canary() -> Iterator[tuple[str, list[Any]]]:
    """Listen; yield a URL of this listener, and its connections."""
    came: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        end = threading.Event()

        def listen() -> None:
            while not end.is_set():
                try:
                    came.append(listener.accept())
                except TimeoutError:
                    pass

        thread = threading.Thread(target=listen)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/x", came
        end.set()
        thread.join()


def with_url(value: Any, url: str) -> Iterator[Any]:
    """Yield copies of a JSON value, each with one string replaced by a URL."""
    if isinstance(value, str):
        yield url
    elif isinstance(value, dict):
        for key, own in value.items():
            for changed in with_url(own, url):
                yield value | {key: changed}
            yield {(url if name == key else name): inner for name, inner in value.items()}
    elif isinstance(value, list):
        for index, own in enumerate(value):
            for changed in with_url(own, url):
                yield [*value[:index], changed, *value[index + 1 :]]


COMPLETION = {
    **{"model": "jaxllm-embedded", "prompt": "a", "stop": ["a"], "user": "a", "request_id": "a", "cache_salt": "a"},
    **{"metadata": {"a": "b"}, "bad_words": ["a"], "response_format": {"type": "text"}, "guided_json": "a"},
    **{"structured_outputs": {"regex": "a"}, "vllm_xargs": {"a": "b"}, "kv_transfer_params": {"remote_host": "a"}},
    **{"prompt_embeds": "a", "suffix": "a", "max_tokens": 1, "lora_path": "a"},
}
CHAT = {
    "max_completion_tokens": 1,
    "messages": [
        {"role": "system", "content": "a", "name": "a"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "a", "format": "a"}}]},
        {"role": "user", "content": [{"type": "file", "file": {"file_id": "a", "file_data": "a"}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "a", "function": {"name": "a"}}]},
        {"role": "tool", "content": "a", "tool_call_id": "a"},
    ],
    "tools": [{"type": "function", "function": {"name": "a", "description": "a", "parameters": {"$ref": "a"}}}],
    **{"tool_choice": "auto", "chat_template": "a", "chat_template_kwargs": {"a": "b"}, "documents": [{"text": "a"}]},
    **{"media_io_kwargs": {"a": "b"}, "audio": {"voice": "a"}, "web_search_options": {"a": "b"}, "model": "a"},
}


@pytest.mark.ci
def test_no_url_of_a_request_is_ever_called(server: ServingProcess) -> None:
    start, num_asked = len(server.log), 0
    with canary() as (http_url, came), httpx.Client(base_url=server.http, timeout=20) as http:
        for url in (http_url, http_url.replace("http", "https", 1), "file:///etc/passwd", "s3://bucket/x", "hf://a/b"):
            # Each string alone in an otherwise valid body, and all strings of an invalid one.
            for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
                for name, value in body.items():
                    base = {"prompt": "a"} if path == "/v1/completions" else {"messages": CHAT["messages"][:1]}
                    for changed in with_url({name: value}, url):
                        answer = http.post(path, json={**base, "max_tokens": 1, **changed})
                        assert answer.status_code in (200, 400, 404, 409), answer.text
                        num_asked += 1
            for headers in ({"referer": url}, {"origin": url}, {"x-forwarded-host": url}, {"traceparent": url}):
                http.get("/v1/models", headers=headers)
            http.get(f"/v1/models/{url}")
        with grpc.insecure_channel(server.grpc) as channel:
            ask = inference_pb2.GenerateRequest
            for request in (
                *(ask(text="a", **{name: http_url}) for name in ("model", "adapter", "request_id", "cache_salt")),
                ask(text=http_url, stop={"max_tokens": 1, "stop_strings": [http_url]}),
                ask(text="a", extensions={http_url: http_url}),
                ask(text="a", structured_output={"json_schema": json.dumps({"$ref": http_url})}),
                ask(
                    chat={
                        "messages": [{"role": "user", "parts": [{"text": http_url}]}],
                        "tools_json": f'["{http_url}"]',
                    }
                ),
            ):
                call = channel.unary_unary("/jaxllm.v1.InferenceService/Generate")
                call.future(request.SerializeToString(), timeout=20).exception()
                num_asked += 1
        time.sleep(0.3)
    assert num_asked > 300 and came == []
    told = "".join(server.log[start:])
    assert "outbound" not in told, told


def test_it_has_called_nobody_since_its_start(server: ServingProcess) -> None:
    """An audit hook in the process logs every connection and every name lookup in Python."""
    own = re.compile(r"outbound \S+ .*('127\.0\.0\.1'|'localhost')")
    calls = [line for line in server.log if line.startswith("outbound") and not own.match(line)]
    assert calls == []


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode != 0,
    reason="needs a namespace of its own",
)
def test_it_starts_where_there_is_no_network(tmp_path: Any) -> None:
    command = ["unshare", "-rn", sys.executable, "-m", "jaxllm", "serve", *flags(SLOTS)]
    sockets = [
        *("--port", "none", "--uds", str(tmp_path / "http"), "--grpc-port", "none", "--grpc-uds", str(tmp_path / "g")),
    ]
    with subprocess.Popen([*command, *sockets], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            log = ""
            while "ready after" not in log:
                line = process.stderr.readline()
                assert line, log
                log += line
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(tmp_path / "http"))) as http:
                answer = http.post("http://localhost/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=20)
            assert answer.status_code == 200
        finally:
            process.kill()
