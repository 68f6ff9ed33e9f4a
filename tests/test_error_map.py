"""Every way in which a call can fail, provoked for real: what each protocol says, and that it says nothing else.

A status and a reason over gRPC; a status, a code and a type over HTTP; an exception from our own client. Processes and
clients are real; servers are in this process only where the engine has to break.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import signal
import ssl
import statistics
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jaxllm import AsyncClient, errors
from jaxllm.client import AuthError
from jaxllm.client.channel import error_of as exception_of
from jaxllm.client.requests import generate_request
from jaxllm.config import EngineConfig
from jaxllm.embedded import MODEL_DIR
from jaxllm.engine import LLMEngine
from jaxllm.tokenizer import Tokenizer
from jaxllm.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from jaxllm_server.launch import Server
from jaxllm_server.options import ServerOptions
from tests.grpc_site import bearer, details_of, one_loop
from tests.serving_process import ServingProcess

SMALL = ("--precompile", "covering", "--max-num-seqs", "2", "--max-num-batched-tokens", "128")
USER, ADMIN = "user-key", "admin-key"
LONG = {"max_tokens": 480, "ignore_eos": True}
UNLUCKY = 300  # a token whose text cannot be made, every eighth time
LIMIT = 100_000  # bytes of a message and of a body
# What may stand in no answer: traces, addresses, paths, names of exceptions.
SECRETS = re.compile(
    r"Traceback|\.py\b|0x[0-9a-fA-F]{4}|/home|/work|/tmp|/root|/usr|127\.0\.0\.1|<class|[a-z](Error|Exception)\b"
)

Request = inference_pb2.GenerateRequest


class Grpc:
    """The stubs of a channel."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self.inference: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        self.control: Any = control_pb2_grpc.ControlServiceStub(channel)
        self.health: Any = health_pb2_grpc.HealthStub(channel)
        self.reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)


def grpc_failure(error: Any) -> tuple[str, str, type]:
    """Return status, reason and our exception; check that there is no word too many and when to try again."""
    details = details_of(error)
    info = details.get("ErrorInfo")
    assert SECRETS.search(error.details() or "") is None, error.details()
    assert info is None or info.domain == "jaxllm"
    trailers = dict(error.trailing_metadata() or ())
    is_full = info is not None and info.reason == "QUEUE_FULL"
    assert ("grpc-retry-pushback-ms" in trailers) == ("RetryInfo" in details) == is_full
    if is_full:
        assert int(trailers["grpc-retry-pushback-ms"]) == details["RetryInfo"].retry_delay.ToMilliseconds() > 0
    return error.code().name, "" if info is None else info.reason, type(exception_of(error, "the server"))


def over_grpc(call: Callable[[], Any]) -> tuple[str, str, type]:
    """Make a call that has to fail, unary or a stream."""
    with pytest.raises(grpc.RpcError) as caught:
        answer = call()
        if hasattr(answer, "__iter__"):
            list(answer)
    return grpc_failure(caught.value)


def over_http(response: httpx.Response) -> tuple[int, str, str]:
    """Return status, code and type of an error; check its form and when to try again."""
    assert SECRETS.search(response.text) is None, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert ("retry-after" in response.headers) == (response.status_code in (429, 503)), response.headers
    assert response.headers["content-type"] == "application/json"
    return response.status_code, error["code"], error["type"]


