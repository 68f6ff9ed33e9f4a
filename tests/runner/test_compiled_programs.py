"""Compiled programs update the cache in place, delay no request by compilation, and make no slow call."""

from __future__ import annotations

import gc
import math
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import psutil
import pytest
from jax._src import test_util as jtu

from benchmarks import padding
from jaxllm import LLM, SamplingParams
from jaxllm.compiling.compilation_cache import use_compilation_cache
from jaxllm.config import EngineConfig
from jaxllm.embedded import MODEL_DIR
from jaxllm.freed_memory import return_freed_memory
from jaxllm.metrics import Metrics
from jaxllm.runner import batch, device_state
from jaxllm.runner.batch import coarser, decode_shapes, ragged_shapes, uniform_shape
from jaxllm.runner.compiled_programs import IDLE_SECONDS, VARIANTS, Key, Programs
from jaxllm.runner.model_runner import Runner
from jaxllm.sampling.sampler import Variant
from jaxllm.scheduler.state import Plan
from jaxllm.setup import memory_plan
from jaxllm.setup.model_setup import free_bytes, plan_memory, prepare
from tests.support.inspection import lowered, state_of
from tests.support.paths import ROOT

NOTE_COMPILATION = Runner.note_compilation
GOLDEN = ROOT / "tests" / "golden"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    model, stories = str(GOLDEN / "llama-3.1"), str(GOLDEN / "stories260K")
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_kv_blocks": 200}
    with LLM(model, tokenizer=stories, precompile="all", **sizes) as llm:
        yield llm


def random_params(random: np.random.Generator) -> SamplingParams:
    chosen = {
        "temperature": float(random.choice([0.0, 0.7, 1.2])),
        "max_tokens": int(random.integers(1, 8)),
        "seed": int(random.integers(100)),
    }
    for name, value in [
        ("top_k", 5),
        ("top_p", 0.8),
        ("min_p", 0.1),
        ("repetition_penalty", 1.2),
        ("frequency_penalty", 0.5),
        ("logprobs", 3),
        ("min_tokens", 1),
        ("stop", "Lily"),
    ]:
        if random.random() < 0.15:
            chosen[name] = value
    return SamplingParams(**chosen)


@pytest.mark.ci
def test_what_is_compiled_in_a_step_is_counted(llm: LLM) -> None:
    metrics, runner = Metrics(), llm.engine.runner
    ours, runner.metrics = runner.metrics, metrics
    choose = runner.programs.choose

    def compiling(plan: Plan, *how: object) -> tuple[Key, ...]:
        jax.jit(lambda x: x + len(plan.slots)).lower(np.zeros(3)).compile()
        return choose(plan, *how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "note_compilation", NOTE_COMPILATION)  # without the check that all tests have
        patch.setattr(runner.programs, "choose", compiling)
        llm.generate([[5, 6]], SamplingParams(max_tokens=1), use_tqdm=False)
    runner.metrics = ours
    assert metrics.compilations_after_ready >= 1


@pytest.mark.ci
def test_a_call_takes_the_fast_path(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=9)
    llm.generate([[5, 6, 7]], params, use_tqdm=False)
    with jtu.count_aot_jit_cpp_cache_miss() as count:
        llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert count() == 0


@pytest.mark.ci
def test_every_program_keeps_the_cache_in_place(llm: LLM) -> None:
    runner = llm.engine.runner
    state = state_of(runner)
    state_bytes, token_bytes = device_state.nbytes(state), 4 * math.prod(state.tokens.shape)
    kv = state.kv[0][0].shape
    assert len(set(kv)) == 4, "the cache's shape is like no other array's"
    shape = ",".join(map(str, kv))
    for key in [*runner.programs.covering, *runner.programs.rest]:
        program = runner.programs[key]
        copies = re.findall(rf"= f32\[{shape}\][^ ]* copy\(", program.as_text())
        assert not copies, f"{key} copies the cache"
        changed = token_bytes if key.part == "sample" else state_bytes
        assert program.memory_analysis().alias_size_in_bytes == changed, f"{key} does not reuse what it changes"


