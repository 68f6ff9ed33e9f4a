"""Errors and logs disclose no internals of the server, and have one line each.

Errors of a broken server are in test_error_map_phases.
"""

from __future__ import annotations

import builtins
import inspect
import json
import re
from typing import Any

import grpc
import httpx
import pytest

from jaxllm import errors
from jaxllm.v1 import control_pb2, inference_pb2
from tests.hostile.test_raw_http import NO_HTTP
from tests.hostile.wire import address_of
from tests.support.failures import SECRETS
from tests.support.fake_serving import raw_exchange
from tests.support.grpc_site import details_of
from tests.support.serving_process import ServingProcess

# Names of exceptions, ours and Python's, and of classes of the server.
CLASSES = re.compile(
    r"\b("
    + "|".join(
        name
        for module in (builtins, errors)
        for name, own in vars(module).items()
        if inspect.isclass(own) and issubclass(own, BaseException)
    )
    + r"|NoneType|dict|SamplingParams|GenerateRequest|LLMEngine|AsyncLLM|object at|site-packages|google\.protobuf)\b"
)
ADDRESS = re.compile(r"0x[0-9a-fA-F]{3,}")
EVIL = [
    *("a\r\nERROR forged line", "a\nb", "\x1b[31mred\x1b[0m", "a\0b", "\u2028", "\x85", "\u202eevil"),
    *("\x9b31m", "\x7f"),
]


def tells_nothing(text: str) -> None:
    for pattern in (SECRETS, CLASSES, ADDRESS):
        assert (found := pattern.search(text)) is None, (found, text)


def http_errors() -> list[tuple[str, str, Any]]:
    """Return method, path and body of requests that fail, each differently."""
    wrong: list[dict[str, Any]] = [
        *({"prompt": value} for value in (None, 5, {}, [], "", [[]], [None], [5, "a"], [10**9], [-1], "a" * 100_000)),
        *({"prompt": "a", "temperature": value} for value in (-1, "hot", [], {}, True, 10**400, 1e308 * 10)),
        *({"prompt": "a", "top_p": value} for value in (0, 2, "x")),
        *({"prompt": "a", "max_tokens": value} for value in (0, -1, 2**70, 1.5, "x", 100_000)),
        *({"prompt": "a", "stop": value} for value in ([""], [1], {}, ["a"] * 17, "x" * 1000)),
        *({"prompt": "a", "logit_bias": value} for value in ({"x": 1}, {"99999999": 1}, [1], {"5": "x"}, {"5": None})),
        *({"prompt": "a", "model": value} for value in (5, "other", "../../etc/passwd", "/opt/x", "a" * 10_000)),
        *(
            {"prompt": "a", name: 1, "temperature": -1}  # invalid, since most unknown fields are ignored
            for name in ("nothing", "__class__", "self", "guided_json", "prompt_embeds", "lora")
        ),
        *({"prompt": "a", "request_id": value} for value in ("", 5, "a b", "x" * 1000, *EVIL)),
        *({"prompt": "a", "cache_salt": value} for value in ("", 5, *EVIL)),
        *({"prompt": "a", "user": value, "temperature": -1} for value in EVIL),
        *({"prompt": "a", evil: 1, "temperature": -1} for evil in EVIL),
        *(
            {"prompt": "a", "response_format": value}
            for value in (1, {"type": 5}, {"type": "json_schema"}, {"type": "x"}, *({"type": evil} for evil in EVIL))
        ),
        *({"prompt": "a", "stream_options": value} for value in (1, {"x": 1}, {"include_usage": 1})),
        *({"prompt": "a", "vllm_xargs": value} for value in (1, {"a": object.__name__}, {"a": []})),
    ]
    chats: list[Any] = [
        *({"messages": value} for value in (None, 5, "a", [], [5], [{}], [{"role": 5}], [{"role": "user"}])),
        *({"messages": [{"role": "user", "content": value}]} for value in (5, {}, [5], [{"type": "x"}], [{"type": 1}])),
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}
            ]
        },
        *(
            {"messages": [{"role": "user", "content": "a"}], "tools": value}
            for value in (5, [5], [{}], [{"type": "x"}])
        ),
        *({"messages": [{"role": "user", "content": "a"}], "tool_choice": value} for value in (5, "x", {}, "required")),
        {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ ''.__class__ }}"},
        *(
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": value}
            for value in (5, {"tools": 1})
        ),
    ]
    responses: list[Any] = [
        *({"input": value} for value in (None, 5, [], [5], [{}], [{"type": "x"}], [{"id": "/etc/passwd"}])),
        *({"input": "a", "tools": value} for value in (5, [5], [{}], [{"type": "x"}], [{"type": "function"}])),
        *({"input": "a", "text": value} for value in (5, {"x": 1}, *({"format": {"type": evil}} for evil in EVIL))),
        *({"input": "a", "previous_response_id": value} for value in (5, *EVIL, *(f"resp_{evil}" for evil in EVIL))),
    ]
    return [
        *(("POST", "/v1/completions", body) for body in wrong),
        *(("POST", "/v1/chat/completions", body) for body in chats),
        *(("POST", "/v1/responses", body) for body in responses),
        *(("POST", "/tokenize", body) for body in ({}, {"prompt": 5}, {"messages": 5}, {"prompt": "a", "model": "x"})),
        *(("POST", "/detokenize", body) for body in ({}, {"tokens": "a"}, {"tokens": [10**9]}, {"tokens": [None]})),
        *(
            ("GET", path, None)
            for path in ("/nothing", "/v1/models/other", "/v1/completions", "/%ff", "/%00", "/../etc")
        ),
        *(
            ("POST", "/v1/completions", raw)
            for raw in (b"", b"{", b"[]", b"\xff", b"1", b'{"a":NaN}', b'{"a":1,"a":1}')
        ),
    ]


