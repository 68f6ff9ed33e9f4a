"""`bench kernels` measures every implementation of every operation and detects wrong results."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.bench import kernels
from pallas_kernels.native import build

# Implementations of attention on a CPU, in the order of the report.
NATIVE = () if build.refusal() else ("native",)
OF_A_CPU = {
    "paged_decode": ("xla", "xla_lanes", "pallas", *NATIVE),
    "paged_prefill": ("xla", *NATIVE),
}
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def small_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(kernels, "READ_ROWS", 64)
    monkeypatch.setattr(kernels, "HEADS", {"tiny": (4, 2, 8)})


@pytest.mark.ci
def test_every_implementation_of_every_operation(run_jaxllm: Run, tmp_path: Path) -> None:
    target = tmp_path / "kernels.json"
    code, out, _ = run_jaxllm(
        "bench", "kernels", "--decode", "2x20", "--prefill", "2x20", "--num-iters", "3", "--output-json", str(target)
    )
    result = json.loads(target.read_text())
    names = {
        f"{operation}_tiny_2x20_{implementation}"
        for operation, implementations in OF_A_CPU.items()
        for implementation in implementations
    }
    assert code == 0 and set(result["max_difference"]) == names and len(names) >= 4
    assert all(difference < 1e-5 for difference in result["max_difference"].values())
    assert result["max_difference"]["paged_decode_tiny_2x20_xla"] == 0
    name = "paged_decode_tiny_2x20_xla_lanes"
    assert result[f"median_{name}_us"] == np.median(result["samples"][f"{name}_us"])
    assert " kernel " in out.splitlines()[1] and " of the bandwidth " in out.splitlines()[1]
    for operation, implementations in OF_A_CPU.items():
        assert sum(operation in line for line in out.splitlines()) == len(implementations)


def test_the_reference_is_attention() -> None:
    """With queries of zeros, attention returns the mean of the values."""
    (case,) = kernels.make_cases("float32", [(2, 5)], [])
    q, _, values, tables, *_ = case.arrays
    output = np.asarray(case.call("xla", q * 0, *case.arrays[1:]))
    for row in range(2):
        seen = np.asarray(values)[int(tables[row, 0]), :, :5].mean(1)  # [K, C]
        np.testing.assert_allclose(output[row], np.repeat(seen, 2, axis=0), atol=1e-6)
    # Keys and values of 2 rows, 5 tokens, 2 heads of 8 in 4 bytes; queries and outputs of 4 heads.
    assert case.num_bytes == 2 * (2 * 5 * 2 * 8 * 4) + 2 * (2 * 4 * 8 * 4)


@pytest.mark.ci
def test_one_that_is_wrong_or_slow_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = kernels.make_cases("float32", [(2, 5)], [])

    def call(implementation: str, *arrays: Any) -> Any:
        return case.call("xla", *arrays) + (0.5 if implementation == "xla_lanes" else 0)

    further = len(NATIVE)
    turn = [2.0, 4.0, 4.0, 8.0, *[8.0] * further]  # the sum and all implementations
    seconds = iter([1.0, *turn * 3])
    monkeypatch.setattr(kernels, "seconds_of", lambda *_: next(seconds))
    rounds: list[None] = []
    measured, reads = kernels.measure([case._replace(call=call)], 3, lambda: rounds.append(None))
    assert [one.implementation for one in measured] == [*OF_A_CPU["paged_decode"]] and len(rounds) == 3
    assert [one.max_difference for one in measured] == pytest.approx([0, 0.5, 0, *[0] * further], abs=1e-6)
    assert reads.tolist() == [kernels.READ_BYTES / 2] * 3
    share = case.num_bytes / 4 / (kernels.READ_BYTES / 2)
    shares = [share, share, share / 2, *[share / 2] * further]
    assert [one.bandwidth_share for one in measured] == pytest.approx(shares)