def eventually(is_so: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


# A real process with two slots, two places in its queue, and keys.


@pytest.fixture(scope="module")
def server() -> Iterator[ServingProcess]:
    own = ("--max-queued-requests", "2", "--api-key", USER, "--admin-api-key", ADMIN)
    limits = ("--max-body-bytes", f"{LIMIT}", "--grpc-max-message-bytes", f"{LIMIT}")
    with ServingProcess(*SMALL, *own, *limits) as server:
        yield server


@pytest.fixture(scope="module")
def rpc(server: ServingProcess) -> Iterator[Grpc]:
    with grpc.insecure_channel(server.grpc, [("grpc.max_send_message_length", -1)]) as channel:
        yield Grpc(channel)


@pytest.fixture(scope="module")
def http(server: ServingProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.http, headers={"authorization": f"Bearer {USER}"}, timeout=20) as http:
        yield http


def load_of(rpc: Grpc) -> Any:
    return rpc.control.GetLoad(control_pb2.GetLoadRequest(), metadata=bearer(ADMIN))


def is_idle(rpc: Grpc) -> bool:
    load = load_of(rpc)
    return not (load.running or load.waiting or load.kv_blocks_used)


def asked(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Once", "max_tokens": 4} | fields


INVALID = ("INVALID_ARGUMENT", "INVALID_PARAMETER", errors.UserError)
TOO_LONG = ("INVALID_ARGUMENT", "CONTEXT_LENGTH_EXCEEDED", errors.ContextLengthError)
WRONG = (400, "INVALID_PARAMETER", "invalid_request_error")
WRONG_CALLS = [
    ("value", {"sampling": {"top_p": 2.0}}, INVALID, {"top_p": 2.0}, WRONG),
    ("prompt", {"token_ids": {"ids": []}}, INVALID, {"prompt": []}, WRONG),
    ("token id", {"token_ids": {"ids": [99_999]}}, INVALID, {"prompt": [99_999]}, WRONG),
    (
        "unbuilt",
        {"output": {"prompt_logprobs": 1}},
        ("INVALID_ARGUMENT", "UNSUPPORTED_PARAMETER", errors.UnsupportedError),
        {"prompt_logprobs": 1},
        (400, "UNSUPPORTED_PARAMETER", "invalid_request_error"),
    ),
    (
        "prompt of the context's length",
        {"token_ids": {"ids": [5] * 512}},
        TOO_LONG,
        {"prompt": [5] * 512},
        (400, "CONTEXT_LENGTH_EXCEEDED", "invalid_request_error"),
    ),
    (
        "output over the context",
        {"stop": {"max_tokens": 512}},
        TOO_LONG,
        {"max_tokens": 512},
        (400, "CONTEXT_LENGTH_EXCEEDED", "invalid_request_error"),
    ),
    (
        "least output over the context",
        {"stop": {"min_tokens": 512}},
        TOO_LONG,
        {"max_tokens": 512, "min_tokens": 512},
        (400, "CONTEXT_LENGTH_EXCEEDED", "invalid_request_error"),
    ),
    (
        "model",
        {"model": "other"},
        ("NOT_FOUND", "MODEL_NOT_FOUND", errors.NotFoundError),
        {"model": "other"},
        (404, "MODEL_NOT_FOUND", "not_found"),
    ),
]


@pytest.mark.parametrize("row", WRONG_CALLS, ids=lambda row: row[0])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_calls_that_are_wrong(rpc: Grpc, http: httpx.Client, row: Any, stream: bool) -> None:
    _, fields, told, body, answer = row
    method = rpc.inference.StreamGenerate if stream else rpc.inference.Generate
    request = Request(**({"text": "Once"} if "token_ids" not in fields else {}), **fields)
    assert over_grpc(lambda: method(request, metadata=bearer(USER))) == told
    response = http.post("/v1/completions", json=asked(**body) | {"stream": stream})
    assert over_http(response) == answer
    begins = response.json()["error"]["message"].startswith("This model's maximum context length is 512 tokens")
    assert begins == (answer[1] == "CONTEXT_LENGTH_EXCEEDED")


def test_a_violation_names_the_field(rpc: Grpc, http: httpx.Client) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        rpc.inference.Generate(Request(text="a", sampling={"top_p": 2.0}), metadata=bearer(USER))
    (violation,) = details_of(caught.value)["BadRequest"].field_violations
    assert violation.field == "sampling.top_p"
    assert http.post("/v1/completions", json=asked(top_p=2.0)).json()["error"]["param"] == "top_p"
    with pytest.raises(grpc.RpcError) as caught:
        rpc.inference.Generate(Request(token_ids={"ids": [5] * 600}), metadata=bearer(USER))
    metadata = details_of(caught.value)["ErrorInfo"].metadata
    assert (metadata["prompt_tokens"], metadata["max_model_len"]) == ("600", "512")


def test_what_this_server_could_be_but_is_not(rpc: Grpc, http: httpx.Client) -> None:
    disabled = ("FAILED_PRECONDITION", "FEATURE_DISABLED", errors.FeatureDisabledError)
    user, admin = {"metadata": bearer(USER)}, {"metadata": bearer(ADMIN)}
    calls: list[Callable[[], Any]] = [
        lambda: rpc.inference.Embed(inference_pb2.EmbedRequest(text="a"), **user),
        lambda: rpc.inference.Generate(Request(text="a", adapter="b"), **user),
        lambda: rpc.inference.Generate(
            Request(
                chat={
                    "messages": [{"role": "user", "content": "a"}],
                    "tools_json": '[{"type": "function", "function": {"name": "f"}}]',
                }
            ),
            **user,
        ),
        lambda: rpc.control.LoadAdapter(control_pb2.LoadAdapterRequest(), **admin),
        lambda: rpc.control.UnloadAdapter(control_pb2.UnloadAdapterRequest(), **admin),
        lambda: rpc.control.ListAdapters(control_pb2.ListAdaptersRequest(), **admin),
        lambda: rpc.control.StreamKvEvents(control_pb2.StreamKvEventsRequest(), **admin),
    ]
    assert [over_grpc(call) for call in calls] == [disabled] * len(calls)
    body = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    }
    assert over_http(http.post("/v1/chat/completions", json=body)) == (400, "FEATURE_DISABLED", "invalid_request_error")


def test_an_id_that_is_in_use(rpc: Grpc, http: httpx.Client) -> None:
    request = Request(text="Once", request_id="same", stop=LONG)
    stream = rpc.inference.StreamGenerate(request, metadata=bearer(USER))
    next(stream)
    in_use = ("ALREADY_EXISTS", "REQUEST_ID_IN_USE", errors.RequestIdInUseError)
    assert over_grpc(lambda: rpc.inference.Generate(request, metadata=bearer(USER))) == in_use
    response = http.post("/v1/completions", json=asked(request_id="same"))
    assert over_http(response) == (409, "REQUEST_ID_IN_USE", "invalid_request_error")
    stream.cancel()
    eventually(lambda: is_idle(rpc))


@contextmanager
def full_house(rpc: Grpc) -> Iterator[None]:
    """Two run and two wait."""
    request = Request(text="Once", stop=LONG)
    streams = [rpc.inference.StreamGenerate(request, metadata=bearer(USER)) for _ in range(4)]
    eventually(lambda: (load_of(rpc).running, load_of(rpc).waiting) == (2, 2))
    yield
    for stream in streams:
        stream.cancel()
    eventually(lambda: is_idle(rpc))


def test_a_full_queue_is_told_at_once(rpc: Grpc, http: httpx.Client) -> None:
    refused: dict[str, list[float]] = {"grpc": [], "http": []}
    with full_house(rpc):
        while len(refused["grpc"]) < 15:
            began = time.monotonic()
            told = over_grpc(lambda: rpc.inference.Generate(Request(text="a"), metadata=bearer(USER)))
            refused["grpc"].append(time.monotonic() - began)
            assert told == ("RESOURCE_EXHAUSTED", "QUEUE_FULL", errors.OverloadedError)
            began = time.monotonic()
            response = http.post("/v1/completions", json=asked())
            refused["http"].append(time.monotonic() - began)
            assert over_http(response) == (429, "QUEUE_FULL", "rate_limit_error")
        health = httpx.get(f"{http.base_url}/health")
        assert health.status_code == 200, "full is not ill"
    assert {name: statistics.median(times) < 0.02 for name, times in refused.items()} == {"grpc": True, "http": True}


def test_what_is_too_large(rpc: Grpc, http: httpx.Client) -> None:
    text = "a" * (LIMIT + 1)
    told = over_grpc(lambda: rpc.inference.Generate(Request(text=text), metadata=bearer(USER)))
    assert told == ("RESOURCE_EXHAUSTED", "", errors.UserError)  # gRPC's own, without details
    assert over_http(http.post("/v1/completions", json={"prompt": text})) == (
        413,
        "BODY_TOO_LARGE",
        "invalid_request_error",
    )
    response = http.get("/v1/models", headers={"x-long": "a" * 20_000})
    assert over_http(response) == (431, "HEAD_TOO_LARGE", "invalid_request_error")


def test_a_deadline_of_the_client_frees_what_it_held(rpc: Grpc, server: ServingProcess) -> None:
    request = Request(text="Once", stop=LONG)
    late = ("DEADLINE_EXCEEDED", "", errors.DeadlineError)
    for method in (rpc.inference.Generate, rpc.inference.StreamGenerate):
        assert over_grpc(lambda method=method: method(request, timeout=0.1, metadata=bearer(USER))) == late
        eventually(lambda: is_idle(rpc), 1.0)
    with pytest.raises(httpx.ReadTimeout):  # over HTTP to wait no longer is to go away
        key = {"authorization": f"Bearer {USER}"}
        httpx.post(f"{server.http}/v1/completions", json=asked(**LONG), headers=key, timeout=0.1)
    eventually(lambda: is_idle(rpc), 1.0)


def test_a_client_that_cancels_frees_what_it_held(rpc: Grpc, server: ServingProcess) -> None:
    call = rpc.inference.StreamGenerate(Request(text="Once", stop=LONG), metadata=bearer(USER))
    next(call)
    call.cancel()
    assert call.code() is grpc.StatusCode.CANCELLED
    eventually(lambda: is_idle(rpc), 1.0)
    key = {"authorization": f"Bearer {USER}"}
    body = asked(**LONG) | {"stream": True}
    with httpx.stream("POST", f"{server.http}/v1/completions", json=body, headers=key) as response:
        next(response.iter_lines())
    eventually(lambda: is_idle(rpc), 1.0)


def test_while_it_is_paused(rpc: Grpc, http: httpx.Client) -> None:
    not_ready = ("UNAVAILABLE", "NOT_READY", errors.UnavailableError)
    stream = rpc.inference.StreamGenerate(Request(text="Once", stop=LONG), metadata=bearer(USER))
    next(stream)
    rpc.control.PauseGeneration(control_pb2.PauseGenerationRequest(), metadata=bearer(ADMIN))
    reasons = [delta.finish_reason for message in stream for delta in message.deltas]
    assert reasons[-1] == 5  # FINISH_REASON_ABORTED, and the status is OK
    try:
        assert over_grpc(lambda: rpc.inference.Generate(Request(text="a"), metadata=bearer(USER))) == not_ready
        assert over_http(http.post("/v1/completions", json=asked())) == (503, "NOT_READY", "service_unavailable")
        assert http.get("/ready").status_code == 503 and http.get("/live").status_code == 200
        check = health_pb2.HealthCheckRequest()
        eventually(lambda: rpc.health.Check(check).status == health_pb2.HealthCheckResponse.NOT_SERVING, 1.0)
        control = health_pb2.HealthCheckRequest(service="jaxllm.v1.ControlService")
        assert rpc.health.Check(control).status == health_pb2.HealthCheckResponse.SERVING
    finally:
        rpc.control.ResumeGeneration(control_pb2.ResumeGenerationRequest(), metadata=bearer(ADMIN))
    assert http.post("/v1/completions", json=asked()).status_code == 200
    eventually(lambda: rpc.health.Check(check).status == health_pb2.HealthCheckResponse.SERVING, 1.0)


def test_keys_over_grpc(rpc: Grpc) -> None:
    missing = ("UNAUTHENTICATED", "AUTH_MISSING", AuthError)
    unknown = ("UNAUTHENTICATED", "AUTH_INVALID", AuthError)
    admin = ("PERMISSION_DENIED", "ADMIN_REQUIRED", AuthError)
    listed = reflection_pb2.ServerReflectionRequest(list_services="")
    calls: list[Callable[..., Any]] = [
        lambda **own: rpc.inference.Generate(Request(text="a"), **own),
        lambda **own: rpc.inference.StreamGenerate(Request(text="a"), **own),
        lambda **own: rpc.inference.Tokenize(inference_pb2.TokenizeRequest(text="a"), **own),
        lambda **own: rpc.inference.ListModels(inference_pb2.ListModelsRequest(), **own),
        lambda **own: rpc.reflection.ServerReflectionInfo(iter([listed]), **own),
        lambda **own: rpc.control.GetServerInfo(control_pb2.GetServerInfoRequest(), **own),
        lambda **own: rpc.control.Abort(control_pb2.AbortRequest(), **own),
        lambda **own: rpc.control.PauseGeneration(control_pb2.PauseGenerationRequest(), **own),
    ]
    for number, call in enumerate(calls):
        assert over_grpc(call) == missing
        for wrong in ("wrong", USER[:-1], f"{USER}x", f"{USER} x", ""):
            assert over_grpc(lambda call=call, wrong=wrong: call(metadata=bearer(wrong))) == unknown
        assert over_grpc(lambda call=call: call(metadata=(("authorization", f"Basic {USER}"),))) == unknown
        if number >= 5:
            assert over_grpc(lambda call=call: call(metadata=bearer(USER))) == admin
    rpc.control.Abort(control_pb2.AbortRequest(), metadata=bearer(ADMIN))
    rpc.inference.ListModels(inference_pb2.ListModelsRequest(), metadata=bearer(ADMIN))
    assert list(rpc.reflection.ServerReflectionInfo(iter([listed]), metadata=bearer(USER)))
    assert rpc.health.Check(health_pb2.HealthCheckRequest()).status  # without a key
    assert next(rpc.health.Watch(health_pb2.HealthCheckRequest())).status


def test_keys_over_http(server: ServingProcess) -> None:
    routes = {
        "POST": ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"),
        "GET": ("/v1/models", "/v1/models/jaxllm-embedded", "/metrics", "/load", "/version", "/nothing"),
    }
    with httpx.Client(base_url=server.http) as http:
        for method, paths in routes.items():
            for path in paths:
                for key, code in (
                    (None, "AUTH_MISSING"),
                    ("Bearer wrong", "AUTH_INVALID"),
                    (f"Bearer {USER[:-1]}", "AUTH_INVALID"),
                    (f"Basic {USER}", "AUTH_INVALID"),
                    ("", "AUTH_INVALID"),
                ):
                    response = http.request(method, path, headers={} if key is None else {"authorization": key})
                    assert over_http(response) == (401, code, "authentication_error"), (path, key)
                    assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/live", "/ready"):
            assert http.get(path).status_code == 200
        for key in (USER, ADMIN):
            assert http.get("/metrics", headers={"authorization": f"Bearer {key}"}).status_code == 200


def test_what_is_not_there(rpc: Grpc, http: httpx.Client) -> None:
    for path in ("/jaxllm.v1.InferenceService/Nothing", "/jaxllm.v1.Nothing/Generate", "/nothing"):
        call = rpc.channel.unary_unary(path)
        told = over_grpc(lambda call=call: call(b"", metadata=bearer(USER)))
        assert told == ("UNIMPLEMENTED", "", errors.FeatureDisabledError)
    for path in ("/nothing", "/v1/completions/", "/v1", "/V1/models", "/v1/embeddings"):
        assert over_http(http.post(path, json={})) == (404, "ROUTE_NOT_FOUND", "not_found")
    assert over_http(http.get("/v1/models/other")) == (404, "MODEL_NOT_FOUND", "not_found")
    wrong_method = (405, "METHOD_NOT_ALLOWED", "invalid_request_error")
    response = http.get("/v1/completions")
    assert over_http(response) == wrong_method and response.headers["allow"] == "POST"
    assert over_http(http.delete("/v1/models")) == wrong_method
    plain = http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert over_http(plain) == (415, "CONTENT_TYPE", "invalid_request_error")
    broken = http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert over_http(broken) == WRONG


def test_what_is_not_a_message(rpc: Grpc) -> None:
    call = rpc.channel.unary_unary("/jaxllm.v1.InferenceService/Generate")
    for raw in (b"\xff" * 20, b"\x12\x02\xff\xfe", b"\x12\x7f"):  # garbage, a text that is not UTF-8, cut off
        assert over_grpc(lambda raw=raw: call(raw, metadata=bearer(USER))) == INVALID


# A real process with TLS in both directions: while it loads, and while it drains.


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make two authorities, and pairs of key and certificate: of the server, of a client, and of a stranger."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    for authority, names in (("ca", ("server", "client")), ("other", ("stranger",))):
        openssl("req", "-x509", *key, "-keyout", f"{authority}.key", "-out", f"{authority}.pem", "-subj", "/CN=ca")
        for name in names:
            openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
            signing = ("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial", "-days", "2")
            openssl("x509", "-req", "-in", f"{name}.csr", *signing, "-extfile", "names", "-out", f"{name}.pem")
    return folder


def credentials(folder: Path, name: str | None) -> grpc.ChannelCredentials:
    pair = () if name is None else ((folder / f"{name}.key").read_bytes(), (folder / f"{name}.pem").read_bytes())
    return grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes(), *pair)


