"""A stored head with tied embeddings: a copy of the embedding, or a different matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.checkpoints import weights
from jaxllm.commands.conversion import convert
from jaxllm.config import EngineConfig
from jaxllm.errors import UserError
from jaxllm.model import sharding
from jaxllm.setup.model_setup import prepare
from tests.support.checkpoints import CONFIG, random_tensors, write_checkpoint

TIED = CONFIG | {"tie_word_embeddings": True}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _read(folder: Path, tensors: dict[str, np.ndarray], files: int) -> Any:
    write_checkpoint(folder, TIED, tensors, files)
    setup = prepare(EngineConfig(model=str(folder), skip_tokenizer_init=True, num_kv_blocks=8))
    layout = sharding.make_layout(jax.devices(), 1)
    weights.check(folder, setup.spec, setup.family, layout)
    return setup.spec, weights.load(folder, setup.spec, setup.family, layout, "float32")


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize("place", [None, (0, 0), (40, 7), (96, 31)])
def test_a_head_that_differs_anywhere_is_the_models_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: tuple[int, int] | None, files: int
) -> None:
    tensors = random_tensors(TIED)
    head = tensors[EMBEDDING].copy()
    if place is not None:
        head[place] += 1
    spec, params = _read(tmp_path, tensors | {HEAD: head}, files)
    assert spec.tie_embeddings == (place is None) == ("head" not in params.top) == (not caplog.records)
    np.testing.assert_array_equal(params.top["embed"][:97], tensors[EMBEDDING])
    if place is not None:
        np.testing.assert_array_equal(params.top["head"][:97], head)
        assert "lm_head.weight differs from embed_tokens.weight" in caplog.text


@pytest.mark.parametrize("differs", [False, True])
def test_a_converted_head_is_the_models_own(tmp_path: Path, differs: bool) -> None:
    tensors = random_tensors(TIED)
    write_checkpoint(tmp_path / "stored", TIED, tensors | {HEAD: tensors[EMBEDDING] + differs}, 1)
    folder = convert(str(tmp_path / "stored"), tmp_path / "converted")
    setup = prepare(EngineConfig(model=str(folder), skip_tokenizer_init=True, num_kv_blocks=8))
    assert setup.spec.tie_embeddings is not differs
    params = weights.load(folder, setup.spec, setup.family, sharding.make_layout(jax.devices(), 1), "float32")
    if differs:
        np.testing.assert_array_equal(params.top["head"][:97], tensors[EMBEDDING] + 1)


def test_a_head_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    tensors = random_tensors(TIED)
    with pytest.raises(UserError, match=r"lm_head\.weight has shape"):
        _read(tmp_path, tensors | {HEAD: tensors[EMBEDDING][:-1].copy()}, 1)
