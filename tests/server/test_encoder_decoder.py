"""Encoder-decoder models over HTTP: the encoder reads the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.config import EngineConfig
from jaxllm_server.shared.options import ServerOptions
from tests.support.seq2seq_models import write_seq2seq
from tests.support.server_thread import ServerThread
from tests.support.sizes import SLOTS

pytestmark = pytest.mark.ci
TEXT = "Once upon a time there was a cat."


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    config = EngineConfig(model=str(write_seq2seq(tmp_path_factory.mktemp("bart"))), **SLOTS)
    site = ServerThread(config, ServerOptions(port=0, grpc_port=0, served_model_name=("bart",)))
    yield site
    site.close()


def post(site: ServerThread, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    answer = httpx.post(f"{site.url}{path}", json={"model": "bart"} | body, timeout=60)
    return answer.status_code, answer.json()


def test_a_completion_continues_the_decoders_start(site: ServerThread) -> None:
    engine = site.server.engine
    ids = engine.model.tokenizer.encode(TEXT)
    with LLM(engine.config.model, **SLOTS) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
        (due,) = llm.generate([TEXT], params, use_tqdm=False)
    for prompt in (TEXT, ids):
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 80, "ignore_eos": True}
        status, answer = post(site, "/v1/completions", body)
        assert status == 200, answer
        assert answer["choices"][0]["text"] == due.outputs[0].text
        assert answer["usage"]["prompt_tokens"] == 1 + len(ids) and answer["usage"]["completion_tokens"] == 80
    status, answer = post(site, "/v1/completions", {"prompt": [TEXT, "A dog."], "n": 2, "max_tokens": 4, "seed": 1})
    assert status == 200 and len(answer["choices"]) == 4, answer
    assert post(site, "/tokenize", {"prompt": TEXT})[1]["tokens"] == ids
    assert engine.metrics.compilations_after_ready == 0


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"prompt": [5] * 97}, "the encoder reads at most 96"),
        ({"prompt": "a " * 9999}, "maximum context length"),
        ({"prompt": TEXT, "max_tokens": 96}, "maximum context length is 96"),
        ({"prompt": TEXT, "truncate_prompt_tokens": 3}, "truncate_prompt_tokens is not supported"),
    ],
)
def test_bad_requests_name_the_reason(site: ServerThread, body: dict[str, Any], why: str) -> None:
    status, answer = post(site, "/v1/completions", {"max_tokens": 4} | body)
    assert status == 400 and why in answer["error"]["message"], answer