@pytest.mark.ci
def test_no_http_error_tells_what_is_inside(server: ServingProcess) -> None:
    kinds = set()
    with httpx.Client(base_url=server.http, timeout=20) as http:
        for method, path, body in http_errors():
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = http.request(method, path, content=content, headers={"content-type": "application/json"})
            assert 400 <= answer.status_code < 500, (method, path, body, answer.text)
            tells_nothing(answer.text)
            assert answer.text.isprintable(), answer.text
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"} and len(answer.content) < 1000
            kinds.add((path, error["code"], re.sub(r"'.*?'|[0-9]+|`.*?`", "", error["message"])))
            for name, value in answer.headers.items():
                tells_nothing(f"{name} {value}")
    assert len(kinds) >= 50, len(kinds)
    for raw in NO_HTTP.values():
        tells_nothing(raw_exchange(address_of(server)[1], raw + b"\r\n\r\n", timeout=5).decode("latin-1"))


def grpc_errors() -> list[tuple[str, Any]]:
    """Return method and request of calls that fail."""
    ask, chat = inference_pb2.GenerateRequest, {"messages": [{"role": "user", "content": "a"}]}
    plain = [evil for evil in EVIL if "\0" not in evil]
    requests: list[Any] = [
        ask(),
        *(ask(text=text) for text in ("", "a" * 100_000)),
        *(ask(token_ids={"ids": ids}) for ids in ([], [2**31], [5] * 1000)),
        *(ask(text="a", sampling={name: value}) for name, value in (("top_p", 2), ("temperature", -1), ("min_p", 9))),
        *(ask(text="a", sampling={name: float("nan")}) for name in ("top_p", "temperature", "presence_penalty")),
        *(ask(text="a", sampling={"n": n}) for n in (0, 129, 10**6)),
        *(ask(text="a", sampling={"logit_bias": {token: 1.0}}) for token in (9999, 2**31)),
        *(ask(text="a", sampling={"extra_args": {text: {"values": [1.0]}}}) for text in plain[:4]),
        *(ask(text="a", stop={"stop_strings": stops}) for stops in ([""], ["a"] * 17, ["x" * 1000])),
        *(ask(text="a", stop={"max_tokens": number}) for number in (0, 10**6)),
        *(ask(text="a", model=model) for model in ("other", "/opt/x", "x" * 10_000, *plain)),
        *(ask(text="a", request_id=text) for text in ("a b", "x" * 1000, *EVIL)),
        *(ask(text="a", cache_salt=text) for text in ("a b", "x" * 1000, *EVIL)),
        *(ask(text="a", adapter=text) for text in ("a", *plain)),
        *(ask(text="a", extensions={text: 1}) for text in ("a", *plain)),
        *(ask(text="a", structured_output={"regex": f"({text}"}) for text in plain),
        ask(text="a", structured_output={"structural_tag": "a"}),
        ask(text="a", output={"token_bytes": True}),
        ask(text="a", output={"logprobs": 10**6}),
        ask(text="a", priority=5),
        *(ask(chat=chat | {"tools_json": text}) for text in ("{", "[5]", "[" * 100_000, '[{"a": NaN}]', "5", "[{}]")),
        ask(chat=chat | {"template_kwargs": {"chat_template": "{{ 7 * 7 }}"}}),
        ask(chat=chat | {"tool_choice": 77}),
        ask(chat={}),
        ask(text="a", stop={"time_limit": {"seconds": -1}}),
    ]
    calls: list[tuple[str, Any]] = [("jaxllm.v1.InferenceService/Generate", request) for request in requests]
    return [
        *calls,
        ("jaxllm.v1.InferenceService/Embed", inference_pb2.EmbedRequest(text="a")),
        ("jaxllm.v1.InferenceService/Detokenize", inference_pb2.DetokenizeRequest(token_ids=[2**31])),
        ("jaxllm.v1.InferenceService/Tokenize", inference_pb2.TokenizeRequest()),
        ("jaxllm.v1.InferenceService/Nothing", inference_pb2.TokenizeRequest()),
        ("jaxllm.v1.ControlService/LoadAdapter", control_pb2.LoadAdapterRequest()),
        ("jaxllm.v1.ControlService/PauseGeneration", control_pb2.PauseGenerationRequest(mode=77)),
    ]


