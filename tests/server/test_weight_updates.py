"""Sleep and weight updates over HTTP and gRPC, and token ids over HTTP, with an engine that has no tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm import LLM, Client, SamplingParams, UserError
from jaxllm.client import WeightInfo, weight_requests
from jaxllm.config import EngineConfig
from jaxllm.v1 import control_pb2, control_pb2_grpc
from jaxllm_server.shared.options import ServerOptions
from tests.client.fake_server import Blocking
from tests.support.paths import GOLDEN
from tests.support.server_thread import ServerThread
from tests.support.sizes import SLOTS

pytestmark = pytest.mark.ci  # starts a server

MODEL = GOLDEN / "qwen3"
IDS = [5, 6, 7, 8, 9]
SETTINGS: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "enable_sleep_mode": True, **SLOTS}
PARAMS = {"temperature": 0, "max_tokens": 9, "ignore_eos": True, "logprobs": 2, "prompt_logprobs": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    root = tmp_path_factory.mktemp("weights")
    shutil.copytree(MODEL, root / "first")
    shutil.copytree(MODEL, root / "second")
    tensors = load_file(MODEL / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in tensors.items()}, root / "second" / "model.safetensors")
    (root / "link").symlink_to(GOLDEN)
    options = ServerOptions(port=0, grpc_port=0, grpc_filter=False, weights_root=str(root))
    server = ServerThread(EngineConfig(model=str(MODEL), **SETTINGS), options)
    yield server
    server.close()


@pytest.fixture(scope="module")
def http(server: ServerThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60.0) as client:
        yield client


@pytest.fixture(params=[Client, Blocking], ids=["blocking", "asynchronous"])
def rpc(request: pytest.FixtureRequest, server: ServerThread) -> Iterator[Any]:
    client = request.param(server.target, timeout=60.0)
    yield client
    client.close()


def generate(http: httpx.Client, **more: Any) -> httpx.Response:
    return http.post("/inference/v1/generate", json={"token_ids": IDS, "sampling_params": PARAMS, **more})


def post(http: httpx.Client, path: str, status: int = 200, **body: Any) -> Any:
    answer = http.post(path, json=body) if body else http.post(path)
    assert answer.status_code == status, answer.text
    return answer.json() if answer.content else None


def test_token_ids_and_log_probabilities_are_those_of_llm(http: httpx.Client) -> None:
    own = SamplingParams(**PARAMS, detokenize=False)  # pyright: ignore[reportArgumentType]
    with LLM(str(MODEL), **SETTINGS) as llm:
        (output,) = llm.generate([{"prompt_token_ids": IDS}], own, use_tqdm=False)
    due = output.outputs[0]
    answer = generate(http, request_id="mine").json()
    (choice,) = answer["choices"]
    assert answer["request_id"] == "mine" and answer["usage"]["completion_tokens"] == 9
    assert choice["token_ids"] == due.token_ids and choice["finish_reason"] == "length"
    assert choice["weight_versions"] == [{"version": "0", "num_tokens": 9}]
    assert due.logprobs is not None and output.prompt_logprobs is not None
    for entry, expected in zip(choice["logprobs"]["content"], due.logprobs, strict=True):
        token, chosen = next(iter(expected.items()))
        assert entry["token"] == f"token_id:{token}" and entry["logprob"] == pytest.approx(chosen.logprob)
        assert len(entry["top_logprobs"]) == 2
    assert [None if each is None else set(map(int, each)) for each in answer["prompt_logprobs"]] == [
        None if each is None else set(each) for each in output.prompt_logprobs
    ]
    events = generate(http, stream=True, sampling_params={**PARAMS, "prompt_logprobs": None}).text.split("\n\n")
    parts = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events if event.startswith("data: {")]
    assert [token for part in parts for token in part["token_ids"]] == due.token_ids
    assert sum(run["num_tokens"] for part in parts for run in part["weight_versions"]) == 9


def ids(http: httpx.Client) -> tuple[list[int], str]:
    """Return generated tokens and the version of their weights."""
    (choice,) = generate(http).json()["choices"]
    ((version, _),) = [run.values() for run in choice["weight_versions"]]
    return choice["token_ids"], version


def test_a_server_sleeps_wakes_and_takes_in_other_weights(http: httpx.Client) -> None:
    first, _ = ids(http)
    for query in ("level=2&mode=wait", "level=1", "level=0", "level=1&tags=kv_cache"):
        post(http, f"/sleep?{query}")
        assert http.get("/is_paused").json() == {"is_paused": True}
        assert http.get("/is_sleeping").json() == {"is_sleeping": "level=0" not in query}
        assert generate(http).status_code == http.get("/ready").status_code == 503
        post(http, "/wake_up?tags=weights&tags=kv_cache")
        assert ids(http)[0] == first
    post(http, "/init_weight_transfer_engine", init_info={"backend": "safetensors"})
    post(http, "/pause?mode=keep&clear_cache=true")
    post(http, "/start_weight_update")
    post(http, "/update_weights", update_info={"path": "second"})
    found = post(http, "/finish_weight_update", weight_version="step 7")
    assert found == {"message": "Weight update finished", "weight_version": "step 7"}
    post(http, "/resume")
    second, version = ids(http)
    assert second != first and version == "step 7" == http.get("/weight_info").json()["weight_version"]
    post(http, "/update_weights", update_info={"path": "first", "weight_version": "again"})
    assert ids(http) == (first, "again")


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        *(
            ("/update_weights", {"update_info": {"path": path}}, "below")
            for path in ("..", "/", "link/llama", "x", "\0")
        ),
        ("/update_weights", {"update_info": {"path": "first", "names": []}}, "has no field 'names'"),
        ("/init_weight_transfer_engine", {"init_info": {"backend": "nccl"}}, "'nccl' is not supported"),
        ("/finish_weight_update", {"weight_version": "\n"}, "printable"),
        ("/finish_weight_update", {}, "no weight update is open"),
        ("/sleep?level=3", {}, "level must be 0, 1 or 2"),
        ("/sleep?tags=x", {}, "weights and kv_cache"),
        ("/pause?mode=x", {}, "abort, wait or keep"),
        ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}, "at least one token id"),
        ("/inference/v1/generate", {"token_ids": [10**6], "sampling_params": {}}, "vocabulary"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"n": "x"}}, "n must"),
        ("/inference/v1/generate", {"token_ids": [1], "features": {"mm": 1}}, "features is not supported"),
    ],
)
def test_what_is_wrong_is_refused(http: httpx.Client, path: str, body: dict[str, Any], text: str) -> None:
    error = post(http, path, 400, **body)["error"]
    assert text in error["message"] and "\n" not in error["message"]
    assert generate(http).status_code == 200


def test_the_same_over_grpc(http: httpx.Client, rpc: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, version = ids(http)
    for asleep, asked in ((True, {"level": 2, "mode": "wait"}), (True, {"tags": "kv_cache"}), (False, {"level": 0})):
        rpc.sleep(**asked)
        assert rpc.weight_info() == WeightInfo(version, asleep, True)
        assert generate(http).status_code == 503
        rpc.wake_up(["weights"])
        assert rpc.weight_info().is_sleeping == asleep
        rpc.wake_up()
        assert rpc.weight_info() == WeightInfo(version, False, False) and ids(http) == (first, version)
    monkeypatch.setattr(weight_requests, "PART_BYTES", 1000)
    tensors = {name: tensor * 1.5 for name, tensor in load_file(MODEL / "model.safetensors").items()}
    rpc.start_weight_update()
    assert rpc.update_weights(tensors) == version
    assert rpc.finish_weight_update("sent") == "sent"
    second, found = ids(http)
    post(http, "/update_weights", update_info={"path": "second"})
    assert (second, found) == (ids(http)[0], "sent") and second != first
    assert rpc.update_weights("first", weight_version="read") == "read" and ids(http) == (first, "read")


def test_wrong_weights_over_grpc_replace_nothing(http: httpx.Client, rpc: Any, server: ServerThread) -> None:
    expected = ids(http)
    norm = load_file(MODEL / "model.safetensors")["model.norm.weight"]
    for call, text in (
        (lambda: rpc.update_weights({"model.norm.weight": norm}), "no weight update is open"),
        (lambda: rpc.update_weights("../x"), "below --weights-root"),
        (lambda: rpc.update_weights("x" * 9000), "below --weights-root"),
        (lambda: rpc.update_weights({"model.norm.weight": 3}), "NumPy or JAX arrays"),
        (lambda: rpc.update_weights({}), "a folder, or arrays by name"),
        (lambda: rpc.update_weights({"a": norm}, weight_version="1"), "finish_weight_update takes the version"),
        (lambda: rpc.finish_weight_update(), "no weight update is open"),
        (lambda: rpc.finish_weight_update("\n"), "printable"),
        (lambda: rpc.sleep(3), "level must be 0, 1 or 2"),
        (lambda: rpc.sleep(mode="stop"), "mode must be"),
        (lambda: rpc.wake_up(["x"]), "weights and kv_cache"),
        (lambda: rpc.wake_up(["weights"] * 9), "at most 8 tags"),
    ):
        with pytest.raises(UserError, match=text) as caught:
            call()
        assert "\n" not in str(caught.value)
    rpc.start_weight_update()
    for weights, text in (
        ({"x": norm}, "no tensor 'x'"),
        ({"x" * 600: norm}, "at most 512 characters"),
        ({"model.norm.weight": norm[1:]}, "has shape"),
        ({"model.norm.weight": norm.astype("int32")}, "dtype must be one of"),
    ):
        with pytest.raises(UserError, match=text):
            rpc.update_weights(weights)
    size, part = norm.nbytes, {"name": "model.norm.weight", "dtype": "float32", "shape": norm.shape}
    with grpc.insecure_channel(server.target) as channel:
        update = control_pb2_grpc.ControlServiceStub(channel).UpdateWeights
        for parts, text in (
            ([{}], "give the path of a folder, or a part"),
            ([{"tensor": {**part, "offset": 4, "data": b"abcd"}}], "ended at no part"),
            ([{"tensor": {**part, "data": bytes(size + 4)}}], f"{size} are left"),
            ([{"tensor": {**part, "data": b""}}], f"{size} are left"),
            ([{"tensor": {**part, "data": b"abcd", "offset": at}} for at in (0, 8)], "ended at byte 4 of"),
            ([{"tensor": {**part, "data": b"abcd", "offset": at}} for at in (0, 4, 4)], "ended at byte 8 of"),
        ):
            with pytest.raises(grpc.RpcError, match=text):
                for each in parts:
                    update(control_pb2.UpdateWeightsRequest(**each))
    with pytest.raises(UserError, match="lacks tensor"):
        rpc.finish_weight_update()
    assert ids(http) == expected
