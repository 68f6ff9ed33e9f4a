"""Tests that engines with a disk's tier generate the tokens of an engine without, share blocks, and find them again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm import LLMEngine, LoRARequest, SamplingParams, UserError
from jaxllm.config import EngineConfig
from jaxllm.engine import fetches
from jaxllm.metrics import Metrics
from jaxllm.replay.recording import FileRecorder
from jaxllm.replay.replay import Replay
from jaxllm.runner.disk_store import DiskStore
from jaxllm.runner.disk_tier import DiskTier
from jaxllm.setup import kv_fingerprint
from jaxllm.setup.model_files import identity
from jaxllm.setup.model_setup import prepare
from tests.engine.test_host_tier import CASES, TIGHT, generate, started
from tests.support.adapters import write_adapter
from tests.support.paths import GOLDEN

MODEL = GOLDEN / "gemma3"  # has windows
AMPLE = {"num_kv_blocks": 400, "kv_offloading_size": 0.05}
NUM_FILES = 20  # of a prompt of 41 tokens: ten blocks of 4 tokens, in two groups of layers
ONE = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline, "it never happens"
        time.sleep(0.01)


def run_one(engine: LLMEngine, prompt: list[int]) -> tuple[list[int], int]:
    """Return the tokens of a request, and how many of its prompt's tokens were not computed."""
    engine.add_request("one", {"prompt_token_ids": prompt}, ONE)
    (output,) = [each for _ in iter(engine.has_unfinished_requests, False) for each in engine.step() if each.finished]
    return list(output.outputs[0].token_ids), output.num_cached_tokens or 0


def prompts(count: int, length: int = 41) -> list[list[int]]:
    return np.random.default_rng(5).integers(3, 120, (count, length)).tolist()


MARKS = {case: [pytest.mark.ci] for case in ("windows", "shards")}


@pytest.mark.parametrize("case", [pytest.param(each, marks=MARKS.get(each, [pytest.mark.slow])) for each in CASES])
def test_tokens_are_those_of_an_ample_pool_before_and_after_a_restart(case: str, tmp_path: Path) -> None:
    model, settings = CASES[case]
    settings = {name: each for name, each in settings.items() if name != "enable_prefix_caching"}
    adapter = None
    if "enable_lora" in settings:
        adapter = LoRARequest("own", 1, str(write_adapter(tmp_path / "own", model, 8, seed=1)))
    own = {name: each for name, each in settings.items() if "mode" not in name}
    with started(model, **{"num_kv_blocks": 400} | own) as engine:
        expected = generate(engine, adapter)
    counts = []
    for number in range(2):
        with started(
            model, FileRecorder(tmp_path / "log"), **TIGHT | settings | {"kv_offloading_disk": str(tmp_path / "disk")}
        ) as engine:
            assert generate(engine, adapter) == expected, number
            state, metrics = engine.scheduler.state, engine.metrics
            assert not metrics.disk_failures and not metrics.compilations_after_ready
        counts.append(metrics.disk_read_blocks)
        assert metrics.disk_stored_blocks > 0 or number
    assert counts[1] > 0, "nothing of before the restart was read"
    *_, last = Replay(tmp_path / "log").moments()
    assert last.difference is None and last.state.num_planned == state.num_planned


def test_two_engines_share_the_blocks_of_their_prompts(tmp_path: Path) -> None:
    settings = AMPLE | {"kv_offloading_disk": str(tmp_path)}
    first, second = prompts(2)

    def find_all(engine: LLMEngine) -> None:
        source = engine.runner.block_source
        assert source is not None
        until(
            lambda: all(source.has(int(each.suffix[1:]), bytes.fromhex(each.stem)) for each in tmp_path.glob("*/*/*.?"))
        )

    with started(MODEL, **settings) as one, started(MODEL, **settings) as two:
        expected, cached = run_one(one, first)
        assert not cached
        until(lambda: one.metrics.disk_stored_blocks == NUM_FILES)  # without an eviction
        find_all(two)
        assert run_one(two, first) == (expected, 40)
        assert two.metrics.disk_read_blocks >= 10 and two.metrics.chunk_tokens == 1
        due, _ = run_one(two, second)
        until(lambda: two.metrics.disk_stored_blocks == NUM_FILES)
        find_all(one)
        assert run_one(one, second) == (due, 40)


