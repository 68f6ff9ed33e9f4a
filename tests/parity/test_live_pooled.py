"""Models that embed and classify against transformers, computed at test time; needs torch, as test_live.py does."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxllm.checkpoints import pooler_files
from jaxllm.text.tokenizer import load_tokenizer
from tests.model.test_pooled_parity import agrees
from tests.parity import make_pooled
from tests.parity.pooled_driver import PooledDriver

pytestmark = pytest.mark.parity

FRESH_SEED = 13


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (number % 2 > 0)) for number, case in enumerate(make_pooled.CASES)],
)
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


@pytest.mark.parametrize(
    ("name", "is_older"),
    [
        pytest.param(name, is_older, marks=[pytest.mark.slow] * (is_older != number % 2))
        for number, name in enumerate(make_pooled.MODULES)
        for is_older in (False, True)
    ],
)
def test_embeddings_are_those_of_sentence_transformers(name, is_older, tmp_path):
    model = make_pooled.save_modules(name, tmp_path, FRESH_SEED, is_older)
    folder = tmp_path / "model"
    driver, tokenizer, most = PooledDriver(folder), load_tokenizer(folder), pooler_files.most_tokens(folder)
    assert most == (20 if is_older else 32)
    for text in make_pooled.TEXTS:
        ours, theirs = driver.embed(tokenizer.encode_first(text, most)), model.encode(text)
        assert np.linalg.norm(theirs) > 0.5
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("activation", [None, "Identity", "Sigmoid"])
@pytest.mark.parametrize("case", make_pooled.CROSS_ENCODERS)
def test_scores_are_those_of_cross_encoders(case, activation, tmp_path):
    import torch
    from sentence_transformers import CrossEncoder

    make_pooled.save(make_pooled.make_model(case, FRESH_SEED), tmp_path / "plain")
    make_pooled.save_tokenizer(tmp_path / "plain", has_types=case.startswith("bert") and activation is None)
    chosen = None if activation is None else getattr(torch.nn, activation)()
    model = CrossEncoder(str(tmp_path / "plain"), activation_fn=chosen, device="cpu")
    model.save(str(tmp_path / "model"))
    driver, tokenizer = PooledDriver(tmp_path / "model"), load_tokenizer(tmp_path / "model")
    for pair in itertools.pairwise(text for text in make_pooled.TEXTS if len(text) < 100):
        ids, types = tokenizer.encode_pair(*pair)
        scores = {"none": lambda x: x, "sigmoid": lambda x: 1 / (1 + np.exp(-x))}[driver.pooler.activation](
            driver.run(ids, types)[1]
        )
        np.testing.assert_allclose(scores, np.ravel(model.predict(pair)), rtol=0, atol=1e-4)
