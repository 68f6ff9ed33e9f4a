"""Models that embed and classify against transformers, computed here and now; needs torch, as test_live.py does."""

from __future__ import annotations

import numpy as np
import pytest

from tests.model.test_pooled_parity import agrees
from tests.parity import make_pooled

pytestmark = pytest.mark.parity

FRESH_SEED = 13


@pytest.mark.parametrize("case", make_pooled.CASES)
def test_fresh_models_agree(case, tmp_path):
    model, inputs = make_pooled.make_model(case, FRESH_SEED), make_pooled.make_inputs(case, FRESH_SEED)
    make_pooled.save(model, tmp_path)
    agrees(tmp_path, inputs, make_pooled.record(model, inputs))


@pytest.mark.parametrize("case", make_pooled.STORED)
def test_golden_files_are_what_transformers_computes(case):
    inputs = make_pooled.make_inputs(case, make_pooled.SEED)
    again = make_pooled.record(make_pooled.make_model(case, make_pooled.SEED), inputs)
    with np.load(make_pooled.GOLDEN_POOLED / case / "golden.npz") as stored:
        assert stored.keys() == again.keys()
        for name in again:
            np.testing.assert_allclose(again[name], stored[name], rtol=0, atol=5e-5)
