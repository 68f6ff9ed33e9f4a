"""The identity of a call's client, its limit of concurrent requests, and the prefix cache between clients."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc.aio
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm import Client, SamplingParams, errors
from jaxllm.config import EngineConfig
from jaxllm.embedded import MODEL_DIR
from jaxllm.engine.input_processor import read_prompt
from jaxllm.text.tokenizer import load_tokenizer
from jaxllm.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from jaxllm_server.access.auth import Keys
from jaxllm_server.access.client_quota import CallLimit, Shares, UrgentShares, client_of, host_of_peer, peer_of
from jaxllm_server.generation.calls import Call
from jaxllm_server.serving import Serving
from jaxllm_server.shared.options import ServerOptions
from tests.faults import fairness
from tests.support.fake_serving import FakeServing, http_server
from tests.support.grpc_site import site
from tests.support.serving_process import ServingProcess

LONG = [20 + number % 60 for number in range(100)]  # six blocks


@pytest.mark.parametrize(
    ("key", "host", "name"),
    [
        ("key-0", "10.0.0.1", "key-0"),
        (None, "10.0.0.1", "10.0.0.1"),
        (None, "::ffff:10.0.0.1", "10.0.0.1"),
        (None, "127.0.0.1", "loopback"),
        (None, "127.9.9.9", "loopback"),
        (None, "::1", "loopback"),
        (None, "::ffff:127.0.0.1", "loopback"),
        (None, "2001:DB8:0::1", "2001:db8::/64"),
        (None, "2001:db8::ffff:0:0:1", "2001:db8::/64"),
        (None, "2001:db8:0:1::1", "2001:db8:0:1::/64"),
        (None, "[fe80::1%eth0]", "fe80::/64"),
        (None, "", ""),
        (None, None, ""),
        (None, "/tmp/socket", ""),
    ],
)
def test_a_client_is_its_key_or_else_its_address(key: str | None, host: str | None, name: str) -> None:
    assert client_of(key, host) == name


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:127.0.0.1:5000", "127.0.0.1"),
        ("ipv6:[::1]:5000", "[::1]"),
        ("ipv6:%5B::1%5D:5000", "[::1]"),
        ("unix:", None),
        ("unix:/tmp/a:b", None),
        ("unix:/tmp/jaxllm-grpc-a/ipv4:10.0.0.1:5000", "10.0.0.1"),  # through the filter
        ("unix:/tmp/jaxllm-grpc-a/ipv6:%5B::1%5D:5000", "[::1]"),
        ("unix:/tmp/jaxllm-grpc-a/unix:17", None),
        ("", None),
    ],
)
def test_what_grpc_calls_a_peer(peer: str, host: str | None) -> None:
    assert host_of_peer(peer_of(peer)) == host


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(-3, 3), st.integers(1, 5), st.integers(0, 9)), max_size=40)
)
def test_a_client_is_ahead_of_others_with_half_of_the_slots(calls: list[tuple[str, int, int, int]]) -> None:
    """A client is preferred up to half of the slots. Calls are of random clients, priorities and lengths."""
    urgent, num_slots = UrgentShares(), 8
    with ExitStack() as rest:
        ends: list[tuple[int, ExitStack]] = []
        ahead: Counter[str] = Counter()

        def end(client: str, count: int) -> None:
            ahead[client] -= count

        for number, (client, asked, count, lasts) in enumerate(calls):
            for at, ended in ends:
                if at == number:
                    ended.close()
            stack = rest.enter_context(ExitStack())
            given_one = stack.enter_context(urgent.place(client, asked, count, num_slots))
            had_room = ahead[client] + count <= num_slots // 2
            assert given_one == (asked if asked >= 0 or had_room else 0)
            if given_one < 0:
                ahead[client] += count
                stack.callback(end, client, count)
            assert max(ahead.values(), default=0) <= num_slots // 2
            ends.append((number + 1 + lasts, stack))
    assert not urgent.bound.held and not urgent.bound.total


def test_a_share_is_held_as_long_as_the_work_and_no_client_is_remembered() -> None:
    shares = Shares(3)
    with shares.place("a", 2):
        shares.check("a")
        for count in (2, 3):
            with pytest.raises(errors.OverloadedError, match="2 of 3"):
                shares.check("a", count)
        with shares.place("b", 3), shares.place("", 3), pytest.raises(RuntimeError):
            with shares.place("a", 1):
                raise RuntimeError
        shares.check("a", 1)
        with pytest.raises(errors.OverloadedError):
            shares.check("b", 4)
    shares.check("c")
    assert shares.bound.held == {}
    with Shares(None).place("a", 10**6):
        pass


def test_places_are_all_connections_together_and_those_of_a_unix_socket_have_one_name() -> None:
    places = CallLimit("calls", 4, 2)
    with ExitStack() as held:
        for peer in ("ipv4:1:1", "ipv4:1:1", "unix:"):
            held.enter_context(places.place(peer))
        with pytest.raises(errors.OverloadedError, match="This connection already has 2 calls"):
            held.enter_context(places.place("ipv4:1:1"))
        held.enter_context(places.place("unix:"))
        for peer in ("ipv4:1:2", "unix:"):
            with pytest.raises(errors.OverloadedError, match="already handling 4 calls"):
                held.enter_context(places.place(peer))
    assert (places.bound.total, places.bound.held) == (0, {})
    with ExitStack() as held:
        for _ in range(3):
            held.enter_context(places.place("unix:"))


def test_one_call_cannot_ask_for_more_than_the_share() -> None:
    assert ServerOptions().most_sequences == 2048
    assert ServerOptions(max_sequences_per_client=5).most_sequences == 5
    assert ServerOptions(max_sequences_per_client=5000).most_sequences == 2048
    with pytest.raises(errors.UserError, match="max_sequences_per_client is out of range: 0"):
        ServerOptions(max_sequences_per_client=0)


@pytest.fixture(scope="module")
def server() -> Iterator[ServingProcess]:
    with ServingProcess(*fairness.SERVER, "--admin-api-key", "boss", "--enable-prompt-tokens-details") as server:
        yield server


def ask_http(server: ServingProcess, key: str, **fields: Any) -> httpx.Response:
    body = {"prompt": LONG, "max_tokens": 2, **fields}
    return httpx.post(f"{server.http}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})


def cached_http(server: ServingProcess, key: str, **fields: Any) -> int:
    return ask_http(server, key, **fields).json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def cached_grpc(server: ServingProcess, key: str, **fields: Any) -> int:
    with Client(server.grpc, api_key=key, retries=False) as client:
        return client.generate(LONG, max_tokens=2, **fields).usage.cached_prompt_tokens


@pytest.mark.ci
def test_no_key_finds_the_prompts_of_another(server: ServingProcess) -> None:
    """Over both protocols, with and without a salt; the admin's key counts as another key."""
    assert cached_http(server, "small-0") == 0
    assert cached_http(server, "small-0") == cached_grpc(server, "small-0") == 96
    for key in ("small-1", "boss"):
        assert cached_grpc(server, key) == 0
        assert cached_http(server, key) == 96
    assert cached_http(server, "small-0", cache_salt="s") == 0 == cached_grpc(server, "small-1", cache_salt="s")
    assert cached_grpc(server, "small-0", cache_salt="s") == 96 == cached_http(server, "small-1", cache_salt="s")
    assert ask_http(server, "small-2", cache_salt="key-1:").status_code == 400  # names another client's key