@pytest.mark.ci
def test_layers_share_what_is_traced(llm: LLM) -> None:
    """A program's text contains attention, cache writes and the feed-forward once, however many layers call them."""
    runner = llm.engine.runner
    for key in runner.programs.covering:
        if key.part == "sample":
            continue
        text = lowered(runner, key).as_text()
        shared = ["write_kv", "paged_decode", "_mlp", *(["paged_prefill"] if key.shape.tiles else [])]
        assert runner.setup.spec.num_layers == 2
        for name in shared:
            found = len(re.findall(rf"func private @{name}\(", text)), len(re.findall(rf"call @{name}\(", text))
            assert found == (1, 2), (name, found)


def test_tables_of_sizes() -> None:
    assert [shape.rows for shape in decode_shapes(64)] == [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64]
    assert [shape.rows for shape in decode_shapes(20, smallest=2)] == [2, 4, 8, 12, 16, 20]
    assert [shape.rows for shape in decode_shapes(1)] == [1]
    assert [shape.tokens for shape in ragged_shapes(100, 8, 16, 40)] == [16, 32, 64, 96, 100]
    assert [shape.tokens for shape in ragged_shapes(8, 8, 16, 40)] == [8]
    large = [shape.tokens for shape in ragged_shapes(8192, 256, 16, 40)]
    assert large[:9] == [16, 32, 64, 96, 128, 160, 192, 224, 256] and large[-5:] == [2048, 3072, 4096, 6144, 8192]
    assert [shape.tokens for shape in coarser(ragged_shapes(100, 8, 16, 40))] == [16, 32, 64, 100]


@pytest.mark.parametrize(("slots", "tokens"), [(None, 160), (64, 160), (256, 512)])
def test_half_of_a_step_at_least_is_left_for_prompts(slots: int | None, tokens: int) -> None:
    config = EngineConfig(model=str(MODEL_DIR), device="cpu", max_num_seqs=slots)
    assert prepare(config, needs_weights=False).max_num_batched_tokens == tokens


def test_the_tables_keep_padding_low() -> None:
    for name, rate in (("cpu", 2.0), ("gpu", 96.0)):
        machine = padding.MACHINES[name]
        totals = padding.simulate(machine, rate, 120, *padding.tables(name, machine))
        assert 0.02 < padding.waste(totals) < padding.PROMISED, name


def test_a_gpu_has_few_programs_and_greedy_plans_run_in_those_that_sample() -> None:
    sizes = decode_shapes(256, 2, "gpu"), ragged_shapes(8192, 256, 16, 40, "gpu")
    programs = Programs(
        *sizes, lambda key: SimpleNamespace(compile=lambda: key), Metrics(), VARIANTS[1:], coarse_factor=4
    )
    assert programs.num_all <= 65
    programs.begin([*programs.covering, *programs.rest], 2)
    programs.wait()
    ones = np.ones(3, np.int32)
    plan = Plan(0.0, 3, ones, ones.astype(np.int64), ones, ones, ones > 0, ones, np.zeros((0, 3), np.int32))
    assert shown(programs.choose(plan, Variant.GREEDY)) == "decode[16].random"
    assert shown(programs.choose(plan, Variant.FULL)) == "decode[16].full"


def test_where_loading_disturbs_all_steps_nothing_is_compiled_until_none_runs() -> None:
    programs = Programs(
        decode_shapes(8), ragged_shapes(64, 8, 16, 40), lambda key: SimpleNamespace(compile=lambda: key), Metrics()
    )
    programs.begin(programs.covering, 1)
    programs.wait()
    programs.follow(1, only_when_idle=True)
    ones = np.ones(3, np.int32)
    plan = Plan(0.0, 3, ones, ones.astype(np.int64), ones, ones, ones > 0, ones, np.zeros((0, 3), np.int32))
    end = time.monotonic() + 5 * IDLE_SECONDS
    while time.monotonic() < end:
        for variant in (Variant.GREEDY, Variant.RANDOM):
            assert shown(programs.choose(plan, variant)) == "decode[8].forward sample[8].full"
    programs.wait()
    assert shown(programs.choose(plan, Variant.GREEDY)) == "decode[4].greedy"
    assert shown(programs.choose(plan, Variant.RANDOM)) == "decode[4].random", "both, as soon as it was idle"


