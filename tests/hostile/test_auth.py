"""Without a valid key every route and method is refused, with every kind of wrong key and disguised paths.

Also checks that the list of routes is complete.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator
from contextlib import suppress

import grpc
import httpx
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from jaxllm.v1 import control_pb2, inference_pb2
from jaxllm_server.access.auth import Keys
from jaxllm_server.http.endpoints import Endpoints
from jaxllm_server.openai.pooling import REPLIES
from jaxllm_server.shared.error_table import AuthError
from jaxllm_server.shared.options import ServerOptions
from tests.hostile.wire import statuses_of
from tests.support.fake_serving import FakeServing, http_server, raw_exchange
from tests.support.grpc_site import bearer
from tests.support.serving_process import ServingProcess

KEY, ADMIN = "sk-1234567890abcdef", "boss-1234567890abcdef"

# Every HTTP route: its method, and its statuses with no key, a wrong one, a user's, an admin's.
ROUTES = {
    ("POST", "/v1/completions"): (401, 401, 400, 400),
    **{("POST", f"/v1/chat/completions{path}"): (401, 401, 400, 400) for path in ("", "/batch")},
    **{("POST", f"/v1/messages{path}"): (401, 401, 400, 400) for path in ("", "/count_tokens")},
    **{("POST", f"/api/{name}"): (401, 401, 400, 400) for name in ("chat", "generate", "embed", "show")},
    **{("GET", f"/api/{name}"): (401, 401, 200, 200) for name in ("tags", "ps", "version")},
    **{("POST", f"/v1/responses{path}"): (401, 401, 400, 400) for path in ("", "/input_tokens", "/compact")},
    ("GET", "/v1/responses"): (401, 401, 405, 405),
    ("POST", "/v1/responses/{response_id}/cancel"): (401, 401, 400, 400),
    ("DELETE", "/v1/responses/{response_id}"): (401, 401, 400, 400),
    ("GET", "/v1/responses/{response_id}"): (401, 401, 400, 400),
    ("GET", "/v1/responses/{response_id}/input_items"): (401, 401, 400, 400),
    ("POST", "/tokenize"): (401, 401, 400, 400),
    ("POST", "/detokenize"): (401, 401, 400, 400),
    ("POST", "/v1/load_lora_adapter"): (401, 401, 403, 400),
    ("POST", "/v1/unload_lora_adapter"): (401, 401, 403, 400),
    ("POST", "/drain"): (401, 401, 403, 400),
    **{("POST", f"/{name}"): (401, 401, 403, 400) for name in ("sleep", "wake_up", "pause", "resume")},
    **{("POST", f"/{name}_weight_update"): (401, 401, 403, 400) for name in ("start", "finish")},
    **{("POST", f"/{name}"): (401, 401, 403, 400) for name in ("init_weight_transfer_engine", "update_weights")},
    **{("GET", f"/{name}"): (401, 401, 403, 400) for name in ("is_sleeping", "is_paused", "weight_info")},
    ("POST", "/inference/v1/generate"): (401, 401, 400, 400),
    **{("POST", f"/v1/audio/{name}"): (401, 401, 415, 415) for name in ("transcriptions", "translations")},
    **{("POST", path): (401, 401, 400, 400) for path in REPLIES},
    ("GET", "/v1/models"): (401, 401, 200, 200),
    ("GET", "/v1/models/{model:path}"): (401, 401, 404, 404),
    ("GET", "/health"): (200, 200, 200, 200),
    ("GET", "/live"): (200, 200, 200, 200),
    ("GET", "/ready"): (200, 200, 200, 200),
    ("GET", "/version"): (401, 401, 200, 200),
    ("GET", "/load"): (401, 401, 403, 200),
    ("GET", "/metrics"): (401, 401, 403, 404),
    **{(method, "/ping"): (200, 200, 200, 200) for method in ("GET", "POST")},
    ("POST", "/invocations"): (401, 401, 400, 400),
    ("GET", "/openapi.json"): (200, 200, 200, 200),
    ("GET", "/"): (200, 200, 200, 200),
    ("GET", "/docs"): (200, 200, 200, 200),
}
# Every gRPC service except health, which is open: whether it requires an admin key.
SERVICES = {
    "jaxllm.v1.InferenceService": False,
    "jaxllm.v1.ControlService": True,
    "grpc.reflection.v1alpha.ServerReflection": False,
    "grpc.reflection.v1.ServerReflection": False,
    "grpc.channelz.v1.Channelz": True,
    "no.Such": False,
}
NO_KEYS = [
    *("Bearer", "Bearer ", "bearer", f"Basic {KEY}", KEY, f"Bearer {KEY[:-1]}", f"Bearer {KEY}x", f"Bearer {KEY} x"),
    *(f"Bearer {KEY.upper()}", f"Bearer {KEY[::-1]}", f"Bearer '{KEY}'", f"Bearer {KEY},{KEY}", f"Bearer={KEY}"),
    *(f"Token {KEY}", f"Bearer Bearer {KEY}", f"{KEY} Bearer", "Bearer " + "a" * 10_000, "Bearer null", "Bearer *"),
    *(f"Bearer\t{KEY}", "Bearer é", "Bearer " + KEY.replace("-", "\u2010"), "Bearer ..", 'Bearer ""', "Bearer %00"),
]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with http_server(FakeServing(), ServerOptions(api_key=(KEY,), admin_api_key=(ADMIN,))) as port:
        yield port


def status(port: int, method: str, path: str, *headers: bytes, host: str = "localhost") -> int:
    lines = [f"{method} {path} HTTP/1.1".encode(), f"Host: {host}".encode(), *headers, b"Connection: close"]
    (found,) = statuses_of(raw_exchange(port, b"\r\n".join([*lines, b"", b""])))
    return found


def authorization(text: str) -> bytes:
    return b"Authorization: " + text.encode()


def test_the_routes_are_these(port: int) -> None:
    own = Endpoints(FakeServing(), ServerOptions(), None, None)  # type: ignore[arg-type]
    found = {(method, route.path) for route in own.routes() for method in route.methods or ()}
    assert found == ROUTES.keys() | {("HEAD", path) for method, path in ROUTES if method == "GET"}


@pytest.mark.parametrize(("route", "expected"), ROUTES.items(), ids=lambda item: str(item)[:40])
def test_what_each_route_says_to_each_key(port: int, route: tuple[str, str], expected: tuple[int, ...]) -> None:
    method, path = route[0], route[1].replace("{model:path}", "other")
    json = [b"Content-Type: application/json"]
    assert status(port, method, path, *json) == expected[0]
    for wrong in NO_KEYS:
        assert status(port, method, path, *json, authorization(wrong)) == expected[1], wrong
    assert status(port, method, path, *json, authorization(f"Bearer {KEY}")) == expected[2]
    assert status(port, method, path, *json, b"X-Api-Key: " + KEY.encode()) == expected[2]
    assert status(port, method, path, *json, authorization(f"bearer  {ADMIN}")) == expected[3]
    if expected[0] == 401:
        for other in ("HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "TRACE", "PROPFIND", "REPORT"):
            assert status(port, other, path) == 401, other


PATHS = r"""
    //v1/models /v1//models /./v1/models /v1/./models /health/../v1/models /health/..;/v1/models
    /health/%2e%2e/v1/models /health%2f..%2fv1/models /%2e/v1/models /%76%31/models /V1/MODELS /v1/models/
    /v1/models?/health /v1/models?path=/health /v1/models;/health /v1/models%00/health /v1/models#/health
    /health;/v1/models /health%3f/v1/models /health/ /health%20 /health%09 /health%00 /HEALTH //health /%68ealth
    /health// /./health /ready/x /v1/models /v1/models/fake /version /load /nothing /v1/completions \v1\models
    /v1\models /\health /health%5c..%5cv1/models /v1/models%ff /%e2%81%84health http://localhost/v1/models
    http://localhost/health/../v1/models http://health/v1/models * /%2f // http://localhost:80/v1/models?/health
    https://localhost/v1/models //localhost/v1/models /.well-known /metrics /docs/ /%64ocs /openapi.json/ /debug
    /admin /collective_rpc /sleep /shutdown /profile