def test_no_header_says_who_a_client_is() -> None:
    """Headers do not change a client's identity; uvicorn trusts X-Forwarded-For from loopback by default."""
    serving = FakeServing()
    with http_server(serving) as port:
        for address in ("10.9.8.7", "unknown"):
            headers = {"x-forwarded-for": address, "forwarded": f"for={address}"}
            assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={}, headers=headers).status_code == 400
    assert serving.askers == ["loopback"] * 2


@pytest.mark.parametrize(
    ("options", "salt"),
    [
        ({}, None),
        ({"api_key": ("a",)}, None),
        ({"admin_api_key": ("a", "b")}, None),  # without API keys, generating needs no key
        ({"api_key": ("a", "b")}, "key-0:"),
        ({"api_key": ("a",), "admin_api_key": ("b",)}, "key-0:"),
        ({"api_key": ("a", "b"), "share_prefix_cache": True}, None),
    ],
    ids=str,
)
def test_where_there_are_several_keys_each_has_a_cache_of_its_own(options: dict[str, Any], salt: str | None) -> None:
    engine: Any = SimpleNamespace(
        config=EngineConfig(model="m"), model=SimpleNamespace(tokenizer=None, sources=None, max_model_len=9)
    )
    serving = Serving(engine, ServerOptions(**options))
    for own in (None, "s"):
        prompt = asyncio.run(serving.prompt_of(Call(client="key-0", prompt=[1], cache_salt=own)))
        wanted = own if salt is None else f"{salt}{own or ''}"
        assert prompt == {"prompt_token_ids": [1]} | ({} if wanted is None else {"cache_salt": wanted})


