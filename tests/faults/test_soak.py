"""A small soak and a small overload; `make soak` and `make overload` run the long ones."""

from __future__ import annotations

import asyncio

import pytest

from tests.faults.overload import REFUSALS, SERVER, measure, quantile
from tests.faults.soak import MOST_UNCOUNTED, faults_of, measure_ledger, slope, soak
from tests.support.serving_process import ServingProcess

SMALL_MOST_BYTES = 16_000.0  # per request; filling pools and caches weighs more in few requests
QUEUE = 4 * 8  # queue limit, in samples, for eight slots


@pytest.mark.ci
def test_a_thousand_requests_with_faults_leave_nothing_and_every_token_is_accounted_for() -> None:
    summary = soak(1000)
    assert not faults_of(summary, SMALL_MOST_BYTES), summary
    assert all(summary.books.ends[reason] for reason in ("stop", "length", "abort", "time_limit", "error"))
    assert summary.books.refused


@pytest.mark.ci
def test_the_ledger_counts_what_the_process_grows_by() -> None:
    tries = []
    for _ in range(3):  # the memory that the allocator keeps varies
        counted, grown = measure_ledger()
        tries.append(counted / grown)
        if abs(counted - grown) <= MOST_UNCOUNTED * grown:
            return
    pytest.fail(f"in none of three tries: {tries}")


def test_a_leak_is_seen() -> None:
    flat = [10**8 + 9999 * (number % 3) for number in range(25)]
    assert slope(flat, 100.0) == pytest.approx(0.0, abs=60.0)
    assert slope([value + 100 * 150 * number for number, value in enumerate(flat)], 100.0) > 100.0


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "least"), [(2.0, 0.4), (15.0, 0.8)], ids=["short", "long"])
def test_ten_times_its_capacity_costs_a_server_little(seconds: float, least: float) -> None:
    """The bounds allow for a busy machine; docs/reliability.md has the figures of an idle one."""
    missed: list[object] = []
    with ServingProcess(*SERVER) as server:
        for _ in range(3):  # other processes may slow one load and not the other
            capacity, rows = asyncio.run(measure(server, seconds, (1, 10)))
            assert capacity > 0
            for row in rows:
                assert set(row.ends) <= {"OK", *REFUSALS}, row
                assert row.most_waiting <= QUEUE + 4, row
            normal, over, burst = rows
            assert over.ends["429"] and over.ends["RESOURCE_EXHAUSTED"]
            bounds = {
                "goodput": over.goodput >= least * max(normal.goodput, capacity),
                "refusal": quantile(over.refusal_ms, 0.5) < 200.0,
                "health": quantile(burst.health_ms, 0.5) < 500.0,
            }
            if all(bounds.values()):
                return
            missed.append((bounds, rows))
    pytest.fail(f"in none of three tries: {missed}")
