"""Batches of pooled prompts under every setting return the results of each prompt alone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxllm import LLM, PoolingParams, SamplingParams, UserError
from jaxllm.outputs import pooled_output
from jaxllm.pooling_params import PoolingTask
from tests.support.paths import GOLDEN, GOLDEN_POOLED

LONGEST = 62
CLOSE = 1e-5  # programs differ in the order of additions
MEAN, LAST = ({"pooling_type": kind} for kind in ("MEAN", "LAST"))
CHUNKED = {"max_num_batched_tokens": 24, "max_num_seqs": 6, "block_size": 4}
MODELS: dict[str, tuple[Path, dict[str, Any]]] = {
    "mpnet": (GOLDEN_POOLED / "mpnet", {"pooler_config": MEAN}),
    "nomic": (GOLDEN_POOLED / "nomic", {"max_num_batched_tokens": LONGEST, "max_num_seqs": 5}),
    "bert-labels": (GOLDEN_POOLED / "bert-labels", {}),
    "xlm-roberta-labels": (GOLDEN_POOLED / "xlm-roberta-labels", {}),
    "gemma3": (GOLDEN_POOLED / "gemma3", {"max_num_seqs": 4}),
    "qwen3-labels": (GOLDEN_POOLED / "qwen3-labels", CHUNKED | {"num_kv_blocks": 17}),
    "llama-last": (GOLDEN / "llama", CHUNKED | {"runner": "pooling", "pooler_config": LAST}),
    "llama-mean": (GOLDEN / "llama", CHUNKED | {"runner": "pooling", "pooler_config": MEAN, "num_kv_blocks": 17}),
}
QUICK = ("mpnet", "llama-mean")


@contextmanager
def model(name: str, **settings: Any) -> Iterator[LLM]:
    """Start an engine of a model with Matryoshka embeddings."""
    folder, own = MODELS[name]
    own = own | {"pooler_config": {"is_matryoshka": True} | own.get("pooler_config", {})}
    shared = {"skip_tokenizer_init": True, "precompile": "covering", "max_model_len": LONGEST}
    with LLM(str(folder), **shared | own | settings) as llm:
        yield llm


def draw(random: np.random.Generator, llm: LLM) -> tuple[dict[str, Any], PoolingParams]:
    """Draw a prompt, which may share a prefix with others, and its parameters."""
    own = llm.engine.model
    length = int(random.choice([1, 2, LONGEST, *random.integers(1, LONGEST + 1, 6)]))
    shared = np.random.default_rng(int(random.integers(2))).integers(3, own.vocab_size, LONGEST)
    ids = np.concatenate([shared[: int(random.integers(length + 1))], random.integers(3, own.vocab_size, LONGEST)])
    prompt: dict[str, Any] = {"prompt_token_ids": ids[:length].tolist()}
    if own.num_token_types > 1 and random.random() < 0.5:
        second = int(random.integers(length + 1))
        prompt["token_type_ids"] = [0] * second + [1] * (length - second)
    task: PoolingTask = own.tasks[int(random.integers(len(own.tasks)))]
    if task != "embed":
        return prompt, PoolingParams(task=task, use_activation=bool(random.integers(2)))
    dimensions = [None, int(random.integers(1, own.pooled_size + 1))][int(random.integers(2))]
    return prompt, PoolingParams(task=task, dimensions=dimensions, normalize=[None, True, False][random.integers(3)])


def marks(name: str, settings: dict[str, Any]) -> list[pytest.MarkDecorator]:
    """CI runs every model, and two of them with other settings too."""
    if name in QUICK:
        return [pytest.mark.ci] if settings else []
    return [pytest.mark.slow if settings else pytest.mark.ci]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param(name, settings, marks=marks(name, settings), id=f"{name} {settings}")
        for name in MODELS
        for settings in ({}, {"tensor_parallel_size": 2}, {"async_scheduling": False, "enable_prefix_caching": False})
    ],
)
def test_each_result_is_that_of_the_prompt_alone(name: str, settings: dict[str, Any]) -> None:
    random = np.random.default_rng(len(name))
    with model(name, **settings) as llm:
        engine = llm.engine
        requests = [draw(random, llm) for _ in range(40)]
        results: dict[str, np.ndarray] = {}
        aborted: set[str] = set()
        left = list(enumerate(requests))
        while left or engine.has_unfinished_requests():
            for _ in range(int(random.integers(8))):
                if left:
                    number, (prompt, params) = left.pop(0)
                    engine.add_request(str(number), prompt, params)
            if random.random() < 0.3 and (running := list(engine.outputs.groups)):
                gone = str(random.choice(running))
                ended = engine.abort_request(gone)
                assert ended is not None and pooled_output(ended).outputs.finish_reason == "abort"
                aborted.add(gone)
            for output in engine.step():
                pooled = pooled_output(output)
                assert pooled.outputs.finish_reason == "stop" and output.request_id not in {*results, *aborted}
                results[output.request_id] = pooled.outputs.data
        assert len(results) + len(aborted) == len(requests) > len(aborted) > 0
        for number, (prompt, params) in enumerate(requests):
            engine.reset_prefix_cache()
            (alone,) = llm.encode([prompt], params, pooling_task=params.task or "embed", use_tqdm=False)
            data = alone.outputs.data
            assert data.dtype == np.float32 and len(data) == (params.dimensions or engine.model.pooled_size)
            if params.normalize is not False and params.task == "embed":
                assert abs(np.linalg.norm(data) - 1) < CLOSE
            if str(number) in results:
                np.testing.assert_allclose(results[str(number)], data, rtol=0, atol=CLOSE)


SMALL = {"skip_tokenizer_init": True, "precompile": "covering", "max_num_batched_tokens": 64, "max_num_seqs": 4}


def test_what_generating_engines_do_is_refused_by_name() -> None:
    folder = str(GOLDEN_POOLED / "mpnet")
    with LLM(folder, **SMALL) as llm:
        for call in (
            lambda: llm.generate([[1, 2]], SamplingParams()),
            lambda: llm.generate([[1, 2]]),
            lambda: llm.chat([{"role": "user", "content": "Hello"}]),
        ):
            with pytest.raises(UserError, match=r"mpnet generates no text; it can embed\.$"):
                call()
        with pytest.raises(UserError, match=r"^This model has no task 'classify'; it can embed\.$"):
            llm.classify([[1, 2]])
        with pytest.raises(UserError, match=r"cannot be cut: leave dimensions out"):
            llm.embed([[1, 2]], pooling_params=PoolingParams(dimensions=3))
        with pytest.raises(UserError, match=r"maximum context length is \d+ tokens. However, your prompt contains 10"):
            llm.embed([[1] * 1000])
        cut = PoolingParams(truncate_prompt_tokens=-1)
        assert len(llm.embed([[1] * 1000], pooling_params=cut)[0].prompt_token_ids) == llm.engine.model.max_model_len
        assert not llm.engine.has_unfinished_requests()
    with pytest.raises(UserError, match="generat"):
        LLM(folder, runner="generate")


@pytest.mark.ci
def test_what_pooling_engines_do_is_refused_by_name() -> None:
    with LLM(str(GOLDEN / "llama"), **SMALL) as llm:
        with pytest.raises(UserError, match=r"llama generates text; it has no task 'embed'\.$"):
            llm.embed([[1, 2]])


@pytest.mark.parametrize("name", ["mpnet", pytest.param("llama-mean", marks=pytest.mark.ci)])
def test_a_prompt_that_is_not_finite_fails_alone(name: str, tmp_path: Path) -> None:
    source, own = MODELS[name]
    for file in ("config.json", "model.safetensors"):
        shutil.copy(source / file, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    table = next(key for key in weights if key.endswith(("embed_tokens.weight", "word_embeddings.weight")))
    weights[table][5] = np.nan
    save_file(weights, tmp_path / "model.safetensors")
    good = [[7, 8, 9], [11] * 20]
    with LLM(str(tmp_path), skip_tokenizer_init=True, precompile="covering", **own) as llm:
        alone = [output.outputs.embedding for output in llm.embed(good, use_tqdm=False)]
        engine = llm.engine
        engine.reset_prefix_cache()
        for number, ids in enumerate([*good, [7, 5, 9, 9]]):
            engine.add_request(str(number), ids, PoolingParams())
        ended = {}
        while engine.has_unfinished_requests():
            ended |= {output.request_id: pooled_output(output).outputs for output in engine.step()}
    assert [ended[number].finish_reason for number in "012"] == ["stop", "stop", "error"]
    assert ended["2"].stop_reason == "its vector was not finite"
    for number, vector in enumerate(alone):
        np.testing.assert_allclose(ended[str(number)].data, vector, rtol=0, atol=CLOSE)
