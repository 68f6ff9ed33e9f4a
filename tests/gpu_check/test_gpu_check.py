"""`make gpu-check` as far as a CPU goes: the dry run passes, and sees what is wrong; the tuner lists and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pallas_kernels import choice, measuring, tune, tuning
from pallas_kernels.attention import xla_gather
from tests.gpu_check import __main__ as gpu_check
from tests.gpu_check import child, graphs, kernels, report
from tests.gpu_check.check import Check
from tests.gpu_check.parts import PARTS, missing


def check(folder: Path, *names: str) -> tuple[int, dict]:
    """Run parts dry, in this process; return the exit status and the JSON."""
    code = gpu_check.main(["--dry", "--out", str(folder), "--only", *names], start=child.run)
    (path,) = folder.glob("*.json")
    assert path.with_suffix(".md").read_text().startswith("# cpu, ")
    return code, json.loads(path.read_text())


@pytest.mark.slow
def test_the_dry_run_passes(tmp_path):
    """In processes of their own, as on a GPU; what is not installed here is a line."""
    code = gpu_check.main(["--dry", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    assert code == 0
    assert set(result) == {"device", "date", "is_dry", "machine", "parts"} and set(result["parts"]) == set(PARTS)
    for name, part in result["parts"].items():
        assert set(part) == {"status", "seconds", "measured", "failures", "not_run", "skipped", "targets", "answers"}
        assert part["status"] == "done" and not part["failures"] and not part["targets"], name
        if absent := missing(PARTS[name].needs):
            assert all(one in part["skipped"][0] for one in absent)
    assert result["machine"]["read_bytes_per_second"] > 0 < result["machine"]["flops_per_second"]
    compared = {(row["operation"], row["by"]) for row in result["parts"]["correctness"]["measured"]}
    assert {("paged_decode", "xla_lanes"), ("paged_decode", "xla_gather"), ("paged_prefill", "xla_gather")} <= compared
    for name, keys in {
        "kernels": {"call", "by", "microseconds", "share", "of"},
        "step": {"step", "milliseconds", "floor_milliseconds", "times"},
        "throughput": {"model", "by", "requests", "seconds", "tokens_per_second"},
    }.items():
        assert any(set(row) == keys for row in result["parts"][name]["measured"]), name
    assert len(result["parts"]["questions"]["answers"]) == 7


@pytest.mark.slow
def test_a_wrong_kernel_is_seen(tmp_path, monkeypatch):
    right = xla_gather.paged_decode

    def wrong(*arrays, **options):
        out = right(*arrays, **options)
        return out.at[-1, 0].multiply(1.05)  # one head of one row

    monkeypatch.setattr(xla_gather, "paged_decode", wrong)
    code, result = check(tmp_path, "correctness")
    assert code == 1
    failures = result["parts"]["correctness"]["failures"]
    assert failures and all(line.startswith("paged_decode=xla_gather") for line in failures)


def test_a_part_that_raises_or_dies_stops_no_other(tmp_path, capsys):
    def start(name: str, folder: Path, seconds: float, is_dry: bool) -> int:
        notes = Check(name, folder, seconds, is_dry)
        if name == "machine":
            notes.measure(device="cpu")
        elif name == "correctness":
            return 139
        elif name == "step":
            notes.measure(step="one")
            return 124
        with notes.guarded("what follows"):
            raise RuntimeError("no\nmore")
        notes.done()
        return 0

    assert gpu_check.main(["--out", str(tmp_path)], start=start) == 1
    parts = json.loads(next(tmp_path.glob("*.json")).read_text())["parts"]
    assert parts["correctness"]["failures"] == ["the rest of correctness: it was ended with status 139"]
    assert parts["step"]["status"].startswith("out of time") and parts["step"]["measured"] == [{"step": "one"}]
    assert parts["step"]["not_run"] and report.verdict(parts["step"]) == "incomplete"
    assert (
        parts["questions"]["skipped"] == ["what follows: RuntimeError: no"] and parts["questions"]["status"] == "done"
    )
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


def test_without_a_gpu_there_is_no_check(tmp_path, capsys):
    assert gpu_check.main(["--out", str(tmp_path)], start=child.run) == 2
    assert "there is nothing to check: JAX sees cpu only" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_what_the_log_says_of_graphs_is_counted():
    """In the words of XLA's command_buffer_thunk.cc and traced command buffers."""
    log = """I1126 12:00:00.000001 7 command_buffer_thunk.cc:296] Executing warm up iteration of command buffer thunk
    I1126 12:00:00.1 7 command_buffer_thunk.cc:320] Updated command buffer in 1500 \u03bcs; num_commands=293
    I1126 12:00:00.2 7 command_buffer_thunk.cc:331] Execute command buffer on device #0; num_executions=1
    I1126 12:00:00.3 7 command_buffer_thunk.cc:320] Updated command buffer in 500 \u03bcs; num_commands=293
    I1126 12:00:00.4 7 traced_command_buffer.cc:86] Command buffer trace cache create new item for command attend
    I1126 12:00:00.5 7 command_buffer_thunk.cc:331] Execute command buffer on device #0; num_executions=1"""
    assert graphs.Graphs.of(log) == (2, 2, 1, 1000.0)


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
    kernels._note_fastest(notes, "8B", heads, [slower, faster])
    kept, row = choice.fastest()
    assert kept == other and row["measured"]["times"] == 1.058
    assert row | {"fastest": "flashinfer", "group": 4, "head_size": 128, "dtype": "bfloat16"} == row
    kernels._note_fastest(notes, "8B", heads, [{"triton": 0.5}])
    assert choice.fastest() == [kept, row], "what was not timed stays"
    kernels._note_fastest(notes, "8B", heads, [slower])
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
    """What fails to compile is passed over; the table is as before but for the row."""
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
    """The loop's program keeps the operation inside its loop, whatever XLA can see through."""
    assert 0 < measuring.seconds(case.step("xla_gather"), case.arrays, 4, 2) < 1


def test_the_bytes_of_a_case_are_what_it_must_read_and_write():
    # 3 rows of 48 places, 2 heads of 16 numbers of 4 bytes, keys and values; queries and outputs of 4 heads.
    case = measuring.decode((4, 2, 16), 3, 48, "float32", None, 1)
    assert case.num_bytes == 2 * 3 * 48 * 2 * 16 * 4 + 2 * 3 * 4 * 16 * 4
    assert case.flops == 4 * 3 * 48 * 4 * 16
    assert measuring.prefill((4, 2, 16), 1, 3, "float32").flops == 4 * (1 + 2 + 3) * 4 * 16
    # One head of 24 numbers, of which 16 are values as well.
    case = measuring.decode((4, 1, 24), 3, 48, "float32", None, 1, 16)
    assert case.num_bytes == 3 * 48 * 24 * 4 + 3 * 4 * (24 + 16) * 4
    assert case.flops == 2 * 3 * 48 * 4 * (24 + 16)
