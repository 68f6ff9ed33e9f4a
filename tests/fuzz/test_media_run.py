"""Hostile videos and sounds of `media_run.py`: a few hundred by default, 100,000 in `make fuzz`."""

from __future__ import annotations

import os

import pytest

from tests.fuzz import FEW, MANY, media_run
from tests.fuzz.media_draws import MEDIA, draw


@pytest.mark.parametrize("count", [2 * FEW, pytest.param(10 * MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("medium", MEDIA)
def test_hostile_media_are_taken_or_refused_by_name(medium: str, count: int) -> None:
    totals = media_run.run(medium, 0, count, workers=1 if count < 10_000 else os.cpu_count() or 1)
    assert totals.count == count and not totals.failures
    assert count / 10 < totals.outcomes["taken"] < count / 2


def test_what_ends_a_process_is_found() -> None:
    """Test that a crash is reported with the input's number, and that later inputs are read."""
    totals = media_run.run("crash", 5, 9)
    (failure,) = totals.failures
    assert failure.startswith("input 7 (crash): the process ended with -6") and totals.count == 4


def test_an_input_follows_from_its_number() -> None:
    for medium in MEDIA:
        assert [draw(medium, number) for number in range(20)] == [draw(medium, number) for number in range(20)]