def test_where_one_user_waits_programs_that_were_kept_are_read_and_no_others() -> None:
    lowered: list[Key] = []

    def lower(key: Key) -> SimpleNamespace:
        lowered.append(key)
        return SimpleNamespace(compile=lambda: key)

    metrics = Metrics()
    programs = Programs(decode_shapes(64, 2, "gpu"), ragged_shapes(1024, 64, 16, 40, "gpu"), lower, metrics)
    kept = {programs.covering[0], *programs.rest[:4]}
    programs.kept = SimpleNamespace(  # type: ignore[assignment]
        has=lambda name, key: key in kept,
        read=lambda name, key: key if key in kept else None,
        compile=lambda name, key, lowered: lowered.compile(),
    )
    programs.begin(programs.covering, 2)
    programs.begin_kept(2)
    programs.wait()
    assert set(programs.ready()) == {*programs.covering, *programs.rest[:4]}
    assert set(lowered) == {*programs.covering[1:]}
    assert metrics.programs_awaited == metrics.programs_compiled == len(programs) < programs.num_all


def test_the_cheapest_ready_program_is_chosen_and_the_one_that_was_missed_follows() -> None:
    compiled: list[str] = []
    go_on = threading.Event()

    def lower(key: Key) -> SimpleNamespace:
        def compile() -> str:
            if len(compiled) >= 3:
                go_on.wait(10)
            compiled.append(str(key))
            return str(key)

        return SimpleNamespace(compile=compile)

    programs = Programs(decode_shapes(8), ragged_shapes(64, 8, 16, 40), lower, Metrics())
    programs.begin(programs.covering, 1)
    programs.wait()
    assert compiled == ["ragged[64].forward", "sample[8].full", "decode[8].forward"]
    ones = np.ones(3, np.int32)
    plan = Plan(0.0, 3, ones, ones.astype(np.int64), ones, ones, ones > 0, ones, np.zeros((0, 3), np.int32))
    largest = "decode[8].forward sample[8].full"
    assert shown(programs.choose(plan, Variant.GREEDY)) == largest
    programs.wait()
    assert len(compiled) == 3, "nothing follows before it may"
    programs.follow(1)
    first = programs.rest[0]
    programs.want(first)
    for _ in range(3):
        assert shown(programs.choose(plan, Variant.FILTERED)) == largest
    go_on.set()
    programs.wait()
    assert sorted(compiled[3:]) == sorted(["decode[4].filtered", str(first)]), "what was wanted, once, and nothing else"
    assert shown(programs.choose(plan, Variant.FILTERED)) == "decode[4].filtered"
    assert shown(programs.choose(plan, Variant.GREEDY)) == "decode[4].filtered"
    programs.wait()
    assert compiled[5:] == ["decode[4].greedy"], "a thread that had nothing left begins again"
    assert shown(programs.choose(plan, Variant.GREEDY, is_held=True)) == largest, "one program cannot wait for masks"
    programs.wait()
    assert sorted(compiled[6:]) == ["decode[4].forward", "sample[4].random"]
    assert shown(programs.choose(plan, Variant.GREEDY, is_held=True)) == "decode[4].forward sample[4].random"


