"""The HTTP front end under the unmodified OpenAI client and under raw bytes, in front of a scripted `Serving`."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import socket
import threading
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import httpx
import openai
import pytest

from jaxllm.errors import (
    DeadlineError,
    DrainingError,
    EngineDeadError,
    OverloadedError,
    RequestFailedError,
    UnavailableError,
)
from jaxllm.metrics import Metrics
from jaxllm_server.openai.pooling import REPLIES
from jaxllm_server.parsers.tool_parsers import ToolCallDelta
from jaxllm_server.shared.options import ServerOptions
from tests.support.failures import eventually
from tests.support.fake_serving import SCRIPT, FakeServing, http_server, raw_exchange

MESSAGES = [{"role": "user", "content": "Hi"}]
TEXT = "".join(SCRIPT)
wait_for = functools.partial(eventually, seconds=3.0)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


class Observer:
    content_type = "text/plain"

    def __init__(self):
        self.handled = []

    def request_handled(self, protocol, route, code, seconds):
        self.handled.append((protocol, route, int(code)))

    def render(self):
        return b"a 1\n"


@pytest.fixture(scope="module")
def server():
    serving, observer = FakeServing(), Observer()
    with http_server(serving, ServerOptions(enable_prompt_tokens_details=True), observer) as port:
        url = f"http://127.0.0.1:{port}"
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with client, httpx.Client(base_url=url) as http:
            yield SimpleNamespace(serving=serving, observer=observer, port=port, client=client, http=http)


@pytest.fixture(autouse=True)
def _fresh(server):
    fresh = FakeServing()
    server.serving.__dict__.update({name: value for name, value in vars(fresh).items() if name != "engine"})
    server.serving.engine.state = "serving"


@contextmanager
def failing(server, error, at=0):
    server.serving.failure, server.serving.fails_at = error, at
    yield
    server.serving.failure = None


def post(server, path="/v1/completions", **body):
    return server.http.post(path, json={"prompt": "Hi", **body})


# The OpenAI client.


def test_completion(server):
    answer = server.client.completions.create(model="fake", prompt="Hi", max_tokens=4, logprobs=2)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("Once upon a time", "length")
    assert choice.logprobs.tokens == SCRIPT[:4] and choice.logprobs.text_offset == [0, 4, 9, 11]
    assert answer.id.startswith("cmpl-") and answer.model == "fake" and answer.object == "text_completion"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 4, 7)
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    assert answer.system_fingerprint and answer._request_id


def test_stream_is_the_whole_answer_in_pieces(server):
    with server.client.completions.create(model="fake", prompt="Hi", stream=True) as stream:
        texts = [event.choices[0].text for event in stream]
    assert texts == SCRIPT
    assert server.client.completions.create(model="fake", prompt="Hi").choices[0].text == TEXT


def test_several_prompts_several_outputs(server):
    answer = server.client.completions.create(model="fake", prompt=["a", "b"], n=3, max_tokens=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage.prompt_tokens == 6 and answer.usage.completion_tokens == 12
    texts = dict.fromkeys(range(6), "")
    for event in server.client.completions.create(model="fake", prompt=["a", "b"], n=3, max_tokens=2, stream=True):
        texts[event.choices[0].index] += event.choices[0].text
    assert texts == dict.fromkeys(range(6), "Once upon")


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_are_refused_together_before_the_first_is_generated(server, stream, monkeypatch):
    def refuse(calls, params):
        assert [(call.prompt, call.client) for call in calls] == [("a", "loopback"), ("b", "loopback")]
        raise OverloadedError("The queue is full.", 1.0)

    monkeypatch.setattr(server.serving, "check_calls", refuse, raising=False)
    assert post(server, prompt=["a", "b"], stream=stream).status_code == 429
    assert server.serving.calls == []
    assert post(server, prompt="a", stream=stream).status_code == 200


def test_echo_of_text_and_of_ids(server):
    create = server.client.completions.create
    assert create(model="fake", prompt="Hi!", echo=True, max_tokens=1).choices[0].text == "Hi!Once"
    assert create(model="fake", prompt=[1, 2], echo=True, max_tokens=1).choices[0].text == " upon aOnce"
    answer = create(model="fake", prompt=[[1, 2], [0]], echo=True, max_tokens=1)
    assert [choice.text for choice in answer.choices] == [" upon aOnce", "OnceOnce"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_ids_that_are_none_names_what_the_request_has(server, stream):
    answer = post(server, prompt=[99], echo=True, stream=stream)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    answer = post(server, prompt=[99], echo=True, stream=stream, model="other")
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")


def test_chat(server):
    answer = server.client.chat.completions.create(
        model="org/alias", messages=MESSAGES, logprobs=True, top_logprobs=3, max_completion_tokens=2, n=2
    )
    assert [choice.message.content for choice in answer.choices] == ["Once upon"] * 2
    assert answer.choices[0].message.role == "assistant" and answer.model == "fake", "the first name, as vLLM has it"
    (first, _) = answer.choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("Once", -0.5, list(b"Once"))
    assert [other.logprob for other in first.top_logprobs] == [-0.5, -2.0, -3.0]
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"


def test_several_chats(server):
    body = {"model": "fake", "messages": [MESSAGES, MESSAGES], "max_tokens": 2, "logprobs": True}
    answer = server.http.post("/v1/chat/completions/batch", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1] and answer["object"] == "chat.completion"
    alone = server.http.post("/v1/chat/completions", json=body | {"messages": MESSAGES}).json()
    for choice in answer["choices"]:
        assert {name: choice[name] for name in ("message", "logprobs")} == {
            name: alone["choices"][0][name] for name in ("message", "logprobs")
        }
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == 2 * alone["usage"][name]
    refused = server.http.post("/v1/chat/completions/batch", json=body | {"messages": MESSAGES})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")


def test_chat_stream_with_usage(server):
    server.serving.reasoning = "hm"
    events = list(
        server.client.chat.completions.create(
            model="fake", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    assert events[0].choices[0].delta.role == "assistant"
    deltas = [event.choices[0].delta for event in events[:-1]]
    assert "".join(delta.content or "" for delta in deltas) == TEXT
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "hm"
    assert [event.choices[0].finish_reason for event in events[:-1]] == [None] * len(SCRIPT) + ["stop"]
    assert events[-1].choices == [] and events[-1].usage.completion_tokens == len(SCRIPT)
    assert {event.id for event in events} == {events[0].id} and events[0].object == "chat.completion.chunk"


def test_tool_calls(server):
    server.serving.tool_calls = [ToolCallDelta(0, "id0", "add", '{"a": 1}')]
    answer = server.client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.id, call.function.name, call.function.arguments) == ("id0", "add", '{"a": 1}')
    assert answer.choices[0].finish_reason == "tool_calls"
    events = list(server.client.chat.completions.create(model="fake", messages=MESSAGES, tools=TOOLS, stream=True))
    (delta,) = events[-1].choices[0].delta.tool_calls
    assert (delta.index, delta.id, delta.function.name) == (0, "id0", "add")


def test_models_and_tokens(server):
    assert [model.id for model in server.client.models.list()] == ["fake", "org/alias"]
    card = server.client.models.retrieve("org/alias")
    assert (card.id, card.root) == ("org/alias", "/models/fake")
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("other")
    answer = server.http.post("/tokenize", json={"prompt": "Hi", "return_token_strs": True}).json()
    assert answer == {"count": 3, "max_model_len": 64, "tokens": [0, 1, 2], "token_strs": SCRIPT[:3]}
    assert server.http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"] == [0, 1, 2]
    assert server.http.post("/detokenize", json={"tokens": [1, 2]}).json() == {"prompt": " upon a"}


def test_an_adapter_is_a_model_while_it_is_loaded(tmp_path):
    for name in ("a", "bad"):
        (tmp_path / name).mkdir()
    serving = FakeServing(options=ServerOptions(lora_root=str(tmp_path)))
    with http_server(serving) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}/v1") as http:

        def ask(path, **body):
            answer = http.post(path, json=body)
            error = answer.json()["error"] if answer.status_code != 200 else {}
            return answer.status_code, error.get("message", answer.text), error.get("param")

        names = {"lora_name": "poet", "lora_path": "a"}
        added = (200, "Success: LoRA adapter 'poet' added successfully.", None)
        assert ask("/load_lora_adapter", **names) == added
        cards = http.get("/models").json()["data"]
        assert [(card["id"], card["root"], card["parent"]) for card in cards[1:]] == [
            ("org/alias", "/models/fake", None),
            ("poet", "a", "fake"),
        ]
        assert http.get("/models/poet").json() == cards[2]
        for path in ("/completions", "/../tokenize", "/../detokenize", "/chat/completions"):
            own = {"prompt": "a"} if "detok" not in path else {"tokens": [1]}
            answer = http.post(path, json={"model": "poet", **(own if "chat" not in path else {"messages": MESSAGES})})
            assert answer.json().get("model", "poet") == "poet" and answer.status_code == 200
        assert ask("/load_lora_adapter", **names)[::2] == (400, "lora_name")
        assert ask("/load_lora_adapter", **names, load_inplace=True) == added
        assert ask("/load_lora_adapter", lora_name="x", lora_path="b")[::2] == (404, "lora_path")
        assert ask("/load_lora_adapter", lora_name="x", lora_path="bad")[::2] == (400, "lora_path")
        assert ask("/load_lora_adapter", lora_name="x", lora_path="..")[::2] == (400, "lora_path")
        assert ask("/load_lora_adapter", lora_name=5)[::2] == (400, "lora_name")
        assert ask("/load_lora_adapter", lora="x")[::2] == (400, "lora")
        removed = (200, "Success: LoRA adapter 'poet' removed successfully.", None)
        assert ask("/unload_lora_adapter", lora_name="poet", lora_int_id=1) == removed
        gone = (404, "The lora adapter 'poet' cannot be found.", "lora_name")
        assert ask("/unload_lora_adapter", lora_name="poet") == gone
        assert ask("/completions", model="poet", prompt="a")[::2] == (404, "model")
        assert [card["id"] for card in http.get("/models").json()["data"]] == ["fake", "org/alias"]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (OverloadedError("The queue is full.", 2.5), 429, "rate_limit_exceeded"),
        *(
            (error("Not now."), 503, code)
            for error, code in ((UnavailableError, "not_ready"), (DrainingError, "draining"))
        ),
        (EngineDeadError("Dead."), 503, "engine_dead"),
        (DeadlineError("Late."), 504, "deadline_exceeded"),
        *(
            (error, 500, "engine_error")
            for error in (RequestFailedError("NaN."), RuntimeError("0x7fee at /home/secret"))
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_early_errors_have_a_status_of_their_own_and_say_whether_to_try_again(server, error, status, code, stream):
    with failing(server, error):
        answer = post(server, stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    assert "secret" not in answer.text and "0x7f" not in answer.text
    retries = status in (429, 503)
    assert ("retry-after" in answer.headers, answer.headers.get("x-should-retry") == "false") == (retries, not retries)
    if status == 429:
        assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("3", "2500")


@pytest.mark.parametrize("policy", ["warn", "ignore", "refuse"])
def test_fields_of_other_servers_are_answered_with_a_warning_and_logged_once(policy, caplog):
    strange = {"typical_p": 5, "odd\n☺": [1]}
    told = r"ignored fields: 'typical_p', 'odd\n\u263a'" if policy == "warn" else None
    bodies = [
        *(("/v1/completions", {"prompt": "Hi"}), ("/v1/completions", {"prompt": "Hi", "stream": True})),
        *(
            ("/v1/chat/completions", {"messages": MESSAGES}),
            ("/tokenize", {"prompt": "Hi"}),
            ("/detokenize", {"tokens": []}),
        ),
        *(("/v1/embeddings", {"input": "a"}), ("/score", {"text_1": "a", "text_2": "b"})),
        *(("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}), ("/api/generate", {"prompt": "Hi"})),
        *(("/v1/messages/count_tokens", {"messages": MESSAGES}), ("/api/chat", {"messages": MESSAGES})),
        ("/api/embed", {"input": "a"}),
    ]
    options = ServerOptions(unknown_fields=policy)
    with http_server(FakeServing(), options) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        for path, body in bodies:
            answer = http.post(path, json={**body, **strange})
            assert (answer.status_code, answer.headers.get("warnings")) == (400 if policy == "refuse" else 200, told)
            plain = http.post(path, json=body)
            assert (plain.status_code, plain.headers.get("warnings")) == (200, None)
    logged = [record.getMessage() for record in caplog.records if "it is ignored" in record.getMessage()]
    names = ["'typical_p'", r"'odd\n\u263a'"] if policy == "warn" else []
    assert logged == [f"a client sent {name}, which is not a field of /v1/completions: it is ignored" for name in names]


def test_names_that_the_log_has_are_bounded(caplog):
    with http_server(FakeServing(), ServerOptions()) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
        for number in range(20):
            body = {f"{chr(0x4E00 + number * 16 + at) * 9}": 1 for at in range(16)}
            answer = http.post("/v1/completions", json={"prompt": "Hi", **body})
            assert answer.status_code == 200 and len(answer.headers["warnings"]) <= 1024
    assert sum("is ignored" in record.getMessage() for record in caplog.records) == 256


def test_a_chat_names_parameters_as_it_has_them(server):
    answer = server.http.post(
        "/v1/chat/completions", json={"messages": MESSAGES, "logprobs": True, "top_logprobs": -5}
    ).json()
    assert answer["error"]["param"] == "top_logprobs"
    answer = server.http.post("/v1/chat/completions", json={"messages": MESSAGES, "max_completion_tokens": 0}).json()
    assert answer["error"]["param"] == "max_completion_tokens"


def test_an_error_in_a_stream_is_an_event_and_the_connection_closes(server):
    for error, shown in ((RequestFailedError("This request failed."), "This request failed."), (ValueError("0x1"), "")):
        # A new connection: the server closes it, and a pooled connection might be used after that.
        with failing(server, error, at=2):
            body = {"prompt": "Hi", "stream": True}
            answer = httpx.post(f"http://127.0.0.1:{server.port}/v1/completions", json=body)
        assert answer.status_code == 200
        lines = [line for line in answer.text.split("\n\n") if line]
        assert len(lines) == 4 and lines[-1] == "data: [DONE]"
        message = json.loads(lines[2].removeprefix("data: "))["error"]["message"]
        assert message and shown in message and "0x1" not in message
    body = json.dumps({"prompt": "Hi", "stream": True}).encode()
    with failing(server, RequestFailedError("x"), at=1):
        began = time.monotonic()
        answer = raw_exchange(server.port, request(body), timeout=3)
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and time.monotonic() - began < 2
    with failing(server, RequestFailedError("x"), at=2), pytest.raises(openai.APIError):
        list(server.client.completions.create(model="fake", prompt="Hi", stream=True))


# Life of a request.


def request(body, headers=(), path="/v1/completions", method="POST"):
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("resets", [False, True])
def test_a_client_that_goes_ends_its_request(server, stream, resets):
    server.serving.delay = 0.2
    body = json.dumps({"prompt": ["Hi", "Ho"], "stream": stream}).encode()
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(request(body))
    wait_for(lambda: server.serving.num_live == 2)
    if stream:
        assert connection.recv(10)
    if resets:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    connection.close()
    began = time.monotonic()
    wait_for(lambda: server.serving.num_live == 0)
    assert time.monotonic() - began < 0.15 and server.serving.num_closed_early == 2
    wait_for(lambda: server.observer.handled[-1] == ("http", "/v1/completions", 499))


def test_a_reader_that_stops_is_cut_off():
    serving = FakeServing(["x" * 65536] * 1000)
    with http_server(serving, ServerOptions(stall_timeout=0.5)) as port:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(request(json.dumps({"prompt": "Hi", "stream": True, "max_tokens": 1000}).encode()))
            wait_for(lambda: serving.num_live == 1)
            wait_for(lambda: serving.num_live == 0)
            assert serving.num_closed_early == 1
            answer = b""
            while piece := connection.recv(1 << 20):
                answer += piece
            assert len(answer) > 1000 and not answer.endswith(b"0\r\n\r\n") and b"[DONE]" not in answer


def test_request_ids(server):
    answer = server.http.post("/v1/completions", json={"prompt": "Hi"}, headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert server.serving.calls[-1].request_id == answer.json()["id"].removeprefix("cmpl-") != "mine-1"
    answer = post(server, request_id="body.1")
    assert answer.json()["id"] == "cmpl-body.1" and server.serving.calls[-1].request_id == "body.1"
    for bad in ("a b", "x" * 129, "é".encode(), "a\tb", "a:b", ""):
        answer = server.http.get("/version", headers={"X-Request-Id": bad})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Request-Id")
        assert len(answer.headers["x-request-id"]) == 32  # generated by the server


def lines_of(caplog):
    lines = [record.getMessage() for record in caplog.records if record.name == "jaxllm.server.http"]
    caplog.clear()
    return lines


@pytest.mark.parametrize("error", [RequestFailedError("NaN."), RuntimeError("odd")])
def test_a_failure_is_logged_once_under_both_ids(server, caplog, error):
    caplog.set_level(logging.INFO)
    mine = {"X-Request-Id": "mine-1"}
    for at, status in ((0, 500), (1, 200)):  # as a status, and as an event
        with failing(server, error, at=at):
            body = {"prompt": "Hi", "stream": True}
            url = f"http://127.0.0.1:{server.port}/v1/completions"  # on a new connection: the second one ends
            answer = httpx.post(url, json=body, headers=mine)
        assert (answer.status_code, answer.headers["x-request-id"]) == (status, "mine-1")
        (line,) = lines_of(caplog)
        assert server.serving.calls[-1].request_id in line and "(mine-1)" in line
    with failing(server, error):
        named = {"prompt": "Hi", "request_id": "body-1"}
        url = f"http://127.0.0.1:{server.port}/v1/completions"
        assert httpx.post(url, json=named, headers=mine).status_code == 500
    assert "request body-1 (mine-1) " in lines_of(caplog)[0], "the id in the body is the engine's own"
    with failing(server, error):
        assert post(server).status_code == 500
    assert "(" not in lines_of(caplog)[0]
    with failing(server, OverloadedError("Full.", 1.0)):  # as is every request of a flood
        assert post(server).status_code == 429
    assert server.http.post("/v1/completions", json={}, headers=mine).headers["x-request-id"] == "mine-1"
    assert server.http.get("/nothing", headers=mine).headers["x-request-id"] == "mine-1"
    assert lines_of(caplog) == []


def test_a_clients_id_is_logged_where_requests_are(caplog):
    caplog.set_level(logging.INFO)
    serving = FakeServing()
    with http_server(serving, ServerOptions(enable_log_requests=True)) as port:
        url = f"http://127.0.0.1:{port}/v1/completions"
        assert httpx.post(url, json={"prompt": "Hi"}, headers={"X-Request-Id": "mine-1"}).status_code == 200
        assert lines_of(caplog) == [f"request {serving.calls[-1].request_id} is mine-1"]
        assert httpx.post(url, json={"prompt": "Hi"}).status_code == 200
        assert lines_of(caplog) == []


def test_requests_at_once_are_bounded():
    serving, observer = FakeServing(), Observer()
    with http_server(serving, ServerOptions(max_rpcs=2, api_key=("k",)), observer) as port:
        base = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=base, headers={"authorization": "Bearer k"}) as http:

            def is_free():
                answer = http.post("/tokenize", json={"prompt": "Hi"})
                if answer.status_code != 429:
                    return answer.status_code == 200
                assert answer.json()["error"]["code"] == "rate_limit_exceeded" and answer.headers["retry-after"] == "1"
                return False

            address, key = ("127.0.0.1", port), ["Authorization: Bearer k"]
            with socket.create_connection(address) as reading, socket.create_connection(address) as answering:
                reading.sendall(request(b"{}", key)[:-1])  # a body that has not arrived also holds a place
                serving.delay = 5.0
                answering.sendall(request(b'{"prompt":"Hi"}', key))
                wait_for(lambda: serving.num_live == 1)
                wait_for(lambda: not is_free())
                assert observer.handled[-1] == ("http", "/tokenize", 429)
                assert [http.get(path).status_code for path in ("/health", "/v1/models")] == [200, 200]
                # A call without a key is refused, and takes no other call's place.
                assert httpx.post(f"{base}/tokenize", json={"prompt": "Hi"}).status_code == 401
            wait_for(is_free)  # both clients have disconnected
            serving.delay, serving.failure = 0.0, RequestFailedError("x")
            assert [http.post("/v1/completions", json={"prompt": "Hi"}).status_code for _ in range(4)] == [500] * 4
            assert is_free()


@pytest.mark.parametrize(
    ("state", "health", "live", "ready"),
    [
        *(("serving", 200, 200, 200), ("loading", 503, 200, 503), ("paused", 200, 200, 503)),
        *(("draining", 200, 200, 503), ("hung", 200, 200, 503), ("dead", 503, 503, 503), ("stopped", 503, 503, 503)),
    ],
)
def test_probes(server, state, health, live, ready):
    server.serving.engine.state = state
    server.serving.engine.metrics = Metrics(programs_awaited=9, programs_compiled=4)
    assert [server.http.get(path).status_code for path in ("/health", "/live", "/ready")] == [health, live, ready]
    progress = {"programs": "4 of 9"} if state == "loading" else {}
    assert server.http.get("/ready").json() == {"state": state} | progress
    assert server.http.get("/health").content == b""
    assert server.http.head("/health").status_code == health


def test_other_routes(server):
    assert server.http.get("/metrics").text == "a 1\n"
    assert server.http.get("/load").json()["server_load"] == 3
    assert server.http.get("/version").json().keys() == {"version"}
    answer = server.http.get("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert server.http.delete("/v1/models").status_code == 405


@pytest.mark.parametrize(
    ("path", "code", "message"),
    [
        ("/nothing", "unknown_url", "Unknown path /nothing."),
        ("/redoc", "unknown_url", "Unknown path /redoc."),
        ("/v2", "unknown_url", "Unknown path /v2."),
        ("/%0a" + "x" * 500, "unknown_url", f"Unknown path /\\n{'x' * 126}."),
        ("/v1/models/", "unknown_url", "Unknown path /v1/models/. Did you mean /v1/models?"),
        ("/v1/Completions", "unknown_url", "Unknown path /v1/Completions. Did you mean /v1/completions?"),
        *(
            (path, "unknown_url", f"Unknown path {path}. Did you mean {near}? Set the client's base URL to ")
            for path, near in (
                ("/chat/completions", "/v1/chat/completions"),
                ("/completions", "/v1/completions"),
                ("/responses", "/v1/responses"),
                ("/embeddings", "/v1/embeddings"),
                ("/api/models", "/v1/models"),
                ("/v1/v1/chat/completions", "/v1/chat/completions"),
            )
        ),
        ("/v2/embed", "feature_disabled", "/v2/embed is not served: Cohere's embed API "),
        ("/v1/audio/speech", "feature_disabled", "/v1/audio/speech is not served: "),
    ],
)
def test_a_path_that_is_not_served_is_named_with_what_is_missing(server, path, code, message):
    answer = server.http.get(path)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (404, "not_found", code)
    assert error["message"].startswith(message)


def test_counts_have_closed_labels(server):
    server.observer.handled.clear()
    for number in range(20):
        server.http.request(("PATCH", "MOVE", "PURGE")[number % 3], f"/tea/{number}")
        assert server.http.request("BREW", "/tea").status_code == 400  # not an HTTP method: not even parsed
        server.http.get(f"/v1/models/{number}")
    routes = {route for _, route, _ in server.observer.handled}
    assert routes == {"no route", "/v1/models/{model}"}


# Bodies.


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": ""},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=utf-16"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
def test_other_content_is_415(server, headers):
    answer = server.http.post("/v1/completions", content=b'{"prompt":"a"}', headers=headers)
    assert answer.status_code == 415 and answer.json()["error"]["code"].startswith("content_")


@pytest.mark.parametrize("headers", [{}, {"content-type": "application/x-www-form-urlencoded"}])
def test_ollamas_clients_need_not_say_that_a_body_is_json(server, headers):
    body = b'{"model": "fake", "prompt": "a", "stream": false}'
    assert server.http.post("/api/generate", content=body, headers=headers).json()["done"] is True
    refused = server.http.post("/api/generate", content=body, headers={**headers, "origin": "https://example.org"})
    assert refused.status_code == 403


def test_content_type_may_name_utf8(server):
    headers = {"content-type": "Application/JSON; charset=UTF-8"}
    assert server.http.post("/v1/completions", content=b'{"prompt":"a"}', headers=headers).status_code == 200


def test_what_takes_long_is_done_beside_the_event_loop(server):
    for num_ids, num_off_loop in ((1000, 0), (60_000, 1)):
        server.serving.num_off_loop = 0
        answer = server.http.post("/v1/completions", json={"prompt": list(range(num_ids))})
        assert answer.status_code == 200 and server.serving.num_off_loop == num_off_loop
        assert list(server.serving.calls[-1].prompt) == list(range(num_ids))
    answer = server.http.post("/v1/completions", content=b"[" * 300_000, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    server.serving.num_off_loop, server.serving.num_tokens = 0, 5000
    answer = server.http.post("/tokenize", json={"prompt": "Hi", "return_token_strs": True}).json()
    assert (answer["count"], answer["tokens"], len(answer["token_strs"])) == (5000, list(range(5000)), 5000)
    assert server.serving.num_off_loop == 1
    server.serving.engine.state = "stopped"  # its threads have ended
    assert server.http.post("/tokenize", json={"prompt": "Hi"}).status_code == 200
    assert server.serving.num_off_loop == 1


def test_work_whose_client_has_gone_is_cancelled(server):
    begun, cancelled = threading.Event(), threading.Event()

    async def never(function, *arguments, client):
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    body = json.dumps({"prompt": "a" * 300_000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    usual, server.serving.engine.off_loop = server.serving.engine.off_loop, never
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            assert begun.wait(5) and not cancelled.is_set()
        assert cancelled.wait(5)
    finally:
        server.serving.engine.off_loop = usual


@pytest.mark.ci
def test_bodies_that_are_being_received_hold_so_many_bytes_and_of_one_client_half_of_them():
    options = ServerOptions(max_body_bytes=1_000_000, max_receiving_bytes=3_000_000, api_key=("a", "b", "c"))

    def ask(key, num_bytes=900_000):
        """Send an incomplete body; return the connection, and the immediate answer."""
        connection = socket.create_connection(("127.0.0.1", port))
        head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {num_bytes + 1}\r\n\r\n"
        connection.sendall(head.encode() + b" " * num_bytes)
        connection.settimeout(0.3)
        try:
            return connection, connection.recv(65536)
        except TimeoutError:
            return connection, b""

    with http_server(FakeServing(options=options), options) as port, ExitStack() as connections:
        answers = []
        for key in ("a", "a", "b", "c", "c"):  # 1.5 MB for each, and 3 MB for all
            connection, answer = ask(key)
            connections.enter_context(connection)
            answers.append(answer)
        assert [answer[9:12] for answer in answers] == [b"", b"429", b"", b"", b"429"]
        assert b"retry-after: 1" in answers[1]
        for num_bytes, status in (
            (700_000, b"429"),
            (60_000, b""),
        ):  # b may have it, but not all; small ones do not count
            connection, answer = ask("b", num_bytes)
            connection.close()
            assert answer[9:12] == status
        connections.close()
        for key in ("a", "b"):  # all was given back
            headers = {"authorization": f"Bearer {key}"}
            for _ in range(2):
                content = json.dumps({"prompt": "a" * 900_000})
                answer = httpx.post(
                    f"http://127.0.0.1:{port}/tokenize",
                    content=content,
                    headers=headers | {"content-type": "application/json"},
                )
                assert answer.status_code == 200


# Golden rows of the errors while no engine is loaded.


def test_an_app_can_be_made_before_the_model_is_there():
    serving = FakeServing()
    serving.engine = SimpleNamespace(
        state="loading",
        metrics=Metrics(),
        drains_replicas=False,
        config=SimpleNamespace(enable_sleep_mode=False),
    )
    with http_server(serving) as port:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
            assert [http.get(path).status_code for path in ("/live", "/ready", "/health")] == [200, 503, 503]


def test_a_server_that_is_full_says_so_before_it_reads():
    serving = FakeServing()
    serving.is_full = True
    with http_server(serving) as port:
        for path in ("/v1/completions", "/v1/chat/completions", *REPLIES):
            response = httpx.post(f"http://127.0.0.1:{port}{path}", content=b"{", headers={"content-type": "text/html"})
            assert response.status_code == 429 and response.headers["retry-after"] == "1"
    assert set(serving.askers) == {"loopback"} and len(serving.askers) == 2 + len(REPLIES)