@pytest.mark.ci
def test_damaged_missing_and_late_blocks_are_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = AMPLE | {"kv_offloading_disk": str(tmp_path)}
    (prompt,) = prompts(1)

    def again(num_cached: int, change: Callable[[list[Path]], Any], **more: Any) -> None:
        files = sorted(tmp_path.glob("kv1-*/*/*.0"))
        assert len(files) == NUM_FILES // 2
        with started(MODEL, **settings | more) as engine:
            change(files)
            assert run_one(engine, prompt) == (expected, num_cached)
            until(lambda: len([*tmp_path.glob("kv1-*/*/*.0")]) == NUM_FILES // 2)  # they are written again

    with started(MODEL, **settings) as engine:
        expected, _ = run_one(engine, prompt)
    again(40, lambda files: None)
    again(0, lambda files: all(path.write_bytes(b"damaged") for path in files))
    again(0, lambda files: any(map(os.unlink, files)))
    read = DiskStore.read

    def slow(store: DiskStore, group: int, digest: bytes, size: int) -> Any:
        time.sleep(0.4)
        return read(store, group, digest, size)

    monkeypatch.setattr(DiskStore, "read", slow)
    monkeypatch.setattr(fetches, "MOST_SECONDS", 0.1)
    again(0, lambda files: None)


def test_a_request_passes_one_that_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = AMPLE | {"kv_offloading_disk": str(tmp_path)}
    first, second = prompts(2)
    with started(MODEL, **settings) as engine:
        expected, _ = run_one(engine, first)
    read, gate = DiskStore.read, [True]

    def stuck(store: DiskStore, group: int, digest: bytes, size: int) -> Any:
        until(lambda: not gate[0])
        return read(store, group, digest, size)

    monkeypatch.setattr(DiskStore, "read", stuck)
    monkeypatch.setattr(fetches, "MOST_SECONDS", 20.0)
    ended = []
    with started(MODEL, **settings) as engine:
        for name, prompt in (("waits", first), ("passes", second)):
            engine.add_request(name, {"prompt_token_ids": prompt}, ONE)
        while engine.has_unfinished_requests():
            ended += [output for output in engine.step() if output.finished]
            gate[0] = not ended
    assert [output.request_id for output in ended] == ["passes", "waits"]
    assert list(ended[1].outputs[0].token_ids) == expected and ended[1].num_cached_tokens == 40


def test_other_weights_and_settings_share_no_block() -> None:
    def name(model: Path = MODEL, **settings: Any) -> str:
        config = EngineConfig(model=str(model), **{"dtype": "float32", "device": "cpu"} | settings)
        return kv_fingerprint.fingerprint(config, prepare(config), [])

    same = [name(), name(max_num_seqs=4), name(tensor_parallel_size=2), name(seed=3)]
    others = [
        name(GOLDEN / "qwen3"),
        *[name(kv_cache_dtype="int8"), name(dtype="bfloat16"), name(block_size=8), name(deterministic=True)],
        *[name(deterministic=True, max_num_seqs=4), name(load_format="dummy"), name(load_format="dummy", seed=3)],
        name(speculative_config={"method": "draft_model", "model": str(MODEL), "num_speculative_tokens": 2}),
    ]
    assert len({*same}) == 1 and len({*others, *same}) == len(others) + 1


def test_the_identity_of_weights_changes_with_their_content_and_time(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(1 << 20))
    found = {identity(tmp_path, with_times=True)}
    status = weights.stat()
    weights.write_bytes(bytes((1 << 20) - (1 << 16)) + b"\1" * (1 << 16))
    for stamp in (status.st_mtime_ns, status.st_mtime_ns + 1):
        os.utime(weights, ns=(stamp, stamp))
        found.add(identity(tmp_path, with_times=True))
    assert len(found) == 3 and identity(tmp_path, with_times=True) in found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_offloading_disk": "x"}, "needs kv_offloading_size"),
        ({"kv_offloading_disk": "x", "kv_offloading_size": 1, "kv_offloading_disk_size": 0}, "must be above 0"),
        (
            AMPLE | {"kv_offloading_disk": "x", "enable_prefix_caching": False, "preemption_mode": "swap"},
            "needs enable_p",
        ),
    ],
    ids=str,
)
def test_settings_that_would_do_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare(EngineConfig(model=str(MODEL), **settings))


def test_forgotten_blocks_are_neither_written_nor_kept(tmp_path: Path) -> None:
    shape = jax.ShapeDtypeStruct((2, 3), np.float32)
    tier, digests = (
        DiskTier(DiskStore(tmp_path, 1 << 20, "0" * 32), [[shape]], Metrics()),
        [bytes([n]) * 32 for n in range(4)],
    )
    rows = [np.full((2, 3), each, np.float32) for each in (1.0, 2.0, np.nan, 3.0)]
    tier.expect({(1, 0, block): digest for block, digest in enumerate(digests)})
    tier.forget(digests[:1])  # before its copy ends
    for block, row in enumerate(rows):
        tier.copied((1, 0, block), (row,))
    until(lambda: tier.has(0, digests[3]))  # written in order, without the one that is not finite
    assert [tier.has(0, digest) for digest in digests] == [False, True, False, True]
    tier.forget(digests[1:2])
    assert not tier.has(0, digests[1])
    tier.close()
    assert {path.stem for path in tmp_path.glob("kv1-*/*/*")} == {digests[3].hex()}