""".split()
HEADERS = [
    *("X-Original-URL: /health", "X-Rewrite-URL: /health", "X-Forwarded-Prefix: /health", "X-Forwarded-Path: /health"),
    *("X-HTTP-Method-Override: GET", "X-Forwarded-For: 127.0.0.1", "X-Real-IP: 127.0.0.1", "Forwarded: for=127.0.0.1"),
    *(name + KEY for name in ("X-Api-Key: Bearer ", "X-Api-Keys: ", "Api-Key: ", "X-Authorization: Bearer ")),
    "Cookie: authorization=Bearer " + KEY,
    *(name + KEY for name in ("Proxy-Authorization: Bearer ", "Authorization : Bearer ", "authorization_: Bearer ")),
    "Authorization: Bearer x\r\nAuthorization: Bearer " + KEY,
    *("X-Forwarded-Host: localhost/health", "X-Forwarded-Proto: https", "Authorization:", "Connection: Authorization"),
]


@pytest.mark.parametrize("path", PATHS)
def test_no_path_in_disguise_is_open(port: int, path: str) -> None:
    refused = 400 if path.startswith("\\v1") else 401
    for host in ("localhost", "127.0.0.1:1", "[::1]"):
        assert status(port, "GET", path, host=host) == refused, host
    for wrong in ("Bearer wrong", "Bearer sk-", f"Bearer {KEY}x", "Basic c2s="):
        assert status(port, "GET", path, authorization(wrong)) == refused, wrong
    # With a key it is not special, either.
    keyed = status(port, "GET", path, authorization(f"Bearer {KEY}"))
    assert keyed in (200, 400, 404, 405) or (keyed == 403 and path in ("/load", "/metrics", "/sleep"))


@pytest.mark.parametrize(
    "path",
    """
        /load /%6coad /load%0A /load?x http://localhost/load /metrics%0a /v1/load_lora_adapter
        /v1/%6coad_lora_adapter /v1/unload_lora_adapter%0a /%76%31/load_lora_adapter
    """.split(),
)
def test_no_path_in_disguise_is_open_to_a_users_key(port: int, path: str) -> None:
    assert status(port, "GET", path, authorization(f"Bearer {KEY}")) == 403
    assert status(port, "GET", path, authorization(f"Bearer {ADMIN}")) in (200, 404, 405)


def test_what_stands_behind_an_open_path_is_not_looked_at(port: int) -> None:
    for path in ("/health?/../v1/models", "/health#/v1/models"):
        answer = raw_exchange(port, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert statuses_of(answer) == [200] and answer.endswith(b"\r\n\r\n"), "health has nothing to say"


@pytest.mark.parametrize("header", HEADERS)
def test_no_other_header_is_a_key(port: int, header: str) -> None:
    for path in ("/v1/models", "/version", "/nothing"):
        assert status(port, "GET", path, header.encode()) in (400, 401)


@pytest.mark.parametrize(
    "host", ["a/v1?", "localhost/health?", "localhost#", "localhost\\health", "health", "..", "a@b"]
)
def test_no_host_opens_a_path(port: int, host: str) -> None:
    assert status(port, "GET", "/v1/models", host=host) in (400, 401, 421)


# gRPC.


@pytest.fixture(scope="module")
def keyed() -> Iterator[ServingProcess]:
    from tests.hostile.conftest import FakeSite

    with FakeSite("--api-key", KEY, "--admin-api-key", ADMIN) as process:
        yield process


def test_the_services_are_these(keyed: ServingProcess) -> None:
    with grpc.insecure_channel(keyed.grpc) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        (told,) = stub.ServerReflectionInfo(iter([asked]), metadata=bearer(KEY))
        assert {service.name for service in told.list_services_response.service} == set(
            """
            jaxllm.v1.InferenceService jaxllm.v1.ControlService grpc.health.v1.Health
            grpc.reflection.v1alpha.ServerReflection
        """.split()
        )


def methods() -> list[tuple[str, bool]]:
    own = [*inference_pb2.DESCRIPTOR.services_by_name.values(), *control_pb2.DESCRIPTOR.services_by_name.values()]
    found = [
        (f"/{service.full_name}/{method.name}", SERVICES[service.full_name])
        for service in own
        for method in service.methods
    ]
    return found + [(f"/{name}/Nothing", is_admin) for name, is_admin in SERVICES.items()]


@pytest.mark.ci
def test_what_each_call_says_to_each_key(keyed: ServingProcess) -> None:
    def code(method: str, *metadata: tuple[str, str | bytes]) -> str:
        # A bidirectional stream, which has the wire format of any kind of call.
        call = channel.stream_stream(method)(iter([b""]), metadata=metadata, timeout=10)
        try:
            list(call)
        except grpc.RpcError:
            pass
        return call.code().name

    with grpc.insecure_channel(keyed.grpc) as channel:
        assert len(methods()) > 20
        for method, is_admin in methods():
            assert code(method) == "UNAUTHENTICATED", method
            for wrong in NO_KEYS:
                if wrong.isascii() and "\t" not in wrong and len(wrong) < 1000:
                    assert code(method, ("authorization", wrong)) == "UNAUTHENTICATED", (method, wrong)
            for name in ("Authorization-x", "x-api-key", "api-key", "cookie", "x-authorization"):
                assert code(method, (name.lower(), f"Bearer {KEY}")) == "UNAUTHENTICATED", (method, name)
            assert code(method, ("authorization-bin", f"Bearer {KEY}".encode())) == "UNAUTHENTICATED"
            if is_admin:
                assert code(method, *bearer(KEY)) == "PERMISSION_DENIED", method
        for method in (
            "/jaxllm.v1.inferenceservice/Generate",
            "//jaxllm.v1.InferenceService/Generate",
            "/grpc.health.v1.Health",
        ):
            assert code(method) == "UNAUTHENTICATED", method
            assert code(method, *bearer(ADMIN), *bearer(ADMIN)) == "UNAUTHENTICATED", method
        assert code("/grpc.health.v1.Health/Check") == "OK"
        for method in (
            "/grpc.health.v1.Health/../../jaxllm.v1.InferenceService/ListModels",
            "/grpc.health.v1.Health/Generate",
        ):
            assert code(method) == "UNIMPLEMENTED", method


def test_every_key_is_compared_whole_whatever_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a check then reveals neither a key that is nearly right nor the part that matches."""
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda *pair: compared.append(pair) or real(*pair))
    keys = Keys((KEY, "another"), (ADMIN,))
    for given in ("x", KEY[:-1] + "x", KEY, "another", ADMIN, KEY * 50):
        compared.clear()
        with suppress(AuthError):
            keys.check(f"Bearer {given}")
        assert len({known for _, known in compared}) == len(compared) == 3
        assert {len(each) for pair in compared for each in pair} == {32}, "digests, not keys"


def test_a_key_is_in_no_log_and_no_answer(keyed: ServingProcess) -> None:
    for key in (f"Bearer {KEY}x", f"Bearer x{ADMIN}"):
        answer = httpx.get(f"{keyed.http}/v1/models", headers={"authorization": key})
        assert answer.status_code == 401 and KEY not in answer.text and ADMIN not in answer.text
    with grpc.insecure_channel(keyed.grpc) as channel:
        for key in (f"Bearer {KEY}x", f"Bearer x{ADMIN}"):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary("/jaxllm.v1.ControlService/GetLoad")(b"", metadata=(("authorization", key),))
            assert KEY not in str(caught.value) and ADMIN not in str(caught.value)
    log = "".join(keyed.log)
    assert KEY not in log and ADMIN not in log and "Traceback" not in log
