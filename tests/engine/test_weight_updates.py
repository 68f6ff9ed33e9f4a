"""Tests of sleep and weight updates: memory, compiled programs, bits of the weights, and the versions of tokens."""

from __future__ import annotations

import asyncio
import gc
import shutil
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from jaxllm import LLM, AsyncLLM, LLMEngine, LoRARequest, SamplingParams, UserError
from jaxllm.config import EngineConfig
from jaxllm.errors import DrainingError, FeatureDisabledError, UnavailableError
from jaxllm.outputs import RequestOutput
from tests.support.adapters import write_adapter
from tests.support.inspection import params_of
from tests.support.paths import GOLDEN, GOLDEN_POOLED, STORIES
from tests.support.sizes import SHORT_BLOCKS, SLOTS

QWEN = GOLDEN / "qwen3"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS: list[Any] = [{"prompt_token_ids": [5 + number, *range(6, 30)]} for number in range(4)]
DRAFTS = {"method": "draft_model", "model": str(QWEN), "num_speculative_tokens": 3}
CASES: dict[str, tuple[Path, dict[str, Any]]] = {
    "plain": (QWEN, {}),
    "int8": (QWEN, {"quantization": "int8"}),
    "tier": (GOLDEN / "gemma3", {"kv_offloading_size": 0.05, "num_kv_blocks": 30, "tensor_parallel_size": 2}),
    "experts": (GOLDEN / "qwen3-moe", {"tensor_parallel_size": 2}),
    "joined": (GOLDEN / "phi3", {"quantization": "int4"}),
    "transposed": (GOLDEN / "gpt2", {}),
    "stages": (STORIES, {"quantization": "int8", "tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "drafts": (QWEN, {"speculative_config": DRAFTS}),
    "adapters": (GOLDEN / "llama", {"enable_lora": True, "max_lora_rank": 8}),
}
SLOW = ("experts", "joined", "int8", "stages", "drafts")
POOLED: dict[str, Any] = {"precompile": "covering", "max_num_seqs": 4}
Tensors = dict[str, np.ndarray]


@contextmanager
def started(model: Path, **settings: Any) -> Iterator[LLM]:
    sizes = {"tokenizer": str(STORIES), "dtype": "float32", **SHORT_BLOCKS, "enable_sleep_mode": True}
    with LLM(str(model), **sizes | settings) as llm:
        yield llm


def other(model: Path, folder: Path, seed: int) -> Tensors:
    """Write the model with changed weights into `folder`, and return them."""
    random = np.random.default_rng(seed)
    tensors = {
        name: (tensor * (1 + 0.5 * random.standard_normal(tensor.shape))).astype(tensor.dtype)
        for name, tensor in load_file(model / "model.safetensors").items()
    }
    folder.mkdir()
    shutil.copy(model / "config.json", folder)
    save_file(tensors, folder / "model.safetensors")
    return tensors


def spread(tensors: Tensors) -> dict[str, Any]:
    """Return the tensors as a trainer's arrays: on a mesh of two devices, divided along the last axis if possible."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("trainer",))

    def put(tensor: np.ndarray) -> jax.Array:
        axes = [None] * (tensor.ndim - 1) + ["trainer" if tensor.shape[-1] % 2 == 0 else None]
        return jax.device_put(tensor, NamedSharding(mesh, PartitionSpec(*axes)))

    return {name: put(tensor) for name, tensor in tensors.items()}


def run(llm: LLM, adapter: LoRARequest | None = None) -> list[list[int]]:
    found = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=adapter)]
    version = llm.get_weight_version()
    assert all(each.weight_versions == [(version, len(each.token_ids))] for each in found)
    return [list(each.token_ids) for each in found]


def bits(llm: LLM) -> list[bytes]:
    assert isinstance(llm.engine, LLMEngine)
    return [np.asarray(leaf).tobytes() for leaf in params_of(llm.engine.runner)]


def on_device(*further: str) -> int:
    """Return the bytes of all arrays in the device's memory, or in `further` kinds."""
    gc.collect()
    kinds = {None, jax.devices()[0].default_memory().kind, *further}
    return sum(array.nbytes for array in jax.live_arrays() if array.sharding.memory_kind in kinds)


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The compilations since the test's start."""
    events: list[str] = []

    def listen(event: str, seconds: float, **_: str | int) -> None:
        events.extend([event] * ("backend_compile" in event))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.ci
@pytest.mark.parametrize("case", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in CASES])
def test_memory_is_freed_and_an_update_gives_the_bits_of_a_new_engine(
    case: str, tmp_path: Path, compiled: list[str]
) -> None:
    model, settings = CASES[case]
    adapter = None
    if case == "adapters":
        adapter = LoRARequest("own", 1, str(write_adapter(tmp_path / "own", model, 8, seed=1)))
    changed = other(model, tmp_path / "other", 1)
    names = list(changed)
    before, anywhere = on_device(), on_device("pinned_host", "unpinned_host")
    with started(model, **settings) as llm:
        used, first, tokens = on_device() - before, bits(llm), run(llm, adapter)
        for level in (1, 2):
            llm.sleep(level)
            assert on_device() - before <= 0.05 * used and llm.is_sleeping()
            with pytest.raises(UnavailableError, match="wake_up"):
                llm.generate(PROMPTS, GREEDY)
            del compiled[:]
            llm.wake_up(["weights"])
            assert llm.is_sleeping()
            llm.wake_up()
            # Before `bits`: jax 0.10 keeps a copy of each shard that is read.
            assert on_device("pinned_host", "unpinned_host") - anywhere <= 1.05 * used
            assert not compiled and not llm.is_sleeping() and bits(llm) == first
            assert run(llm, adapter) == tokens
        llm.start_weight_update()
        for some in (names[::2], names[1::2]):
            piece = {name: changed[name].copy() for name in some}
            llm.update_weights(piece)
            for array in piece.values():
                array[:] = 0  # the engine has copies
        assert llm.finish_weight_update("trained") == "trained"
        new, updated = bits(llm), run(llm, adapter)
        llm.sleep(2, mode="keep")
        llm.update_weights(spread(changed))  # also wakes the weights
        llm.wake_up()
        assert bits(llm) == new != first and run(llm, adapter) == updated
        llm.update_weights(model, weight_version="0")
        assert bits(llm) == first and run(llm, adapter) == tokens
    with started(tmp_path / "other", **settings) as fresh:
        assert bits(fresh) == new and run(fresh, adapter) == updated


def _deleted(tensors: Tensors) -> dict[str, Any]:
    arrays: dict[str, Any] = {name: jax.device_put(tensor) for name, tensor in tensors.items()}
    arrays["lm_head.weight"].delete()
    return arrays


HEAD = "lm_head.weight"
BAD: dict[str, Any] = {  # (tensors) -> weights
    "no tensor 'x'": lambda own: own | {"x": own[HEAD]},
    "shape [3], the model's is": lambda own: own | {HEAD: np.zeros(3, np.float32)},
    "type int32; only F32": lambda own: own | {HEAD: own[HEAD].astype(np.int32)},
    "must be an array, not list": lambda own: own | {HEAD: [1.0]},
    "lacks tensor lm_head.weight; send": lambda own: {name: own[name] for name in own if name != HEAD},
    "and 23 more": lambda own: {HEAD: own[HEAD]},
    "was deleted": _deleted,
    "is given twice": lambda own: own | {"norm.weight": own["model.norm.weight"]},
    "no folder nowhere": lambda own: "nowhere",
    "has another model": lambda own: GOLDEN / "llama",
    "not int": lambda own: 3,
}


def test_a_bad_update_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    changed = other(QWEN, tmp_path / "other", 1)
    with started(QWEN) as llm:
        first, tokens = bits(llm), run(llm)
        for text, make in BAD.items():
            with pytest.raises(UserError) as refused:
                llm.update_weights(make(dict(changed)))
            assert text in str(refused.value) and "\n" not in str(refused.value)
            assert bits(llm) == first and llm.get_weight_version() == "0"
        for call in (
            llm.finish_weight_update,
            lambda: llm.sleep(3),
            lambda: llm.wake_up(["x"]),
            lambda: llm.pause("x"),
        ):
            with pytest.raises(UserError):
                call()
        llm.start_weight_update()
        with pytest.raises(UserError, match="is open"):
            llm.sleep(1)
        with pytest.raises(UserError, match="lacks tensor"):
            llm.finish_weight_update()  # nothing was replaced: the update is over
        assert run(llm) == tokens
        llm.start_weight_update()
        llm.update_weights({HEAD: changed[HEAD]})
        with pytest.raises(UserError, match="lacks tensor"):
            llm.finish_weight_update()
        with pytest.raises(UnavailableError, match="finish_weight_update"):
            llm.generate(PROMPTS, GREEDY)
        llm.update_weights({name: changed[name] for name in changed if name != HEAD})
        assert llm.finish_weight_update() == "1"
        assert run(llm) != tokens
        llm.sleep(2)
        llm.wake_up()  # arrays cannot be read again
        with pytest.raises(UnavailableError, match="no whole set of weights"):
            llm.generate(PROMPTS, GREEDY)
        llm.update_weights(QWEN)
        assert run(llm) == tokens
        llm.pause()
        with pytest.raises(UnavailableError, match="call resume"):
            llm.generate(PROMPTS, GREEDY)
        llm.resume()
        assert run(llm) == tokens


@pytest.mark.ci
def test_a_tied_head_is_given_as_a_copy_or_not_at_all() -> None:
    tensors = load_file(GOLDEN / "gemma" / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    with started(GOLDEN / "gemma") as llm:
        first = bits(llm)
        for wrong in (tensors | {HEAD: embedding + 1}, {HEAD: embedding}):
            with pytest.raises(UserError, match="ties its head to embed_tokens"):
                llm.update_weights(wrong)
        llm.update_weights(tensors | {HEAD: embedding})
        assert bits(llm) == first


@pytest.mark.slow
def test_an_update_needs_the_memory_of_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxllm.runner import weight_update

    tensors, read, seen = load_file(QWEN / "model.safetensors"), weight_update.weights.read_weight, list[int]()

    def reading(*arguments: Any) -> Any:
        seen.append(on_device())
        return read(*arguments)

    before = on_device()
    with started(QWEN) as llm:
        used = on_device()
        monkeypatch.setattr(weight_update.weights, "read_weight", reading)
        llm.update_weights(tensors)
        assert before < max(seen) < used == on_device() and len(seen) > 10


@pytest.mark.ci
@pytest.mark.parametrize("model", ["qwen3-labels", "bert-labels"])
def test_a_model_that_pools_sleeps_too(model: str, tmp_path: Path) -> None:
    folder = GOLDEN_POOLED / model
    changed, found = other(folder, tmp_path / "other", 1), []
    with LLM(str(folder), tokenizer=str(STORIES), dtype="float32", enable_sleep_mode=True, **POOLED) as llm:
        for weights in (None, tmp_path / "other", folder, changed):
            llm.sleep(2)
            llm.wake_up() if weights is None else llm.update_weights(weights)
            llm.wake_up()
            found.append(np.array([each.outputs.probs for each in llm.classify(PROMPTS, use_tqdm=False)]))
    assert (found[0] == found[2]).all() and (found[1] == found[3]).all() and (found[0] != found[1]).any()


def test_an_update_that_fails_midway_holds_the_engine_until_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxllm.runner import weight_update

    changed, read, count = other(QWEN, tmp_path / "other", 1), weight_update.weights.read_weight, 0

    def failing(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 5:
            raise RuntimeError("no memory")
        return read(*arguments)

    with started(QWEN) as llm:
        tokens = run(llm)
        monkeypatch.setattr(weight_update.weights, "read_weight", failing)
        with pytest.raises(RuntimeError, match="no memory"):
            llm.update_weights(changed)
        with pytest.raises(UnavailableError, match="no whole set"):
            llm.generate(PROMPTS, GREEDY)
        llm.sleep(2)
        llm.wake_up()  # reads the folder of the version before
        assert run(llm) == tokens and llm.get_weight_version() == "0"


def test_without_the_setting_nothing_sleeps_and_outputs_have_no_versions() -> None:
    with started(QWEN, enable_sleep_mode=False) as llm:
        for call in (llm.sleep, llm.wake_up, llm.start_weight_update, lambda: llm.update_weights(QWEN)):
            with pytest.raises(FeatureDisabledError, match="enable_sleep_mode"):
                call()
        assert llm.generate(PROMPTS[:1], GREEDY)[0].outputs[0].weight_versions is None


def test_a_paused_engine_keeps_requests_or_ends_them() -> None:
    config = EngineConfig(model=str(QWEN), tokenizer=str(STORIES), dtype="float32", **SHORT_BLOCKS)
    with closing(LLMEngine(config)) as engine:

        def begin() -> None:
            engine.add_request("one", PROMPTS[0], GREEDY)
            assert len(engine.step()) == 1

        def rest() -> RequestOutput:
            outputs = []
            while engine.has_unfinished_requests():
                outputs += engine.step()
            return outputs[-1]

        begin()
        expected = rest().outputs[0].token_ids
        begin()
        assert engine.pause("keep") == [] == engine.step() and not engine.has_unfinished_requests()
        engine.resume()
        assert rest().outputs[0].token_ids == expected
        begin()
        assert engine.pause("wait")[-1].outputs[0].token_ids == expected
        engine.resume()
        begin()
        (aborted,) = engine.pause("abort")
        assert aborted.outputs[0].finish_reason == "abort" and not engine.outputs.groups


async def _under_load(versions: Mapping[str, Any], num_updates: int) -> list[tuple[RequestOutput, list[Any]]]:
    """Change the weights `num_updates` times; return finished outputs, with the runs of their deltas."""
    random = np.random.default_rng(5)
    answers: list[tuple[RequestOutput, list[Any]]] = []
    names = list(versions)
    config: dict[str, Any] = {"tokenizer": str(STORIES), "dtype": "float32", **SLOTS, "enable_sleep_mode": True}
    async with AsyncLLM(str(versions["0"]), **config) as engine:

        async def client(number: int) -> None:
            while not is_over:
                ids = [int(each) for each in random.integers(3, 120, 1 + random.integers(60))]
                params = SamplingParams(
                    temperature=0.0,
                    max_tokens=int(random.integers(20, 90)),
                    ignore_eos=True,
                    output_kind=number % 3,  # pyright: ignore[reportArgumentType]
                )
                tokens: list[int] = []
                runs: list[Any] = []
                try:
                    async for output in engine.generate({"prompt_token_ids": ids}, params):
                        own = output.outputs[0]
                        assert own.weight_versions is not None
                        is_delta = number % 3 == 1
                        tokens = [*tokens, *own.token_ids] if is_delta else list(own.token_ids)
                        runs = [*runs, *own.weight_versions] if is_delta else own.weight_versions
                except UnavailableError:  # asleep
                    await asyncio.sleep(0.001)
                    continue
                output.outputs[0].token_ids = tokens
                answers.append((output, runs))

        is_over = False
        clients = [asyncio.create_task(client(number)) for number in range(6)]
        for turn in range(num_updates):
            due = engine.metrics.generated_tokens + int(random.integers(1, 200))
            while engine.metrics.generated_tokens < due:
                await asyncio.sleep(0.001)
            version = names[(turn + 1) % len(names)]
            weights = versions[version]
            if turn % 10 == 3:
                await engine.sleep(1 + turn // 10 % 2, mode="keep")
            if turn % 10 == 6:
                await engine.pause("keep")
            if turn % 3 == 0 or turn % 10 == 3:
                await engine.update_weights(weights, weight_version=version)
            else:
                tensors = load_file(weights / "model.safetensors")
                await engine.start_weight_update()
                for name in random.permutation(list(tensors)).tolist():
                    await engine.update_weights({name: tensors[name]})
                await engine.finish_weight_update(version)
            if turn % 10 == 3:
                with pytest.raises(UserError, match="wake_up"):
                    await engine.resume()
                await engine.wake_up()
            if turn % 10 == 6:
                await engine.resume()
        is_over = True
        await asyncio.gather(*clients)
        assert engine.metrics.recoveries == 0 and engine.metrics.compilations_after_ready == 0
    return answers


@pytest.mark.ci
def test_each_token_is_of_its_version_through_a_hundred_updates_under_load(tmp_path: Path) -> None:
    folders = {"0": QWEN}
    for number in (1, 2):
        other(QWEN, tmp_path / str(number), number)
        folders[str(number)] = tmp_path / str(number)
    answers = asyncio.run(_under_load(folders, 100))
    asked: dict[str, list[tuple[list[int], list[int]]]] = {version: [] for version in folders}
    num_mixed = 0
    for output, runs in answers:
        prompt, tokens = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        assert sum(count for _, count in runs) == len(tokens) and all(count > 0 for _, count in runs)
        num_mixed += len({version for version, _ in runs}) > 1
        start = 0
        for version, count in runs:
            asked[version].append((prompt + tokens[:start], tokens[start : start + count]))
            start += count
    assert len(answers) > 50 and num_mixed > 40
    for version, folder in folders.items():  # an engine with these weights only continues every run
        with started(folder, **SLOTS, block_size=16) as llm:
            prompts: list[Any] = [{"prompt_token_ids": prefix} for prefix, _ in asked[version]]
            params = [
                SamplingParams(temperature=0.0, max_tokens=len(run), ignore_eos=True) for _, run in asked[version]
            ]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found = [list(output.outputs[0].token_ids) for output in outputs]
            assert found == [run for _, run in asked[version]]


def test_a_sleeping_engine_refuses_requests_and_can_drain(tmp_path: Path) -> None:
    async def use() -> None:
        config: dict[str, Any] = {
            "tokenizer": str(STORIES),
            "dtype": "float32",
            **SHORT_BLOCKS,
            "enable_sleep_mode": True,
        }
        async with AsyncLLM(str(QWEN), **config) as engine:
            long = SamplingParams(max_tokens=100, ignore_eos=True, output_kind=1)  # pyright: ignore[reportArgumentType]
            outputs = engine.generate(PROMPTS[0], long)
            await anext(outputs)
            await engine.sleep(2, mode="keep")
            assert await engine.is_sleeping() and engine.state == "paused"
            with pytest.raises(UnavailableError, match="The engine sleeps"):
                await anext(engine.generate(PROMPTS[0], long))
            await engine.wake_up()
            kept = [output async for output in outputs]
            assert kept[-1].finished and kept[-1].outputs[0].finish_reason == "length"
            outputs = engine.generate(PROMPTS[0], long)
            await anext(outputs)
            await engine.sleep(1, mode="keep")
            draining = asyncio.create_task(engine.drain())
            with pytest.raises(DrainingError, match="sleeps"):
                _ = [output async for output in outputs]
            await draining

    asyncio.run(use())
