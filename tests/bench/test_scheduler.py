"""`bench scheduler` produces the load that it names, and computes its figures correctly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.bench import scheduler
from jaxllm.scheduler import scheduler as core


@pytest.mark.parametrize("load", ["decode", "turnover"])
def test_every_measured_step_is_of_the_load(load: scheduler.Load, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[int, int, int]] = []
    commit = core.commit

    def noted(state: Any, limits: Any, plan: Any, tokens: Any) -> Any:
        after, events = commit(state, limits, plan, tokens)
        steps.append((len(plan.slots), plan.num_decodes, len(events.finished)))
        return after, events

    monkeypatch.setattr(core, "commit", noted)
    calls: list[None] = []
    spent = scheduler.measure(16, load, 300, 5, 0, lambda: calls.append(None))
    assert spent.shape == (300,) and (spent > 0).all() and len(calls) == 305
    measured = steps[-300:]
    assert min(rows for rows, _, _ in measured) >= 15
    if load == "decode":
        assert all(row == (16, 16, 0) for row in measured)
    else:  # outputs of 160 tokens on average, 16 at once: about 30 finish in 300 steps
        assert 15 <= sum(finished for _, _, finished in measured) <= 60


def test_figures_by_hand() -> None:
    figures = scheduler.result({"decode_64": np.arange(1.0, 101.0)})
    assert figures["median_decode_64_us"] == 50.5 and figures["mean_decode_64_us"] == 50.5
    assert figures["p99_decode_64_us"] == pytest.approx(99.01)
    assert scheduler.table(figures, [(64, "decode")]).splitlines()[1].split() == ["64", "decode", "50", "50", "99"]


def test_the_command_holds_a_limit(run_jaxllm: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    target = tmp_path / "core.json"
    short = ("bench", "scheduler", "--num-requests", "8", "--num-iters", "20", "--num-iters-warmup", "1")
    code, out, _ = run_jaxllm(*short, "--output-json", str(target), "--limit-us", "1e9")
    assert code == 0 and [line.split()[:2] for line in out.splitlines()[1:3]] == [["8", "decode"], ["8", "turnover"]]
    result = json.loads(target.read_text())
    assert len(result["samples"]["decode_8_us"]) == 20 and result["environment"]["cpus"] >= 1
    assert result["median_decode_8_us"] == pytest.approx(np.median(result["samples"]["decode_8_us"]), abs=0.01)
    code, _, err = run_jaxllm(*short, "--load", "decode", "--limit-us", "0.001")
    assert code == 1 and err.startswith("jaxllm: error: decode_8 takes") and err.count("\n") == 1
