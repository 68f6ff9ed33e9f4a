"""`jaxllm bench startup` and `bench explain`, the phases of a start, and what is told of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from jaxllm import LLM, EngineError
from jaxllm.bench import startup
from jaxllm.commands import cli
from jaxllm.compiling.startup_timing import Phase, Phases, describe
from tests.support import paths
from tests.support.sizes import SLOTS, flags

STORIES = str(paths.STORIES)
SMALL = SLOTS | {"model": STORIES}
FLAGS = flags(SMALL)


def start(kind: startup.Kind, first: float, everything: float | None = None) -> startup.Start:
    phases = [Phase("weights", 0.5, "1 MiB")._asdict(), Phase("tracing", 2.0, "2 programs", True)._asdict()]
    return startup.Start(kind, 0.5, first - 0.25, first, everything, 2, phases)


@pytest.mark.ci
def test_an_engine_tells_its_phases(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "jaxllm"), LLM(**SMALL) as llm:
        phases = {phase.name: phase for phase in llm.engine.start_phases}
    shown = caplog.text
    assert list(phases) == [
        *("setup", "tokenizer", "plan", "weights", "programs", "tracing", "compiling", "memory", "other")
    ]
    assert {phase.name for phase in phases.values() if phase.is_beside} == {"tracing", "compiling"}
    assert phases["weights"].cause.endswith(f"from {STORIES}") and "/s)" in phases["weights"].cause
    assert "2 × " not in phases["setup"].cause and "cpu" in phases["setup"].cause
    # Three for steps, one that allocates, and two that score, two that patch and one that copies, which a process
    # compiles for its first engine of a shape alone.
    numbers = [int(word) for word in phases["compiling"].cause.split() if word.isdigit()]
    assert 5 <= sum(numbers) <= 9
    assert phases["other"].seconds >= 0.0
    assert all(name in shown for name in phases) and "ready in" in shown


def test_phases_follow_each_other_and_sum_to_the_whole() -> None:
    phases = Phases()
    with phases.phase("first") as causes:
        causes.append("why")
    phases.note_beside("else", 100.0, "meanwhile")
    first, other, rest = phases.finished()
    assert (first.name, first.cause, other.is_beside, rest.name) == ("first", "why", True, "other")
    assert 0.0 <= first.seconds + rest.seconds < 1.0
    assert describe((Phase("a", 1.0, "x"), Phase("b", 7.0, "y", True), Phase("c", 0.5))).splitlines()[0] == (
        "ready in 1.50 s:"
    )


def test_starts_are_summed_up_by_kind() -> None:
    starts = [start("cold", 10.0), start("cold", 12.0), start("warm", 3.0, 4.0), start("warm", 5.0, 6.0)]
    found = startup.summary(starts)
    assert (found["cold_ready_s"], found["warm_first_token_s"], found["warm_all_programs_s"]) == (10.75, 4.0, 5.0)
    assert "cold_all_programs_s" not in found and len(found["starts"]) == 4
    text = startup.report(starts)
    assert "First token (s):                         11.00" in text and "(2.00) 2 programs" in text


@pytest.mark.ci
def test_the_command_starts_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Warm, from the cache of the tests: one process."""
    with LLM(**SMALL) as llm:
        cache = str(llm.engine.config.cache_dir())
    file = tmp_path / "startup.json"
    code = cli.main(
        ["bench", "startup", "--num-iters", "1", "--compilation-cache-dir", cache, "--output-json", str(file), *FLAGS]
    )
    assert code == 0, capsys.readouterr().err
    result = json.loads(file.read_text())
    (only,) = result["starts"]
    assert only["kind"] == "warm" and 0.0 < only["import_s"] < only["ready_s"] < only["first_token_s"]
    assert result["warm_ready_s"] == only["ready_s"] and "commit" in result["environment"]
    assert "0 compiled" in next(phase["cause"] for phase in only["phases"] if phase["name"] == "compiling")


@pytest.mark.ci
def test_a_limit_fails_and_so_does_a_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(*_: Any, **__: Any) -> list[startup.Start]:
        return [start("cold", 10.0), start("warm", 3.0)]

    with monkeypatch.context() as patched:
        patched.setattr(startup, "measure", measure)
        assert cli.main(["bench", "startup", "--limit-cold", "10.5", "--limit-warm", "3.5"]) == 0
        assert cli.main(["bench", "startup", "--limit-warm", "2.5"]) == 1
    assert "the first token of a warm start took 3.0 s; the limit is 2.5 s." in capsys.readouterr().err
    with pytest.raises(EngineError, match=r"a start failed: .*no folder nothing is here"):
        startup.measure({"model": "nothing", "device": "cpu"}, 1, cache="unused")


@pytest.mark.ci
def test_explain_is_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "explain.json"
    code = cli.main(
        ["bench", "explain", "--batch-size", "2", "--num-steps", "4", "--input-len", "5", "--profile", str(tmp_path),
         "--output-json", str(file), *FLAGS]
    )  # fmt: skip
    shown = capsys.readouterr()
    assert code == 0, shown.err
    assert "matmul" in shown.out and "waiting" in shown.out
    result = json.loads(file.read_text())
    assert result["num_steps"] == 4 and set(result["programs"]) == {"decode_8_forward", "sample_8_full"}
    parts = sum((*result["device_ms"].values(), *result["idle_ms"].values()))
    assert math.isclose(parts, result["step_ms"], rel_tol=1e-6)
    assert list(tmp_path.glob("plugins/profile/*/perfetto_trace.json.gz"))
    assert cli.main(["bench", "explain", "--input-len", "10000", *FLAGS]) == 1
    assert "longer than the model's context" in capsys.readouterr().err


@pytest.mark.slow
def test_latency_and_throughput_explain_their_first_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "latency.json"
    few = ["--batch-size", "2", "--num-iters", "1", "--num-iters-warmup", "0", "--output-json", str(file)]
    traced = ["--explain", "--profile", str(tmp_path), "--profile-steps", "3", "--input-len", "5", "--output-len", "4"]
    assert cli.main(["bench", "latency", *few, *traced, *FLAGS]) == 0
    assert json.loads(file.read_text())["explanation"]["num_steps"] == 3
    assert list(tmp_path.glob("plugins/profile/*/perfetto_trace.json.gz"))
    assert cli.main(["bench", "throughput", "--num-prompts", "3", *traced, *FLAGS]) == 0
    assert capsys.readouterr().out.count("in all, mean of 3 steps") == 2
    assert cli.main(["bench", "throughput", "--explain", "--async-engine", *FLAGS]) == 2
    assert cli.main(["bench", "latency", "--profile-steps", "0", *FLAGS]) == 2
