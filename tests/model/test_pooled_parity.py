"""Models that embed and classify against recorded results of transformers; torch is not needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.checkpoints.pooler_files import GENERATING
from jaxllm.families.families import FAMILIES
from tests.parity.make_pooled import CASES, STORED
from tests.parity.pooled_driver import PooledDriver
from tests.support.paths import GOLDEN_POOLED


def agrees(folder: Path, inputs: list[dict[str, list[int]]], expected: Any, shards: int = 1) -> None:
    """Compare a folder's model with recorded hidden states and label numbers."""
    driver = PooledDriver(folder, shards, runner="pooling")
    for number, one in enumerate(inputs):
        hidden, result = driver.run(one["input_ids"], one.get("token_type_ids"))
        np.testing.assert_allclose(hidden, expected[f"hidden_{number}"], rtol=0, atol=1e-5)
        if f"logits_{number}" in expected:
            np.testing.assert_allclose(result, expected[f"logits_{number}"], rtol=0, atol=1e-4)
        else:
            assert not driver.pooler.labels
            np.testing.assert_array_equal(result, hidden[-1 if driver.pooler.pooling == "last" else 0])


QUICK = ("bert-labels", "gemma3", "qwen3-labels")  # in `make test`, on one device


@pytest.mark.parametrize(
    ("case", "shards"),
    [
        pytest.param(case, shards, marks=() if case in QUICK and shards == 1 else pytest.mark.ci)
        for case in STORED
        for shards in (1, 2)
    ],
)
def test_hidden_states_and_labels_are_those_of_transformers(case, shards):
    with np.load(GOLDEN_POOLED / case / "golden.npz") as expected:
        agrees(GOLDEN_POOLED / case, json.loads((GOLDEN_POOLED / case / "inputs.json").read_text()), expected, shards)


def test_every_architecture_that_pools_has_a_case():
    covered = {name for name, _ in CASES.values()}
    assert covered == {name for family in FAMILIES for name in family.architectures if not name.endswith(GENERATING)}