def https(server: str, folder: Path, name: str | None) -> httpx.Client:
    settings = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    if name is not None:
        settings.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    return httpx.Client(base_url=server, verify=settings, timeout=20)


def test_loading_and_draining_behind_mutual_tls(certificates: Path) -> None:
    pair = ("--ssl-keyfile", str(certificates / "server.key"), "--ssl-certfile", str(certificates / "server.pem"))
    mutual = ("--ssl-ca-certs", str(certificates / "ca.pem"), "--ssl-client-auth")
    server = ServingProcess(*SMALL, *pair, *mutual, ready=False)
    with (
        server,
        grpc.secure_channel(server.grpc, credentials(certificates, "client")) as channel,
        https(server.http, certificates, "client") as http,
    ):
        rpc = Grpc(channel)
        check_loading(rpc, http)
        for name in (None, "stranger"):
            with grpc.secure_channel(server.grpc, credentials(certificates, name)) as stranger:
                with pytest.raises(grpc.RpcError) as caught:
                    Grpc(stranger).health.Check(health_pb2.HealthCheckRequest(), timeout=5)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            with https(server.http, certificates, name) as unknown, pytest.raises(httpx.TransportError):
                unknown.get("/health")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.http.replace('https', 'http')}/health")  # in the clear
        server.wait_for(r"(ready) after")
        assert rpc.inference.Generate(Request(text="a", stop={"max_tokens": 2})).outputs[0].token_ids
        assert http.post("/v1/completions", json=asked()).status_code == 200
        check_draining(server, rpc, http)