def test_two_halves_run_every_plan_where_there_is_nothing_else() -> None:
    shape = uniform_shape(32, 8, 16, 40)
    programs = Programs([], [shape], lambda key: SimpleNamespace(compile=lambda: key), Metrics(), ())
    programs.begin(programs.covering, 2)
    programs.wait()
    programs.follow(2)
    assert programs.num_all == len(programs) == 2 and not shape.is_decode
    decode = np.ones(3, np.int32)
    chunks = np.array([1, 1, 13, 2, 2, 2, 2, 9], np.int32)  # more chunks than tiles
    for lengths, num_decodes in ((decode, 3), (chunks, 2)):
        ones = np.ones(len(lengths), np.int32)
        plan = Plan(
            0.0, num_decodes, ones, ones.astype(np.int64), ones, lengths, ones > 0, ones, np.zeros((0, 3), np.int32)
        )
        for variant in Variant:
            assert shown(programs.choose(plan, variant)) == "ragged[32].forward sample[8].full"
    programs.wait()
    assert len(programs) == 2


def test_a_plan_with_adapters_runs_in_a_program_that_has_as_many_and_others_do_not() -> None:
    programs = Programs(
        decode_shapes(8),
        ragged_shapes(64, 8, 16, 40),
        lambda key: SimpleNamespace(compile=lambda: key),
        Metrics(),
        max_adapters=6,
    )
    programs.begin(programs.covering, 1)
    programs.wait()
    assert sorted(map(str, programs.covering)) == ["decode[8]+6.forward", "ragged[64]+6.forward", "sample[8].full"]
    programs.follow(1)
    ones = np.ones(3, np.int32)
    plan = Plan(0.0, 3, ones, ones.astype(np.int64), ones, ones, ones > 0, ones, np.zeros((0, 3), np.int32))
    for count, due in ((0, ""), (1, "+1"), (2, "+2"), (3, "+4"), (5, "+6")):
        programs.choose(plan, Variant.GREEDY, num_adapters=count)
        programs.wait()
        assert shown(programs.choose(plan, Variant.GREEDY, num_adapters=count)) == f"decode[4]{due}.greedy"
    buffer = batch.pack(plan, replace(decode_shapes(8)[2], adapters=2), 8, adapters=np.array([1, 2, 0], np.int32))
    assert buffer[-4:].tolist() == [1, 2, 0, 2], (
        "a row without an adapter, and padding, have the number behind the last"
    )


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_program_that_fails_is_tried_twice_while_others_serve(
    num_failures: int, recwarn: pytest.WarningsRecorder
) -> None:
    tried: list[str] = []

    def lower(key: Key) -> SimpleNamespace:
        tried.append(str(key))
        if key.variant is Variant.GREEDY and tried.count(str(key)) <= num_failures:
            raise RuntimeError("too large")
        return SimpleNamespace(compile=lambda: str(key))

    metrics = Metrics()
    programs = Programs(decode_shapes(8), ragged_shapes(64, 8, 16, 40), lower, metrics)
    programs.begin(programs.covering, 1)
    programs.wait()
    programs.follow(2)
    ones = np.ones(3, np.int32)
    plan = Plan(0.0, 3, ones, ones.astype(np.int64), ones, ones, ones > 0, ones, np.zeros((0, 3), np.int32))
    largest = "decode[8].forward sample[8].full"
    assert shown(programs.choose(plan, Variant.GREEDY)) == largest
    programs.wait()
    served = shown(programs.choose(plan, Variant.GREEDY))
    programs.wait()
    assert tried[3:5] == ["decode[4].greedy"] * 2 and metrics.programs_failed == num_failures
    if num_failures == 1:
        assert served == "decode[4].greedy" and not recwarn and len(tried) == 5
    else:
        assert served == largest and ["too large" in str(each.message) for each in recwarn] == [True]
        assert tried[5:] == ["decode[4].random"]
        assert shown(programs.choose(plan, Variant.GREEDY)) == "decode[4].random", "the next one serves in its place"


def shown(way: tuple[Key, ...]) -> str:
    return " ".join(map(str, way))


