"""Sleep, weight updates and token ids over HTTP, with an engine that has no tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm import LLM, SamplingParams
from jaxllm.config import EngineConfig
from jaxllm_server.shared.options import ServerOptions
from tests.support.paths import GOLDEN
from tests.support.server_thread import ServerThread
from tests.support.sizes import SLOTS

pytestmark = pytest.mark.ci  # starts a server

MODEL = GOLDEN / "qwen3"
IDS = [5, 6, 7, 8, 9]
SETTINGS: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "enable_sleep_mode": True, **SLOTS}
PARAMS = {"temperature": 0, "max_tokens": 9, "ignore_eos": True, "logprobs": 2, "prompt_logprobs": 1}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    root = tmp_path_factory.mktemp("weights")
    shutil.copytree(MODEL, root / "first")
    shutil.copytree(MODEL, root / "second")
    tensors = load_file(MODEL / "model.safetensors")
    save_file({name: tensor * 1.5 for name, tensor in tensors.items()}, root / "second" / "model.safetensors")
    (root / "link").symlink_to(GOLDEN)
    options = ServerOptions(port=0, grpc_port=0, grpc_filter=False, weights_root=str(root))
    server = ServerThread(EngineConfig(model=str(MODEL), **SETTINGS), options)
    with httpx.Client(base_url=server.url, timeout=60.0) as client:
        yield client
    server.close()


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


def test_a_server_sleeps_wakes_and_takes_in_other_weights(http: httpx.Client) -> None:
    def ids() -> tuple[list[int], str]:
        (choice,) = generate(http).json()["choices"]
        ((version, _),) = [run.values() for run in choice["weight_versions"]]
        return choice["token_ids"], version

    first, _ = ids()
    for query in ("level=2&mode=wait", "level=1", "level=0", "level=1&tags=kv_cache"):
        post(http, f"/sleep?{query}")
        assert http.get("/is_paused").json() == {"is_paused": True}
        assert http.get("/is_sleeping").json() == {"is_sleeping": "level=0" not in query}
        assert generate(http).status_code == http.get("/ready").status_code == 503
        post(http, "/wake_up?tags=weights&tags=kv_cache")
        assert ids()[0] == first
    post(http, "/init_weight_transfer_engine", init_info={"backend": "safetensors"})
    post(http, "/pause?mode=keep&clear_cache=true")
    post(http, "/start_weight_update")
    post(http, "/update_weights", update_info={"path": "second"})
    found = post(http, "/finish_weight_update", weight_version="step 7")
    assert found == {"message": "Weight update finished", "weight_version": "step 7"}
    post(http, "/resume")
    second, version = ids()
    assert second != first and version == "step 7" == http.get("/weight_info").json()["weight_version"]
    post(http, "/update_weights", update_info={"path": "first", "weight_version": "again"})
    assert ids() == (first, "again")


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