def test_no_grpc_error_tells_what_is_inside(server: ServingProcess) -> None:
    kinds = set()
    with grpc.insecure_channel(server.grpc) as channel:
        for method, request in grpc_errors():
            call: Any = channel.unary_unary(f"/{method}").future(request.SerializeToString(), timeout=20)
            error = call.exception()
            assert error is not None, (method, request)
            assert error.code().name not in ("INTERNAL", "UNKNOWN"), (method, request, error)
            details = details_of(error)
            tells_nothing(error.details() + "".join(str(own) for own in details.values()))
            kinds.add((method, error.code().name, re.sub(r"'.*?'|[0-9]+|`.*?`", "", error.details())))
    assert len(kinds) >= 35, len(kinds)


LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ [A-Z]+ [\w.]+: ")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202e]")


def test_what_a_client_writes_is_one_line_of_the_log_and_moves_no_cursor(server: ServingProcess) -> None:
    start = len(server.log)
    with httpx.Client(base_url=server.http, timeout=20) as http:
        for evil in EVIL:
            asked = {"prompt": evil, "max_tokens": 2, "stop": [evil], "user": evil, "metadata": {"a": evil}}
            assert http.post("/v1/completions", json=asked).status_code == 200
            http.post("/v1/completions", json=asked | {"model": evil})
            http.post("/v1/completions", json=asked | {"request_id": evil})
            http.get(f"/v1/models/{evil!r}")
        assert (
            http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "request_id": "mine-7"}).status_code
            == 200
        )
    for header in (b"X-Request-Id", b"traceparent", b"User-Agent", b"Origin", b"Host", b"Authorization"):
        for value in (b"a\x1b[31m", b"a\tb", b"a\x85b", b"\xff\xfe", b"a\xe2\x80\xa8b", b"%0d%0aERROR forged"):
            raw = b"GET /version HTTP/1.1\r\nHost: localhost\r\n%b: %b\r\nConnection: close\r\n\r\n" % (header, value)
            raw_exchange(address_of(server)[1], raw)
    with grpc.insecure_channel(server.grpc) as channel:
        for evil in EVIL:
            request = inference_pb2.GenerateRequest(text=evil, stop={"max_tokens": 2, "stop_strings": [evil]})
            channel.unary_unary("/jaxllm.v1.InferenceService/Generate")(request.SerializeToString(), timeout=20)
            request.request_id = evil
            with pytest.raises(grpc.RpcError):
                channel.unary_unary("/jaxllm.v1.InferenceService/Generate")(request.SerializeToString(), timeout=20)
        request = inference_pb2.GenerateRequest(text="a", stop={"max_tokens": 1})
        for value in ("a b", "\t", "x" * 1000):
            with pytest.raises(grpc.RpcError):
                metadata = (("x-request-id", value),)
                channel.unary_unary("/jaxllm.v1.InferenceService/Generate")(
                    request.SerializeToString(), metadata=metadata
                )
    httpx.post(f"{server.http}/v1/completions", json={"prompt": "a", "max_tokens": 1, "request_id": "mine-8"})
    server.wait_for(r"request (mine-8)")
    log = server.log[start:]
    assert any("mine-7" in line for line in log) and len(log) > 2 * len(EVIL)
    for line in log:
        assert "forged" not in line or "'a\\r\\nERROR forged line'" in line, line
        text = line.rstrip("\n")
        assert CONTROL.search(text) is None, line
        assert LINE.match(text) or text in ("WARNING Invalid HTTP request received.",), line