ENDING = """
import threading, time
import jax, numpy as np
from jaxllm.runner import compiled_programs
from jaxllm.runner.batch import decode_shapes, ragged_shapes
from jaxllm.metrics import Metrics

began = threading.Event()
is_following = False

def lower(key):
    def traced(x):
        x = x * np.arange(16, dtype=np.float32)  # a constant, which JAX holds by a finalizer while it traces
        if is_following:
            began.set()
            time.sleep(0.5)
        return x + 1
    return jax.jit(traced).lower(jax.ShapeDtypeStruct((16,), np.float32))

table = compiled_programs.Programs(decode_shapes(2), ragged_shapes(16, 2, 16, 40), lower, Metrics())
table.begin(table.covering, 1)
table.wait()
is_following = True
table.follow(1)
table.want(table.rest[0])
assert began.wait(60)
"""
WAITS = "jaxllm: waiting for a running compilation before the process ends\n"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("end", "shown"),
    [("", ""), ("table.close()", ""), ("compiled_programs.EXIT_SECONDS = 0.1", WAITS)],
    ids=["at once", "closed", "late"],
)
def test_a_script_may_end_while_a_program_is_traced(end: str, shown: str) -> None:
    done = subprocess.run([sys.executable, "-c", ENDING + end], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, shown)


def test_a_failure_to_compile_is_not_hidden() -> None:
    def lower(key: Key) -> str:
        raise RuntimeError(f"no {key}")

    programs = Programs(decode_shapes(2), ragged_shapes(16, 2, 16, 40), lower, Metrics())
    programs.begin(programs.covering, 2)
    with pytest.raises(RuntimeError, match="no "):
        programs.wait()


@pytest.mark.parametrize("count", [1, 7, 8, 1000, 4097, 10922, 123456])
def test_the_number_of_blocks_is_coarse(count: int) -> None:
    rounded = memory_plan.coarse(count)
    assert count * 7 / 8 <= rounded <= count
    assert memory_plan.coarse(rounded) == rounded


def test_a_pool_asked_for_by_nobody_holds_at_least_one_sequence() -> None:
    config = EngineConfig(
        model=str(GOLDEN / "stories260K"), device="cpu", max_num_seqs=1, max_model_len=300, block_size=4
    )
    setup = prepare(config, needs_weights=False)
    plan = plan_memory(config, setup, free_bytes(setup))
    assert setup.max_model_len == 300 and plan.num_blocks == 75


@pytest.mark.ci
def test_two_thousand_steps_leave_no_memory_behind(llm: LLM) -> None:
    """Memory of device and host after 2,000 steps with changing requests equals that after the first 500."""
    engine, process = llm.engine, psutil.Process()
    random = np.random.default_rng(1)
    start, num_requests = engine.metrics.steps, 0
    resident: list[int] = []
    on_device: list[int] = []
    for end in (500, 2000):
        while engine.metrics.steps < start + end:
            while engine.load().running + engine.load().waiting < 6:
                prompt = random.integers(3, 128, int(random.integers(1, 60))).tolist()
                engine.add_request(f"steady-{num_requests}", prompt, random_params(random))
                num_requests += 1
            engine.step()
        while engine.has_unfinished_requests():
            engine.step()
        gc.collect()
        return_freed_memory()  # memory of other tests that the C library kept
        resident.append(process.memory_info().rss)
        on_device.append(sum(array.nbytes for array in jax.live_arrays()))
    assert on_device[0] == on_device[1]
    assert resident[1] - resident[0] < 4 << 20, "2 kB a step at most, of the host's memory"


def test_a_cache_that_cannot_be_is_told_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = jax.config.values["jax_compilation_cache_dir"]
    (tmp_path / "file").write_text("in the way")
    try:
        for folder, kept in (
            (tmp_path / "file", False),
            (tmp_path / "file" / "in", False),
            (tmp_path / "a" / "b", True),
        ):
            caplog.clear()
            use_compilation_cache(folder)
            assert (jax.config.values["jax_compilation_cache_dir"] == str(folder)) is kept
            assert [line.startswith("compiled programs are not kept: ") for line in caplog.messages] == [True] * (
                not kept
            )
    finally:
        use_compilation_cache(Path(before)) if before else jax.config.update("jax_compilation_cache_dir", None)
