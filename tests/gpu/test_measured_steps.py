"""The sum of kernels' times reproduces the steps measured on an H100."""

from __future__ import annotations

import pytest

from tests.gpu import measured_steps
from tests.gpu.measured_steps import ATTEND, STEPS, TOLERANCE

pytestmark = pytest.mark.ci


def test_a_step_takes_what_was_measured():
    found = [(one, ms) for one, ms in measured_steps.compared()]
    assert len(found) == len(STEPS) == 16
    for one, ms in found:
        assert abs(one.difference(ms)) <= TOLERANCE, f"{one.name}: {one.milliseconds} measured, {ms:.2f} computed"


def test_constants_that_nobody_measured_are_seen(monkeypatch):
    """Visits of 0.45 us, and products at the speed of memory, as in earlier versions of this table."""
    weights = measured_steps.floor(measured_steps.llama(), [0]) * 1e3
    fast = ({1: weights / 32, 64: weights / 32},)
    monkeypatch.setitem(measured_steps.PRODUCTS, "a9dbdfd", fast)
    monkeypatch.setitem(ATTEND, "a9dbdfd", ATTEND["a9dbdfd"]._replace(visit=0.45))
    wrong = [one.name for one, ms in measured_steps.compared() if abs(one.difference(ms)) > TOLERANCE]
    assert "1 of 1k" in wrong
