"""`make gpu-check` on a CPU: the dry run passes, planted mistakes are found; the tuner lists and writes."""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from benchmarks import bare
from jaxllm.config import EngineArgs
from jaxllm.embedded import MODEL_DIR
from jaxllm.metrics import Metrics
from jaxllm.runner import batch
from jaxllm.runner.compiled_programs import VARIANTS, Programs
from jaxllm.sampling.sampler import Variant
from jaxllm.setup import model_setup
from pallas_kernels import choice, measuring, tune, tuning
from pallas_kernels.attention import xla_lanes
from tests.gpu_check import __main__ as gpu_check
from tests.gpu_check import (
    as_gpu,
    by_time,
    child,
    correctness,
    feature,
    features,
    graphs,
    kernels,
    machine,
    report,
    starts,
)
from tests.gpu_check.check import Check
from tests.gpu_check.parts import PARTS


def check(folder: Path, *names: str) -> tuple[int, dict]:
    """Run parts dry, in this process; return the exit status and the JSON."""
    code = gpu_check.main(["--dry", "--out", str(folder), "--only", *names], start=child.run)
    (path,) = folder.glob("*.json")
    assert path.with_suffix(".md").read_text().startswith("# cpu, ")
    return code, json.loads(path.read_text())


@pytest.mark.slow
def test_the_dry_run_passes(tmp_path):
    """In separate processes, with a GPU's table of programs."""
    code = gpu_check.main(["--dry", "--minutes", "30", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    parts = result["parts"]
    assert set(result) == {"device", "date", "is_dry", "machine", "parts"} and set(parts) == set(PARTS)
    for name, part in parts.items():
        assert set(part) == {"status", "seconds", "measured", "failures", "not_run", "skipped", "targets", "answers"}
        assert part["status"] == "done" and not part["failures"] and not part["targets"], name
        assert part["measured"], name
    assert code == (3 if any(part["not_run"] for part in parts.values()) else 0)
    assert result["machine"]["read_bytes_per_second"] > 0 < result["machine"]["flops_per_second"]
    compared = {(row.get("operation"), row.get("by")) for row in parts["correctness"]["measured"]}
    assert {("paged_decode", "xla_lanes"), ("paged_decode", "pallas")} <= compared
    model = parts["model"]["measured"]
    steps = [row for row in model if "floor_milliseconds" in row]
    assert len(steps) == 4 and all(row["program"].endswith(".random") for row in steps), "a GPU's table"
    assert {row["step"] for row in model if "kernel" in row} == {
        "120 tokens of prompts", "decode, 1 rows of 48", "decode, 8 rows of 48",
    }  # fmt: skip
    assert [row["requests"] for row in model if "requests" in row] == [2, 8]
    assert parts["features"]["measured"][-1]["cases_compared"] == len(feature.CASES)
    assert [row["rows"] for row in parts["graphs"]["measured"] if "rows" in row] == [1, 8]
    assert len([row for row in parts["starts"]["measured"] if row.get("seconds_to_text")]) == 4


@pytest.mark.slow
def test_a_wrong_kernel_is_seen(tmp_path, monkeypatch):
    right = xla_lanes.paged_decode

    def wrong(*arrays, **options):
        out = right(*arrays, **options)
        return out.at[-1, 0].multiply(1.05)  # one head of one row

    monkeypatch.setattr(xla_lanes, "paged_decode", wrong)
    code, result = check(tmp_path, "correctness")
    assert code == 1
    failures = result["parts"]["correctness"]["failures"]
    assert failures and all(line.startswith("paged_decode=xla_lanes") for line in failures)


def folding(turn, array):
    """Eight turns that XLA folds into one."""
    for number in range(8):
        array = array + (turn + number)
    return array


def test_a_ceiling_that_folds_is_a_failure(tmp_path):
    notes = Check("machine", tmp_path, 9, is_dry=True)
    right = machine.ceilings(True)
    assert set(right) == {"read", "copy", "product"}
    small = right["read"]._replace(arrays=lambda: (jnp.ones((64, 64)),), work=1 << 14)
    assert machine.rate_of(notes, "read", small) > 0 and not notes.notes["failures"]
    planted = small._replace(run=folding, turns=8, work=8 << 14)
    machine.rate_of(notes, "copy", planted)
    assert notes.notes["failures"] == [
        "the ceiling 'copy' is wrong: its program of 8 turns reads the array 1 times"
    ]  # fmt: skip


def test_figures_above_the_datasheet_are_failures():
    found = machine.above_datasheet("NVIDIA H100 80GB HBM3", 22e12, 700e12)
    assert found == ["22.00 TB/s were measured, and NVIDIA H100 80GB HBM3 has 3.36"]
    assert machine.above_datasheet("NVIDIA H200", 4.4e12, 1200e12) == [
        "1200 TFLOP/s were measured, and NVIDIA H200 has 990"
    ]
    assert not machine.above_datasheet("NVIDIA B200", 7.5e12, 1800e12)
    assert not machine.above_datasheet("another card", 1e15, 1e18)


def test_a_ceiling_that_raises_leaves_the_datasheets(tmp_path, monkeypatch):
    def broken(check, name, ceiling):
        raise MemoryError("no memory")

    monkeypatch.setattr(machine, "rate_of", broken)
    monkeypatch.setattr(machine, "limits_of", lambda device: machine.DATASHEETS["H100"])
    notes = Check("machine", tmp_path, 9, is_dry=True)
    machine.run(notes)
    assert notes.notes["measured"][0]["read_bytes_per_second"] == 3.36e12 and len(notes.notes["failures"]) == 3


def test_a_greedy_program_asked_of_a_gpus_table_is_an_error():
    """The table is that of `Runner._list_programs`."""
    shapes = batch.decode_shapes(8, 2, "gpu"), batch.ragged_shapes(128, 8, 16, 9, "gpu")
    programs = Programs(*shapes, lambda key: None, Metrics(), VARIANTS[1:])
    engine: Any = SimpleNamespace(runner=SimpleNamespace(programs=programs))
    assert bare.narrowest(programs) is Variant.RANDOM
    with pytest.raises(ValueError, match=r"no greedy program of \[2, 8\] rows"):
        bare.compile_greedy(engine, [2, 8], [], Variant.GREEDY)
    with pytest.raises(ValueError, match="no random program"):
        bare.compile_greedy(engine, [3], [])
    assert bare.narrowest(Programs(*shapes, lambda key: None, Metrics())) is Variant.GREEDY


def test_a_dry_engine_has_the_limits_of_a_gpu():
    config = EngineArgs(model=str(MODEL_DIR))
    usual = model_setup.prepare(config)
    with as_gpu.limits():
        setup = model_setup.prepare(config)
    assert (usual.max_num_seqs, usual.max_num_batched_tokens) == (64, 160)
    assert (setup.max_num_seqs, setup.max_num_batched_tokens) == (256, 8192)
    assert setup.token_cost == model_setup.TOKEN_COST["gpu"] and model_setup.prepare(config) == usual


@pytest.mark.ci
def test_what_a_cpu_wrote_is_what_a_cpu_finds():
    """The nine cases of one engine; `python -m tests.gpu_check.features` compares all."""
    expected = json.loads(features.EXPECTED.read_text())
    assert set(expected) == set(feature.CASES)
    found: list[dict] = []
    feature.run("usual", found.append)
    assert len(found) == 9
    for result in found:
        assert not list(features.differences(result["case"], result["value"], expected[result["case"]])), result


def test_a_feature_that_differs_is_seen_and_a_tie_is_none():
    right = [{"ids": [4, 5, 6], "lp": [-1.0, -2.0, -3.0], "gap": [0.5, 0.001, 0.5]}]
    assert not list(features.differences("logprobs", right, right))
    tie = [{"ids": [4, 9, 9], "lp": [-1.0, -2.5, -9.0]}]
    assert not list(features.differences("logprobs", tie, right))
    (line,) = features.differences("logprobs", [{"ids": [4, 5, 9], "lp": [-1.0, -2.0, -3.0]}], right)
    assert line == "output 0 differs from token 2 on: [9], not [6]"
    (line,) = features.differences("logprobs", [{"ids": [4, 5], "lp": [-1.0, -2.0]}], right)
    assert "differs from token 2" in line
    (line,) = features.differences("logprobs", [right[0] | {"lp": [-1.0, -2.1, -3.0]}], right)
    assert line == "output 0: a log-probability is 0.1000 off, more than 0.002"
    assert list(features.differences("logprobs", [right[0] | {"lp": [float("nan")] * 3}], right))
    assert list(features.differences("logprobs", [], right))
    assert list(features.differences("logprobs", [{"ids": [4, 5, 6]}], right))
    assert list(features.differences("sampled", [{"ids": [4, 9]}], [{"ids": [4, 5]}]))
    assert list(features.differences("embedder", [[0.1, 0.2]], [[0.1, 0.3]]))
    assert not list(features.differences("embedder", [[0.1, 0.2]], [[0.1, 0.201]]))


def test_a_group_that_dies_fails_and_one_without_time_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    results, trouble = features.group_of("usual", "cpu", tmp_path, time.monotonic() + 9)
    assert not results and trouble == "its process ended with 1: "
    assert features.group_of("usual", "cpu", tmp_path, time.monotonic()) == ([], "")
    notes = Check("features", tmp_path, 9, is_dry=True)
    features.run(notes)
    assert len(notes.notes["failures"]) == len(feature.CASES) and notes.notes["measured"][-1]["cases_compared"] == 0


def test_cases_take_their_bound_of_memory(monkeypatch):
    memory = correctness.Memory(10 / correctness.SHARE)
    running, most = 0, 0

    def use(size: float) -> None:
        nonlocal running, most
        with memory.taken(size):
            running += size if size <= 10 else 10
            most = max(most, running)
            time.sleep(0.01)
            running -= size if size <= 10 else 10

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(use, [4, 6, 3, 99, 5, 5, 2, 8]))
    assert most == 10
    assert correctness.most_bytes("fused_experts", correctness.MIXTURES[0]) > 6e9
    assert correctness.most_bytes("sample", correctness.MODELS[0]) == 2 << 30


def test_bytes_of_products_are_read_from_compiled_text():
    text = """HloModule m
%gemm (p0: bf16[16,64], p1: bf16[64,32]) -> bf16[16,32] {
  ROOT %dot.1 = bf16[16,32]{1,0} dot(%p0, %p1)
}

%other (p0: f32[4]) -> f32[4] {
  ROOT %neg = f32[4]{0} negate(%p0)
}

ENTRY %main (a: bf16[16,64], b: bf16[64,32]) -> bf16[16,32] {
  %a = bf16[16,64]{1,0} parameter(0)
  %b = bf16[64,32]{1,0} parameter(1)
  %loop.2 = f32[4]{0} fusion(%a), kind=kLoop, calls=%other
  ROOT %gemm_fusion_dot.7 = bf16[16,32]{1,0} fusion(%a, %b), kind=kCustom, calls=%gemm
}
"""
    products = by_time.product_bytes(text)
    assert products == {"gemm_fusion_dot_7": 2 * (16 * 64 + 64 * 32 + 16 * 32)}
    assert by_time.bytes_of("gemm_fusion_dot_7_1", products, {}) == products["gemm_fusion_dot_7"]
    assert by_time.bytes_of("multiply_fused_0", products, {"multiply_fused": 9}) == 9
    assert by_time.bytes_of("loop_2", products, {}) is None
    assert by_time.num_bytes("(f32[2,3]{1,0}, pred[8]{0})") == 32


def test_the_seconds_to_the_first_text(tmp_path):
    command = [sys.executable, "-c", "import time; print('a', flush=True); time.sleep(0.3)"]
    seconds, status = starts.first_text(command, dict(os.environ), 9, tmp_path / "log")
    assert 0 < seconds < 5 and status == 0
    silent = [sys.executable, "-c", "import time; time.sleep(9)"]
    assert starts.first_text(silent, dict(os.environ), 0.3, tmp_path / "log")[1] is None
    assert starts.first_text([sys.executable, "-c", ""], dict(os.environ), 9, tmp_path / "log")[1] == 1
    notes = Check("starts", tmp_path, 0.5, is_dry=False)
    starts.start_of(notes, "a model", [], tmp_path, 9)
    assert notes.notes["not_run"]


def test_a_part_that_raises_or_dies_stops_no_other(tmp_path, capsys):
    def start(name: str, folder: Path, seconds: float, is_dry: bool) -> int:
        notes = Check(name, folder, seconds, is_dry)
        if name == "machine":
            notes.measure(device="cpu")
        elif name == "correctness":
            return 139
        elif name == "model":
            notes.measure(step="one")
            return 124
        with notes.guarded("what follows"):
            raise RuntimeError("no\nmore")
        notes.done()
        return 0

    assert gpu_check.main(["--out", str(tmp_path)], start=start) == 1
    parts = json.loads(next(tmp_path.glob("*.json")).read_text())["parts"]
    assert parts["correctness"]["failures"] == ["the rest of correctness: it ended with status 139"]
    assert parts["model"]["status"].startswith("was out of time") and parts["model"]["measured"] == [{"step": "one"}]
    assert parts["model"]["not_run"] and report.verdict(parts["model"]) == "incomplete"
    assert parts["starts"]["skipped"] == ["what follows: RuntimeError: no"] and parts["starts"]["status"] == "done"
    assert "kernels" not in parts, "it runs if it is named"
    assert "FAILED   correctness" in capsys.readouterr().out


def test_what_there_was_no_time_for_is_not_run_and_parts_of_a_day_stand_together(tmp_path):
    def start(name: str, folder: Path, seconds: float, is_dry: bool) -> int:
        notes = Check(name, folder, seconds, is_dry)
        if name == "machine":
            notes.measure(device="cpu")
        elif name == "correctness":
            notes.not_run("the last one")
        notes.done()
        return 0

    def run(name: str) -> tuple[int, dict]:
        code = gpu_check.main(["--out", str(tmp_path), "--only", name], start=start)
        return code, json.loads(next(tmp_path.glob("*.json")).read_text())["parts"]

    code, parts = run("correctness")
    assert code == 3 and report.verdict(parts["correctness"]) == "incomplete"
    code, parts = run("kernels")
    assert code == 0 and set(parts) == {"machine", "correctness", "kernels"}
    assert "## correctness: incomplete" in next(tmp_path.glob("*.md")).read_text()


def test_a_package_that_is_absent_is_said_and_its_part_not_run(tmp_path, monkeypatch):
    monkeypatch.setitem(PARTS, "features", PARTS["features"]._replace(needs=("numpy", "no_such", "no_such.part")))
    assert child.run("features", tmp_path, 9, is_dry=True) == 0
    notes = json.loads((tmp_path / "features.json").read_text())
    assert notes["not_run"] == ["all of it: no_such, no_such.part are not installed"]


def test_without_a_gpu_there_is_no_check(tmp_path, capsys):
    assert gpu_check.main(["--out", str(tmp_path)], start=child.run) == 2
    assert "there is nothing to check: JAX sees cpu only" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_what_the_log_says_of_graphs_is_counted():
    """In the format of XLA's command_buffer_thunk.cc and traced command buffers."""
    log = """I1126 12:00:00.000001 7 command_buffer_thunk.cc:296] Executing warm up iteration of command buffer thunk
    I1126 12:00:00.1 7 command_buffer_thunk.cc:320] Updated command buffer in 1500 \u03bcs; num_commands=293
    I1126 12:00:00.2 7 command_buffer_thunk.cc:331] Execute command buffer on device #0; num_executions=1
    I1126 12:00:00.3 7 command_buffer_thunk.cc:320] Updated command buffer in 500 \u03bcs; num_commands=293
    I1126 12:00:00.4 7 traced_command_buffer.cc:86] Command buffer trace cache create new item for command attend
    I1126 12:00:00.5 7 command_buffer_thunk.cc:331] Execute command buffer on device #0; num_executions=1"""
    assert graphs.Graphs.of(log) == (2, 2, 1, 1000.0)
    # Of jax 0.11.2, on an H100.
    log = """I1127 09:43:27.5 5575 command_buffer_thunk.cc:336] [0] Create/Update command buffer by recoding command \
    buffer cmd sequence after 1 executions since last update; num_commands=241; updated_allocs=1; needs_update=true
    I1127 09:43:27.6 5575 command_buffer_thunk.cc:362] [0] Updated command buffer in 40 \u03bcs; num_commands=241
    I1127 09:43:27.7 5575 command_buffer_thunk.cc:371] [0] Execute command buffer; num_executions=1"""
    assert graphs.Graphs.of(log) == (1, 1, 0, 40.0)


def test_targets_are_said_to_be_reached_or_behind(tmp_path):
    notes = Check("step", tmp_path, 9, is_dry=False)
    notes.target("steps", 1.1, 1.15, is_least=False)
    notes.target("bandwidth", 0.5, 0.8, is_least=True)
    text = report.markdown({"step": notes.notes}, "cpu", "today")
    assert "| step | steps: 1.1, aim at most 1.15 | reached |" in text
    assert "| step | bandwidth: 0.5, aim at least 0.8 | behind |" in text


def test_a_rival_that_is_faster_goes_into_the_table_and_out_again(tmp_path, monkeypatch):
    table = tmp_path / "fastest.json"
    other = {"operation": "sample", "fastest": "xla", "measured": {}}
    table.write_text(json.dumps([other]))
    monkeypatch.setattr(choice, "FASTEST", table)
    choice.fastest.cache_clear()
    notes = Check("kernels", tmp_path, 9, is_dry=False)
    heads = kernels.HEADS["8B"]
    slower, faster = {"triton": 0.5, "flashinfer": 0.4}, {"triton": 0.5, "flashinfer": 0.7, "xla": 0.01}
    assert kernels.gains([slower, faster, {"triton": 0.5}], "triton") == {"flashinfer": pytest.approx(1.12**0.5)}
    kernels.note_fastest(notes, "8B", heads, [slower, faster])
    kept, row = choice.fastest()
    assert kept == other and row["measured"]["times"] == 1.058
    assert row | {"fastest": "flashinfer", "group": 4, "head_size": 128, "dtype": "bfloat16"} == row
    kernels.note_fastest(notes, "8B", heads, [{"triton": 0.5}])
    assert choice.fastest() == [kept, row], "what was not timed stays"
    kernels.note_fastest(notes, "8B", heads, [slower])
    assert choice.fastest() == [kept]
    choice.fastest.cache_clear()


def test_the_tuner_lists_candidates_and_refuses_without_a_gpu(capsys):
    assert tune.main(["--dry", "--operation", "paged_prefill", "--head-size", "128", "--cache-bits", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(tuning.PROCESSORS)
    assert "paged_prefill, capability 90, heads of 128, 16 bits: 128x64/8w3s " in lines[1]
    assert tune.main([]) == 1
    assert capsys.readouterr().err == "nothing to tune: JAX sees no NVIDIA GPU here, only cpu\n"
    for row in tuning.table():
        found = tune.candidates(row)
        assert len({json.dumps(one, sort_keys=True) for one in found}) == len(found) >= 8


@pytest.mark.ci
def test_the_fastest_candidate_is_written(tmp_path, monkeypatch):
    """Candidates that fail to compile are skipped; only one row of the table changes."""
    row = dict(next(one for one in tuning.table() if one["capability"] == 90))
    seen = []

    def seconds(step, arrays, turns):
        seen.append({name: row[name] for name in ("keys", "warps", "stages")})
        if row["stages"] == 5:
            raise RuntimeError("out of resource: shared memory")
        return 1e-6 * (1 if seen[-1] == {"keys": 32, "warps": 8, "stages": 3} else 2)

    monkeypatch.setattr(measuring, "seconds", seconds)
    monkeypatch.setattr(measuring, "POOL_BYTES", 1)
    monkeypatch.setattr(tune, "DECODE", (1, 16))
    monkeypatch.setattr(tune.importlib.metadata, "version", lambda name: "3.6.0")
    before = dict(row)
    lines: list[str] = []
    tuned = tune.tune(row, 90, lines.append)
    assert row == before and len(seen) == len(tune.candidates(row)) and any("out of resource" in line for line in lines)
    assert {name: tuned[name] for name in ("keys", "warps", "stages")} == {"keys": 32, "warps": 8, "stages": 3}
    assert tuned["measured"]["microseconds"] == 1.0 and set(tuned["measured"]) == {
        "device", "jax", "triton", "microseconds",
    }  # fmt: skip
    tune.write(tuning.table(), tmp_path / "table.json")
    assert (tmp_path / "table.json").read_text() == tuning.PATH.read_text()
    tune.write([tuned], tmp_path / "table.json")
    assert json.loads((tmp_path / "table.json").read_text()) == [tuned]


@pytest.mark.ci
@pytest.mark.parametrize("case", [measuring.decode((4, 2, 16), 3, 40, "float32", None, 1 << 16),
                                  measuring.prefill((4, 2, 16), 2, 40, "float32"),
                                  measuring.prefill((4, 1, 24), 2, 40, "float32", None, 16)])  # fmt: skip
def test_what_is_timed_is_done_in_every_turn(case):
    """The loop's program keeps the operation inside its loop, whatever XLA can optimize."""
    assert 0 < measuring.seconds(case.step("xla"), case.arrays, 4, 2) < 1


def test_the_bytes_of_a_case_are_what_it_must_read_and_write():
    # 3 rows of 48 places, 2 heads of 16 numbers of 4 bytes, keys and values; queries and outputs of 4 heads.
    case = measuring.decode((4, 2, 16), 3, 48, "float32", None, 1)
    assert case.num_bytes == 2 * 3 * 48 * 2 * 16 * 4 + 2 * 3 * 4 * 16 * 4
    assert case.flops == 4 * 3 * 48 * 4 * 16
    assert measuring.prefill((4, 2, 16), 1, 3, "float32").flops == 4 * (1 + 2 + 3) * 4 * 16
    # One head of 24 numbers, 16 of which are values as well.
    case = measuring.decode((4, 1, 24), 3, 48, "float32", None, 1, 16)
    assert case.num_bytes == 3 * 48 * 24 * 4 + 3 * 4 * (24 + 16) * 4
    assert case.flops == 2 * 3 * 48 * 4 * (24 + 16)