def check_loading(rpc: Grpc, http: httpx.Client) -> None:
    not_ready = ("UNAVAILABLE", "NOT_READY", errors.UnavailableError)
    calls: list[Callable[[], Any]] = [
        lambda: rpc.inference.Generate(Request(text="a")),
        lambda: rpc.inference.StreamGenerate(Request(text="a")),
        lambda: rpc.inference.Tokenize(inference_pb2.TokenizeRequest(text="a")),
        lambda: rpc.inference.ListModels(inference_pb2.ListModelsRequest()),
    ]
    assert [over_grpc(call) for call in calls] == [not_ready] * len(calls)
    assert over_http(http.post("/v1/completions", json=asked())) == (503, "NOT_READY", "service_unavailable")
    assert over_http(http.get("/v1/models")) == (503, "NOT_READY", "service_unavailable")
    assert [http.get(path).status_code for path in ("/health", "/ready", "/live")] == [503, 503, 200]
    assert rpc.health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert rpc.control.GetServerInfo(control_pb2.GetServerInfoRequest()).state == control_pb2.SERVER_STATE_LOADING
    # A request that is wrong is told so even now? No: what is right is known once there is a model.
    assert over_grpc(lambda: rpc.inference.Generate(Request(text="a", sampling={"top_p": 2.0}))) == not_ready