def test_the_wait_for_a_thread_takes_from_a_requests_time() -> None:
    async def never(function: Any, *arguments: Any, client: str, language: bytes | None) -> None:
        await asyncio.Event().wait()

    tokenizer = SimpleNamespace(
        has_chat_template=True, confined=None, check_length=lambda text, most: None, encode=list
    )
    engine: Any = SimpleNamespace(
        config=EngineConfig(model="m"),
        model=SimpleNamespace(tokenizer=tokenizer, sources=None, max_model_len=9),
        off_loop=never,
    )
    serving = Serving(engine, ServerOptions(request_timeout=0.05))
    for asked in ({"prompt": "a" * 10_000}, {"messages": [{"role": "user", "content": "a"}]}):
        with pytest.raises(errors.DeadlineError, match="not through after"):
            asyncio.run(asyncio.wait_for(serving.prompt_of(Call(**asked)), 20.0))


def test_of_a_prompt_that_is_cut_only_the_end_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, read = load_tokenizer(MODEL_DIR), []
    encode = tokenizer.encode

    def noted(text: str, *others: bool) -> list[int]:
        read.append(len(text))
        return encode(text, *others)

    monkeypatch.setattr(tokenizer, "encode", noted)
    engine: Any = SimpleNamespace(
        config=EngineConfig(model="m"), model=SimpleNamespace(tokenizer=tokenizer, sources=None, max_model_len=512)
    )
    engine.off_loop = lambda function, *arguments, client, language: asyncio.to_thread(function, *arguments)
    text = "Once upon a time there was a fox. " * 10_000
    for kept in (8, -1):
        params = SamplingParams(truncate_prompt_tokens=kept)
        call = Call(prompt=text, sampling={"truncate_prompt_tokens": kept})
        over_network = asyncio.run(Serving(engine, ServerOptions()).prompt_of(call, params))["prompt_token_ids"]
        _, ids, _ = read_prompt(text, params, tokenizer, 10_000, 512)
        assert ids == over_network[-len(ids) :] == encode(text)[-len(ids) :]
    assert len(read) == 4 and max(read) < 20_000


