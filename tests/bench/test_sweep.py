"""`bench sweep`: the whole grid, only what is missing, and a table that tells of failures as well."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxllm.bench import sweep

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stand in for the processes: write a result, but fail at --batch-size=13."""
    seen: list[list[str]] = []

    def run(command: list[str], stdout: Any, **_: Any) -> SimpleNamespace:
        seen.append(command[4:])
        if "--batch-size=13" in command:
            stdout.write("working\njaxllm: error: unlucky\n")
            return SimpleNamespace(returncode=1)
        size = next(int(word.partition("=")[2]) for word in command if word.startswith("--batch-size"))
        target = Path(command[command.index("--output-json") + 1])
        target.write_text(json.dumps({"avg_latency": size / 10, "batch": size, "latencies": [1.0]}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    return seen


def test_a_grid_and_its_command_lines() -> None:
    settings = sweep.grid({"a": ["1", "2"], "b": ["x", "y"]})
    assert settings == [{"a": "1", "b": "x"}, {"a": "1", "b": "y"}, {"a": "2", "b": "x"}, {"a": "2", "b": "y"}]
    assert sweep.grid({}) == [{}]
    cells = sweep.make_cells(["latency", "--n", "2"], [{"a": 1, "on": True, "off": False, "sizes": [3, 4]}], 2)
    assert cells[0].arguments == cells[1].arguments
    assert cells[0].arguments == ("latency", "--n", "2", "--a=1", "--on", "--no-off", "--sizes", "3", "4")
    others = sweep.make_cells(["latency", "--n", "3"], [cells[0].settings], 1)
    assert len({cell.name for cell in (*cells, *others)}) == 3


def test_only_what_is_missing_is_run_again(run_jaxllm: Run, commands: list[list[str]], tmp_path: Path) -> None:
    arguments = ("bench", "sweep", "--out", str(tmp_path / "new"), "--vary", "batch-size=1,13,4", "--num-runs", "2")
    code, out, err = run_jaxllm(*arguments, "--", "latency", "--output-len", "5")
    assert code == 1 and len(commands) == 6 and err.count("failed: exit code 1: jaxllm: error: unlucky") == 2
    assert commands[0][:4] == ["latency", "--output-len", "5", "--batch-size=1"]
    assert [line.split()[:3] for line in out.splitlines()[:4]] == [
        ["batch-size", "run", "avg_latency"], ["1", "0", "0.1"], ["13", "0", "exit"], ["4", "0", "0.4"],
    ]  # fmt: skip
    with (tmp_path / "new" / "summary.csv").open() as stream:
        assert [row["avg_latency"] for row in csv.DictReader(stream)] == ["0.1", "", "0.4"] * 2
    assert json.loads((tmp_path / "new" / "summary.json").read_text())[0]["batch-size"] == "1"
    # Killed in the middle of a cell, and started again: that cell and those that failed.
    done = next((tmp_path / "new").glob("batch-size=4-run1-*.json"))
    done.rename(done.with_suffix(".json.part"))
    commands.clear()
    assert run_jaxllm(*arguments, "--", "latency", "--output-len", "5")[0] == 1
    assert [command[3] for command in commands] == ["--batch-size=13", "--batch-size=13", "--batch-size=4"]
    commands.clear()
    run_jaxllm(*arguments, "--", "latency", "--output-len", "6")
    assert len(commands) == 6, "another command line is another cell"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("working\njaxllm: error: unlucky\n", "jaxllm: error: unlucky"),
        ("====\n2 failed: HTTP 429: full\nwarning: slow\nwrote a.json.part\n", "2 failed: HTTP 429: full"),
        ("Failed requests:  0\nKilled\n", "Killed"),
        ("\n", "no output"),
    ],
)
def test_the_reason_of_a_failure_is_the_last_error(said: str, reason: str) -> None:
    assert sweep.reason_of(said) == reason


def test_settings_of_a_file(run_jaxllm: Run, tmp_path: Path) -> None:
    cells, grid = tmp_path / "cells.json", tmp_path / "grid.yaml"
    cells.write_text('[{"request_rate": 1, "max_concurrency": 8}, {"request_rate": 2}]')
    grid.write_text("request-rate: [1, 2]\nmax-concurrency: 8\n")
    assert sweep.read_params(str(cells)) == [{"request-rate": 1, "max-concurrency": 8}, {"request-rate": 2}]
    assert sweep.read_params(str(grid)) == [
        {"request-rate": 1, "max-concurrency": 8}, {"request-rate": 2, "max-concurrency": 8},
    ]  # fmt: skip
    code, out, _ = run_jaxllm(
        "bench", "sweep", "--out", str(tmp_path / "out"), "--bench-params", str(cells), "--vary", "n=1,2", "--dry-run",
        "--", "throughput",
    )  # fmt: skip
    assert code == 0 and not (tmp_path / "out").exists()
    assert out.splitlines() == [
        "jaxllm bench throughput --request-rate=1 --max-concurrency=8 --n=1",
        "jaxllm bench throughput --request-rate=1 --max-concurrency=8 --n=2",
        "jaxllm bench throughput --request-rate=2 --n=1",
        "jaxllm bench throughput --request-rate=2 --n=2",
    ]


def test_the_results_of_a_server_are_saved_with_its_own_flags(tmp_path: Path) -> None:
    flags = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "x.json.part"]
    assert sweep.output_flags("serve", tmp_path / "x.json.part") == flags


def test_a_real_cell(run_jaxllm: Run, tmp_path: Path) -> None:
    code, out, _ = run_jaxllm(
        "bench", "sweep", "--out", str(tmp_path), "--vary", "num-requests=4", "--",
        "scheduler", "--num-iters", "5", "--num-iters-warmup", "0", "--load", "decode",
    )  # fmt: skip
    assert code == 0 and "median_decode_4_us" in out