def check_draining(server: ServingProcess, rpc: Grpc, http: httpx.Client) -> None:
    stream = rpc.inference.StreamGenerate(Request(text="Once", stop=LONG))
    next(stream)
    server.signal(signal.SIGTERM)
    eventually(
        lambda: rpc.health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    )
    draining = ("UNAVAILABLE", "DRAINING", errors.DrainingError)
    assert over_grpc(lambda: rpc.inference.Generate(Request(text="a"))) == draining
    assert over_http(http.post("/v1/completions", json=asked())) == (503, "DRAINING", "service_unavailable")
    assert [http.get(path).status_code for path in ("/ready", "/live")] == [503, 200]
    num_tokens = 1 + sum(len(delta.token_ids) for message in stream for delta in message.deltas)
    assert num_tokens >= LONG["max_tokens"] - 3 and stream.code() is grpc.StatusCode.OK
    assert server.wait(20.0) == 0


# Servers in this process: their engines can be made to fail.


@pytest.fixture(scope="module")
def run() -> Iterator[Any]:
    with one_loop() as run:
        yield run


def new_server(**options: Any) -> Server:
    config = EngineConfig(
        model=str(MODEL_DIR), precompile="covering", max_num_seqs=2, max_num_batched_tokens=128, num_kv_blocks=24
    )
    return Server(config, ServerOptions(**{"port": 0, "grpc_port": 0, "log_stats_interval": 0.0, **options}))


