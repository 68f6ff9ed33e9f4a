"""The times of words: paths of dynamic time warping, and tokens joined to words."""

from __future__ import annotations

import numpy as np
import pytest

from jaxllm.embedded import MODEL_DIR
from jaxllm.engine.features.speech.words import Word, token_times, warped, words_of
from jaxllm.text.tokenizer import load_tokenizer


def cheapest(costs: np.ndarray) -> float:
    """Return the least sum of a monotonic path, cell by cell."""
    total = np.full((costs.shape[0] + 1, costs.shape[1] + 1), np.inf)
    total[0, 0] = 0
    for row in range(1, total.shape[0]):
        for column in range(1, total.shape[1]):
            before = total[row - 1, column - 1], total[row - 1, column], total[row, column - 1]
            total[row, column] = costs[row - 1, column - 1] + min(before)
    return float(total[-1, -1])


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (9, 1), (7, 30), (30, 7), (20, 20)])
def test_a_path_is_monotonic_and_the_cheapest(size: tuple[int, int]) -> None:
    costs = np.random.default_rng(size[0]).standard_normal(size)
    rows, columns = warped(costs)
    assert (rows[0], columns[0]) == (0, 0) and (rows[-1] + 1, columns[-1] + 1) == size
    steps = np.stack([np.diff(rows), np.diff(columns)])
    assert ((steps == 0) | (steps == 1)).all() and steps.any(axis=0).all()
    assert costs[rows, columns].sum() == pytest.approx(cheapest(costs), abs=1e-4)


def test_tokens_begin_where_heads_attend() -> None:
    weights = np.full((3, 5, 100), 1e-4, np.float32)
    for token in range(5):
        weights[:, token, 20 * token : 20 * token + 20] = 0.05
    np.testing.assert_allclose(token_times(weights), [0.0, 0.4, 0.8, 1.2, 1.6], atol=0.021)
    assert len(token_times(weights[:, :0])) == 0


def test_words_are_joined_from_tokens() -> None:
    tokenizer = load_tokenizer(MODEL_DIR)
    text = ' "It was unbelievably cold," said Ann. Zoë left …'
    ids = tokenizer.encode(text, add_special_tokens=False)
    times = [0.1 * number for number in range(len(ids))]
    words = words_of(tokenizer, ids, times, "en", 9.0)
    assert [each.text for each in words] == [*text.split()[:-2], "left…"]
    assert words[0].start == 0.0 and words[-1].end == 9.0
    assert [each.end for each in words[:-1]] == [each.start for each in words[1:]]
    assert words_of(tokenizer, [], [], "en", 1.0) == []
    assert isinstance(words[0], Word)