@pytest.mark.parametrize(("keys", "is_tcp", "name"), [((), True, "loopback"), ((), False, ""), (("k",), True, "key-0")])
async def test_who_calls_over_grpc(keys: tuple[str, ...], is_tcp: bool, name: str, tmp_path: Path) -> None:
    where: dict[str, Any] = {} if is_tcp else {"grpc_port": None, "grpc_uds": str(tmp_path / "socket")}
    async with site(keys=Keys(keys), **where) as own:
        async with grpc.aio.insecure_channel(own.target) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            metadata = [("authorization", f"Bearer {key}") for key in keys]
            await stub.Generate(inference_pb2.GenerateRequest(text="a"), metadata=metadata)
        assert [call.client for call in own.serving.calls] == own.serving.askers == [name]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_a_client_with_its_share_is_refused_and_others_are_not(server: ServingProcess, protocol: str) -> None:
    """The limit counts the sequences of both protocols together."""

    headers = {"authorization": f"Bearer {fairness.HOG}"}
    long = {"prompt": [20], "max_tokens": 500, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(base_url=server.http, headers=headers, timeout=60.0) as http:
        async with (
            http.stream("POST", "/v1/completions", json=long) as first,
            http.stream("POST", "/v1/completions", json=long) as second,
        ):
            assert first.status_code == second.status_code == 200
            if protocol == "grpc":
                with pytest.raises(errors.OverloadedError, match="2 of 2"):
                    await asyncio.to_thread(cached_grpc, server, fairness.HOG)
                assert await asyncio.to_thread(cached_grpc, server, "small-3") >= 0
            else:
                full = await http.post("/v1/completions", json={"prompt": [20], "max_tokens": 1})
                assert full.status_code == 429 and full.headers["retry-after"] == "1"
                assert full.json()["error"]["message"].startswith("This client has 2 of 2 concurrent sequences")
                assert (await asyncio.to_thread(ask_http, server, "small-4")).status_code == 200
    for _ in range(200):  # both have ended
        if (await asyncio.to_thread(ask_http, server, fairness.HOG)).status_code == 200:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("a share was not given back")


def test_an_id_is_one_requests_of_each_key_and_the_admin_aborts_all_of_them(server: ServingProcess) -> None:
    async def check() -> list[str]:
        long = {"prompt": [20], "max_tokens": 500, "ignore_eos": True, "stream": True, "request_id": "mine"}
        keys = [{"authorization": f"Bearer small-{number}"} for number in (6, 7)]
        async with (
            httpx.AsyncClient(base_url=server.http, timeout=60.0) as http,
            http.stream("POST", "/v1/completions", json=long, headers=keys[0]) as first,
            http.stream("POST", "/v1/completions", json=long, headers=keys[1]) as second,
            grpc.aio.insecure_channel(server.grpc) as channel,
        ):
            assert first.status_code == second.status_code == 200
            taken = await http.post("/v1/completions", json=long, headers=keys[0])
            assert (taken.status_code, taken.json()["error"]["code"]) == (409, "request_id_in_use")
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            asked = inference_pb2.GenerateRequest(text="a", request_id="mine", stop={"max_tokens": 1})
            own = await stub.Generate(asked, metadata=[("authorization", "Bearer small-8")])
            assert own.request_id == "mine"
            control = control_pb2_grpc.ControlServiceStub(channel)
            ids = control_pb2.AbortRequest(request_ids=["mine"])
            await control.Abort(ids, metadata=[("authorization", "Bearer boss")])
            return [(await response.aread()).decode() for response in (first, second)]

    for told in asyncio.run(check()):
        assert '"id":"cmpl-mine"' in told and '"finish_reason":"abort"' in told


def test_a_call_for_more_than_the_share_is_wrong(server: ServingProcess) -> None:
    for fields in ({"n": fairness.SHARE + 1}, {"prompt": [[20], [30], [40]]}):
        answer = ask_http(server, "small-5", **fields)
        assert answer.status_code == 400 and f"at most {fairness.SHARE}" in answer.json()["error"]["message"]


@pytest.mark.ci
def test_a_client_that_asks_for_nine_tenths_hardly_slows_ten_that_ask_for_little(server: ServingProcess) -> None:
    """The bound allows for a busy machine; docs/reliability.md has the figure of an idle one."""
    for _ in range(5):  # unbounded, the large client would fill slots and queue every time
        found = asyncio.run(fairness.measure(server.http, 3.0, rounds=1))
        assert found.hog.ends[429]
        if set(found.alone.ends) == set(found.beside.ends) == {200} and found.slowdown(0.9) < 2.0:
            return
    raise AssertionError(found)