@asynccontextmanager
async def clients_of(server: Server) -> AsyncIterator[tuple[Grpc, httpx.AsyncClient, AsyncClient]]:
    options = server.options
    assert server.grpc is not None
    target = f"unix:{options.grpc_uds}" if options.grpc_uds else f"127.0.0.1:{server.grpc.port}"
    transport = httpx.AsyncHTTPTransport(uds=options.uds)
    url = "http://localhost" if options.uds else f"http://127.0.0.1:{server.http_port}"
    async with (
        grpc.aio.insecure_channel(target) as channel,
        httpx.AsyncClient(transport=transport, base_url=url, timeout=20) as http,
        AsyncClient(target, retries=False) as client,
    ):
        yield Grpc(channel), http, client


async def failure_of(call: Any) -> tuple[str, str, type]:
    """Await a call or read a stream that has to fail."""
    with pytest.raises(grpc.RpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    return grpc_failure(caught.value)


async def events_of(http: httpx.AsyncClient, **fields: Any) -> list[Any]:
    """Read a stream of events that fails on its way; return what the events hold."""
    async with http.stream("POST", "/v1/completions", json=asked(**fields) | {"stream": True}) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    assert SECRETS.search("".join(lines)) is None
    events = [json.loads(line) for line in lines[:-1]]
    assert len(events) > 1 and "error" in events[-1]
    assert all(choice["finish_reason"] is None for event in events[:-1] for choice in event["choices"])
    return events


def test_unix_sockets_and_a_request_that_takes_too_long(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLMEngine, "step", slowly(LLMEngine.step))
    late = ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", errors.DeadlineError)

    async def check() -> None:
        server = new_server(
            uds=str(tmp_path / "http"), grpc_uds=str(tmp_path / "grpc"), request_timeout=1.0, max_queued_requests=8
        )
        async with opened(server):
            await server.engine.start()
            await ask(server)
        assert not (tmp_path / "grpc").exists()

    async def ask(server: Server) -> None:
        assert {(tmp_path / name).stat().st_mode & 0o777 for name in ("http", "grpc")} == {0o700}
        async with clients_of(server) as (rpc, http, client):
            assert (await client.generate("Once", max_tokens=2)).token_ids
            assert (await http.post("/v1/completions", json=asked())).status_code == 200
            request = Request(text="Once", stop={"max_tokens": 200, "ignore_eos": True})
            long = {"max_tokens": 200, "ignore_eos": True}
            assert await failure_of(rpc.inference.Generate(request)) == late
            assert await failure_of(rpc.inference.StreamGenerate(request)) == late
            response = await http.post("/v1/completions", json=asked(**long))
            assert over_http(response) == (504, "DEADLINE_EXCEEDED", "timeout")
            assert response.headers["x-should-retry"] == "false"
            error = (await events_of(http, **long))[-1]["error"]
            assert (error["code"], error["type"]) == ("DEADLINE_EXCEEDED", "timeout")
            # What can never fit the pool of 24 blocks, though it fits the context.
            response = await http.post("/v1/completions", json=asked(prompt=[5] * 400))
            assert over_http(response) == (400, "CONTEXT_LENGTH_EXCEEDED", "invalid_request_error")
            assert await failure_of(rpc.inference.Generate(Request(token_ids={"ids": [5] * 400}))) == TOO_LONG

    run(check())


@asynccontextmanager
async def opened(server: Server) -> AsyncIterator[None]:
    """Open the ports, and close them whatever happens."""
    await server.open()
    try:
        yield
    finally:
        await server._close(0.1)


def slowly(step: Callable[[LLMEngine], Any], seconds: float = 0.01) -> Callable[[LLMEngine], Any]:
    def slow(engine: LLMEngine) -> Any:
        time.sleep(seconds)
        return step(engine)

    return slow


def test_one_request_fails_then_the_engine_hangs_then_it_dies(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = ("INTERNAL", "ENGINE_ERROR", errors.RequestFailedError)
    lost = ("UNAVAILABLE", "ENGINE_DEAD", errors.EngineDeadError)
    real, seen = Tokenizer.token_text, itertools.count(1)

    def token_text(tokenizer: Tokenizer, token: int) -> str:
        if token == UNLUCKY and not next(seen) % 8:
            raise RuntimeError("secret of /home/x at 0xdeadbeef")
        return real(tokenizer, token)

    def die(engine: LLMEngine) -> Any:
        raise SystemError("secret of /home/x at 0xdeadbeef")

    monkeypatch.setattr(Tokenizer, "token_text", token_text)

    async def one_fails(rpc: Grpc, http: httpx.AsyncClient, client: AsyncClient) -> None:
        # Only who wants log-probabilities asks for a token's text, and only these say this token.
        own: dict[str, Any] = {"temperature": 0, "logit_bias": {UNLUCKY: 100.0}, "logprobs": 0, "max_tokens": 40}
        request = generate_request("Once", own)
        other = asyncio.ensure_future(client.generate("Once", max_tokens=200, ignore_eos=True))
        assert await failure_of(rpc.inference.Generate(request)) == failed
        assert await failure_of(rpc.inference.StreamGenerate(request)) == failed
        response = await http.post("/v1/completions", json=asked(**own))
        assert over_http(response) == (500, "ENGINE_ERROR", "server_error")
        error = (await events_of(http, **own))[-1]["error"]
        assert (error["code"], error["type"]) == ("ENGINE_ERROR", "server_error")
        assert len((await other).token_ids) == 200
        assert (await http.get("/health")).status_code == 200

    async def it_hangs(server: Server, rpc: Grpc, http: httpx.AsyncClient, client: AsyncClient) -> None:
        real_step = LLMEngine.step
        monkeypatch.setattr(LLMEngine, "step", slowly(real_step, 1.0))
        late = asyncio.ensure_future(client.generate("Once", max_tokens=1))
        while server.engine.state != "hung":
            await asyncio.sleep(0.01)
        not_ready = ("UNAVAILABLE", "NOT_READY", errors.UnavailableError)
        assert await failure_of(rpc.inference.Generate(Request(text="a"))) == not_ready
        response = await http.post("/v1/completions", json=asked())
        assert over_http(response) == (503, "NOT_READY", "service_unavailable")
        assert (await http.get("/ready")).status_code == 503
        assert (await late).token_ids
        monkeypatch.setattr(LLMEngine, "step", real_step)

    async def engine_dies(server: Server, rpc: Grpc, http: httpx.AsyncClient, client: AsyncClient) -> None:
        long = {"max_tokens": 180, "ignore_eos": True}
        watch = rpc.health.Watch(health_pb2.HealthCheckRequest())
        while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
            pass  # it still says that the engine hangs
        stream = client.stream("Once", **long)
        await anext(stream)
        events = asyncio.ensure_future(events_of(http, **long))
        waits = asyncio.ensure_future(client.generate("Once", **long))
        await asyncio.sleep(0.1)
        monkeypatch.setattr(LLMEngine, "step", die)
        with pytest.raises(errors.EngineDeadError):
            await stream.result()
        assert stream.so_far.token_ids
        # The process says so for a moment before it ends.
        assert await failure_of(rpc.inference.Generate(Request(text="a"), wait_for_ready=False)) == lost
        response = await http.post("/v1/completions", json=asked())
        assert over_http(response) == (503, "ENGINE_DEAD", "service_unavailable")
        assert [(await http.get(path)).status_code for path in ("/health", "/live", "/ready")] == [503] * 3
        assert (await events)[-1]["error"]["code"] == "ENGINE_DEAD"
        with pytest.raises(errors.EngineDeadError):
            await waits
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING

    async def check() -> None:
        server = new_server(hang_timeout=0.3)
        running = asyncio.ensure_future(server.run())
        while server.engine.state != "serving" and not running.done():
            await asyncio.sleep(0.01)
        async with clients_of(server) as clients:
            await one_fails(*clients)
            await it_hangs(server, *clients)
            await engine_dies(server, *clients)
        assert await running == 1

    run(check())


def test_tls_without_certificates_of_clients(run: Any, certificates: Path) -> None:
    """The engine of this server is never started, so that its answers are those of one that loads."""

    async def check() -> None:
        server = new_server(ssl_keyfile=str(certificates / "server.key"), ssl_certfile=str(certificates / "server.pem"))
        async with opened(server):
            await ask(server)

    async def ask(server: Server) -> None:
        assert server.grpc is not None
        target, authority = f"127.0.0.1:{server.grpc.port}", certificates / "ca.pem"
        async with (
            AsyncClient(target, ssl_ca_certs=authority, retries=False) as client,
            AsyncClient(target, retries=False) as plain,
            httpx.AsyncClient(verify=ssl.create_default_context(cafile=str(authority))) as http,
        ):
            with pytest.raises(errors.UnavailableError, match="loaded"):
                await client.generate("a")
            with pytest.raises(errors.UnavailableError, match="reached"):
                await plain.generate("a", timeout=2.0)
            url = f"https://localhost:{server.http_port}"
            assert over_http(await http.post(f"{url}/v1/completions", json=asked()))[:2] == (503, "NOT_READY")
            with pytest.raises(httpx.TransportError):
                await http.get(f"http://localhost:{server.http_port}/health")
        async with httpx.AsyncClient() as trusting_others:
            with pytest.raises(httpx.TransportError):
                await trusting_others.get(f"{url}/health")

    run(check())
