"""`bench compare`: ratios by hand, coverage of the intervals, and differences between settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.bench.compare import Comparison, compare, differences, direction, table
from jaxllm.errors import UserError


def latency_run(latencies: np.ndarray) -> dict[str, Any]:
    shares = (10, 25, 50, 75, 90, 99)
    return {
        "avg_latency": float(latencies.mean()),
        "std_latency": float(latencies.std()),
        "percentiles": {str(share): float(np.percentile(latencies, share)) for share in shares},
        "latencies": latencies.tolist(),
    }


def by_name(comparisons: list[Comparison]) -> dict[str, Comparison]:
    return {one.name: one for one in comparisons}


def test_a_bootstrap_interval_holds_a_known_ratio_as_often_as_it_says() -> None:
    """Log-normal latencies, with means, medians and 90th percentiles in the ratio 0.8."""
    random = np.random.default_rng(5)
    hits = dict.fromkeys(("avg_latency", "percentiles.50", "percentiles.90"), 0)
    rounds = 40
    for _ in range(rounds):
        a = latency_run(np.exp(random.normal(0, 0.3, 60)))
        b = latency_run(0.8 * np.exp(random.normal(0, 0.3, 60)))
        found = by_name(compare([a], [b], resamples=100))
        for name in hits:
            interval = found[name].interval
            assert interval is not None and interval[0] < interval[1] < 1.3
            hits[name] += interval[0] <= 0.8 <= interval[1]
    # The level is 95 %; fewer than 33 hits in 40 rounds happen once in 1,000 times.
    assert min(hits.values()) >= 33, hits


def test_few_runs_a_side_have_intervals_that_hold_the_ratio_as_well() -> None:
    random = np.random.default_rng(6)
    hits, rounds = 0, 300
    for _ in range(rounds):
        a, b = ([{"request_throughput": scale * np.exp(random.normal(0, 0.1))} for _ in range(3)] for scale in (1, 1.5))
        (only,) = compare(a, b)
        assert only.interval is not None
        hits += only.interval[0] <= 1.5 <= only.interval[1]
    assert hits >= 0.92 * rounds


def test_welch_by_hand() -> None:
    """Logarithms (0, 2) and (1, 3): the means differ by 1 and have variance 1; t(2; 97.5 %) is 4.30265."""
    runs = [[{"elapsed_time": float(np.exp(value))} for value in side] for side in ((0, 2), (1, 3))]
    (only,) = compare(*runs)
    assert (only.a, only.b) == pytest.approx((np.exp(1), np.exp(2)))
    assert only.interval == pytest.approx(tuple(np.exp(1 + sign * 4.30265 * 2**0.5) for sign in (-1, 1)), rel=1e-4)


def test_the_gaps_of_a_request_are_drawn_together() -> None:
    """Two kinds of requests, each with equal gaps: independent draws of 2,000 gaps would make the interval far too
    narrow.
    """

    def run(seed: int) -> dict[str, Any]:
        slow = np.random.default_rng(seed).integers(0, 2, 20)
        itls = [[0.01 + 0.02 * kind] * 100 for kind in slow.tolist()]
        mean = 1e3 * float(np.mean(itls))
        return {"mean_itl_ms": mean, "ttfts": [0.1] * 20, "itls": itls, "output_lens": [101] * 20}

    low, high = by_name(compare([run(1)], [run(2)]))["mean_itl_ms"].interval or (0, 0)
    assert high / low > 1.5


def test_figures_of_vllms_details_follow_its_definitions() -> None:
    run = {
        "ttfts": [0.2, 0.4, 9.0],
        "itls": [[0.1, 0.3], [0.1], []],
        "output_lens": [5, 3, 0],  # 5 tokens in 3 messages
        "errors": ["", "", "it broke"],
        "mean_ttft_ms": 300.0,
        "mean_tpot_ms": (400 / 4 + 100 / 2) / 2,
        "median_itl_ms": 100.0,
        "mean_e2el_ms": (600 + 500) / 2,
        "mean_client_queue_time_ms": 3.0,
    }
    found = by_name(compare([run], [run]))
    assert {name for name, one in found.items() if one.interval} == {
        "mean_ttft_ms", "mean_tpot_ms", "median_itl_ms", "mean_e2el_ms",
    }  # fmt: skip
    assert all(one.ratio == 1 for one in found.values())


def test_what_the_details_do_not_say_has_no_interval() -> None:
    run = latency_run(np.array([1.0, 2.0, 3.0])) | {"tokens_per_second": 5.0}
    other = latency_run(np.array([1.0, 2.0, 4.0])) | {"tokens_per_second": 4.0, "avg_latency": 77.0}
    found = by_name(compare([run], [other]))
    assert found["tokens_per_second"].interval is None and found["tokens_per_second"].ratio == 0.8
    assert "one value a side" in table(list(found.values()))
    assert found["avg_latency"].interval is None  # 77 is not the mean of its latencies


def test_that_a_side_has_one_value_is_said_once() -> None:
    a, b = ({"avg_latency": scale, "tokens_per_second": scale, "elapsed_time": scale} for scale in (1.0, 2.0))
    *rows, last = table(compare([a], [b])).splitlines()
    assert len(rows) == 4 and [row.split()[-1] for row in rows[1:]] == ["lower", "higher", "lower"]
    assert last.startswith("–: no interval: one value a side; ") and "--a, --b" in last and "--save-detailed" in last
    a, b = ([{"avg_latency": scale * wave} for wave in (1.0, 1.1)] for scale in (1.0, 2.0))
    assert table(compare(a, b)).endswith("lower: B is worse")


def test_which_way_is_better_and_who_is() -> None:
    for name in ("request_throughput", "tokens_per_second", "max_output_tokens_per_s", "request_goodput"):
        assert direction(name) == "higher"
    for name in ("p99_ttft_ms", "avg_latency", "percentiles.90", "elapsed_time", "median_decode_64_us", "failed"):
        assert direction(name) == "lower"
    for name in ("num_prompts", "request_rate", "total_output_tokens", "max_concurrency", "environment.cpus"):
        assert direction(name) is None
    faster = Comparison("avg_latency", 1.0, 0.5, "lower", (0.4, 0.6), "")
    assert faster.verdict == "B is better"
    assert faster._replace(better="higher").verdict == "B is worse"
    assert faster._replace(interval=(0.9, 1.1)).verdict == "no difference shown"
    assert faster._replace(a=0.0).ratio is None


def test_what_differs_beside_the_figures_is_listed() -> None:
    a = {"elapsed_time": 1.0, "num_requests": 8, "date": "x", "environment": {"commit": "a", "date": "1", "cpus": 2}}
    b = {"elapsed_time": 2.0, "num_requests": 9, "date": "y", "environment": {"commit": "b", "date": "2", "cpus": 2}}
    assert differences([a], [b]) == ["num_requests: 8 in A, 9 in B", "environment.commit: a in A, b in B"]
    assert differences([a, a], [a]) == []


def test_results_of_different_benchmarks_are_refused() -> None:
    with pytest.raises(UserError, match="no figure in common"):
        compare([{"avg_latency": 1.0}], [{"request_throughput": 2.0}])


def test_the_command(run_jaxllm: Any, tmp_path: Path) -> None:
    for name, scale in (("a", 1.0), ("b", 0.5)):
        run = latency_run(scale * np.linspace(1, 2, 30)) | {"environment": {"commit": name}}
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    a, b, c = (str(tmp_path / name) for name in ("a.json", "b.json", "c.json"))
    code, out, err = run_jaxllm("bench", "compare", a, b, "--output-json", c)
    assert code == 0 and "B is better" in out and "environment.commit: a in A, b in B" in err
    made = json.loads(Path(c).read_text())["figures"]["avg_latency"]
    assert made["ratio"] == pytest.approx(0.5) and made["interval"][0] < 0.5 < made["interval"][1]
    code, out, _ = run_jaxllm("bench", "compare", "--a", a, a, "--b", b, b)
    assert code == 0 and "0.500 – 0.500" in out
    Path(c).write_text("[1, 2")
    for arguments in ((a,), (a, c), (a, "--b", b), (a, str(tmp_path / "none.json")), (a, b, "--confidence", "2")):
        code, out, err = run_jaxllm("bench", "compare", *arguments)
        assert code in (1, 2) and err.count("\n") == 1 and err.startswith("jaxllm: error: "), arguments
